"""Time: per step, waiting for data, compiling, and what watching itself costs."""
