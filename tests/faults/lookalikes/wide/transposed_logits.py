"""Logits (batch, classes, time), transposed before they are flattened."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "view_for_transpose.py"), run_name="__main__")
