"""The seed is set once."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "seed_in_each_step.py"), run_name="__main__")
