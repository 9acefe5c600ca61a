"""The record of a run: written while it goes on, read back, followed, asked, shared and pruned."""
