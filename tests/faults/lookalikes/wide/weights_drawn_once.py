"""Weights are initialised once."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "weights_drawn_each_epoch.py"), run_name="__main__")
