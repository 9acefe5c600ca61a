"""The softmax of attention runs over the keys."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "attention_over_queries.py"), run_name="__main__")
