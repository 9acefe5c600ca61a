"""Phases of training and validation in one loop."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "updates_in_validation.py"), run_name="__main__")
