"""Accumulated gradients, and a schedule as long as the updates."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "schedule_in_micro_batches.py"), run_name="__main__")
