"""The checkpoint is loaded last."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "weights_drawn_after_load.py"), run_name="__main__")
