"""An averaged model that gets weights and running statistics."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "average_without_buffers.py"), run_name="__main__")
