"""Gradients: norms, counts, clipping, and whether they are used once, in order, and then cleared."""
