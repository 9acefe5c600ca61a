"""A policy gradient that keeps its policy from being certain too early."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "entropy_minimised.py"), run_name="__main__")
