"""Workers that are made anew for each pass, and know the epoch."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "workers_never_hear.py"), run_name="__main__")
