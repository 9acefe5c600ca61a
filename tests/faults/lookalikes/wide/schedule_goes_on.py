"""A schedule that is resumed with its optimizer."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "schedule_begins_again.py"), run_name="__main__")
