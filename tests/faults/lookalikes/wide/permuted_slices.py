"""Rows sliced in a random order."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "sorted_slices.py"), run_name="__main__")
