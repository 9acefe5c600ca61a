"""Heads that are split by a view and a transpose."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "heads_by_view.py"), run_name="__main__")
