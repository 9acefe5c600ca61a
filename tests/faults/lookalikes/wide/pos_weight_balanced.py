"""pos_weight = negatives / positives."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "pos_weight_inverted.py"), run_name="__main__")
