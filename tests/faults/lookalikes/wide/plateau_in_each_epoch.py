"""ReduceLROnPlateau is stepped after each epoch."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "plateau_in_each_batch.py"), run_name="__main__")
