"""Any training script, unmodified: run in this process, with torch telling what it does."""
