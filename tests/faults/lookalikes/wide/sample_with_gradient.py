"""The same model with rsample()."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "sample_cuts_gradient.py"), run_name="__main__")
