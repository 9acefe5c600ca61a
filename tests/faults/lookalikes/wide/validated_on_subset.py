"""Two subsets of one data set that do not overlap."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "validated_on_training_set.py"), run_name="__main__")
