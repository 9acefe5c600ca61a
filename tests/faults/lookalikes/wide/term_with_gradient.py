"""The same term with its gradient, and a constant that is none of the data."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "term_is_a_number.py"), run_name="__main__")
