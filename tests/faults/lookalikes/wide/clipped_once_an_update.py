"""Accumulated gradients, clipped once before the step."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "clipped_each_micro_batch.py"), run_name="__main__")
