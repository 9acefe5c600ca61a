"""Averaged weights with a decay of 0.99."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "average_follows_at_once.py"), run_name="__main__")
