"""A group norm of several channels a group."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "norm_of_one_value.py"), run_name="__main__")
