"""Values that arrive later: deferred numbers, the copy of a step's numbers to the host, kernels of our own."""
