"""The same attention with a mask that hides padding."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "mask_hides_nothing.py"), run_name="__main__")
