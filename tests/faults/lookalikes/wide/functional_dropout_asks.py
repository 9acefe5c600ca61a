"""Dropout as a function that asks for self.training."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "functional_dropout.py"), run_name="__main__")
