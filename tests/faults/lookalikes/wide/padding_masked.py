"""Padding that the mask of attention hides."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "padding_attended.py"), run_name="__main__")
