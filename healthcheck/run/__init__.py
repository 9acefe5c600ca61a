"""One run: the session and the parts that it owns."""
