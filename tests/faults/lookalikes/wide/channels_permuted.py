"""Pictures whose channels were permuted to the front."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "channels_by_view.py"), run_name="__main__")
