"""The loss: its value, what sort it is, how it was put together, which way it is trained."""
