"""Memory of the device and of the process: now, at the points of the loop, and how long it lasts."""
