"""A new model family from its config.json: the files, the two arms, and the proof that they run."""
