"""Judging recorded runs: the same engine and the same report as in a live run, other doors."""
