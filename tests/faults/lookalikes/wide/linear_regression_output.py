"""A regression that ends with a linear layer."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "relu_before_regression.py"), run_name="__main__")
