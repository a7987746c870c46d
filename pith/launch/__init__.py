"""Ranks: started here, or joined where torchrun or SLURM started them; and how they end."""
