"""A gradient penalty with its graph."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "penalty_without_graph.py"), run_name="__main__")
