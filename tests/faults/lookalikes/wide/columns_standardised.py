"""The same table, standardised."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "column_in_thousands.py"), run_name="__main__")
