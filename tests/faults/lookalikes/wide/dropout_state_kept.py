"""The same with the random state kept."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "dropout_drawn_twice.py"), run_name="__main__")
