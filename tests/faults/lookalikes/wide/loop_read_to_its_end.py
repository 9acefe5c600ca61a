"""A loop that reads its loader to the end."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "break_left_in_the_loop.py"), run_name="__main__")
