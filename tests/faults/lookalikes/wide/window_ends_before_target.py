"""A window that ends before the value to be predicted."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "window_ends_with_target.py"), run_name="__main__")
