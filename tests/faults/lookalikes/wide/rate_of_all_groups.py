"""The same schedule for all groups."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "rate_of_one_group.py"), run_name="__main__")
