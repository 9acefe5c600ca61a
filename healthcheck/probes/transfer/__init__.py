"""From the device to the host without waiting: what is late, how it travels, what it costs."""
