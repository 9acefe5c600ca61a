"""LoRA as it is meant: one factor of zeros."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "two_zero_factors.py"), run_name="__main__")
