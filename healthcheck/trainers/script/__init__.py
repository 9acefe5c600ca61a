"""Any training script, unmodified: run in this process, with torch showing what it does."""
