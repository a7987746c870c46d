"""The commands, one file each. torch is imported inside a command, never at the top of a file."""
