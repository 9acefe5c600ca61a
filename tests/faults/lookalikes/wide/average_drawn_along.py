"""The same average with the right sign."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "average_pushed_away.py"), run_name="__main__")
