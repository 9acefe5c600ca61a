"""An actor and a critic whose advantages are detached."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "advantage_not_detached.py"), run_name="__main__")
