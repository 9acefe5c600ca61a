"""The last token of each row is read, not the last position."""

import runpy
import sys
from pathlib import Path

sys.argv.append("--healthy")
runpy.run_path(str(Path(__file__).resolve().parents[2] / "own" / "read_at_padding.py"), run_name="__main__")
