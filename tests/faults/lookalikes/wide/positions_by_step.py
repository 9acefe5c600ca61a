"""Positions of the tokens in their row, added to them."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "positions_by_row.py"), run_name="__main__")
