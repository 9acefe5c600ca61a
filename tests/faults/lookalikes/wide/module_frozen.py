"""The encoder is frozen with requires_grad_(False)."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "module_requires_grad.py"), run_name="__main__")
