"""SimSiam with its stop-gradient."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "no_stop_gradient.py"), run_name="__main__")
