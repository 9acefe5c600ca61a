"""The version of this package, for everything that writes it down. The same as in `pyproject.toml`: a test compares."""

VERSION = "0.1.0"
