"""A body that is frozen for the second training of a script."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "freeze_mistyped.py"), run_name="__main__")
