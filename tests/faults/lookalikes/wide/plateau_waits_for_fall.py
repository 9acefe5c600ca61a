"""mode='min' for a loss."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "plateau_waits_for_rise.py"), run_name="__main__")
