"""Updates after each group of micro-batches."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "update_condition_inverted.py"), run_name="__main__")
