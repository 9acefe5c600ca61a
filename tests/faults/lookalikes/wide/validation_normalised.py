"""Training and validation normalised alike."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "validation_not_normalised.py"), run_name="__main__")
