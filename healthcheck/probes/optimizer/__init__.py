"""Optimizers: learning rates and schedules, their state, updates that are skipped or never come."""
