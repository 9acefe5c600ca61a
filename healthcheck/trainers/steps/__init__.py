"""How a training loop is seen: one step machine, and the sources that feed it."""
