"""A schedule with milestones in epochs, stepped per epoch."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "epoch_schedule_per_batch.py"), run_name="__main__")
