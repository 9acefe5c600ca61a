"""The rules engine: samples in, transitions and alerts out. Pure Python, no I/O, no hidden clock."""
