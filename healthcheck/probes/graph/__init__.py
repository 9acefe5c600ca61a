"""Torch's graph behind a loss, read and never run: its nodes, what they kept, layers of attention in it."""
