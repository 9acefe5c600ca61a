"""Runs that go on from a checkpoint: detectors go on with them, and the first steps are compared."""
