"""``python -m healthcheck_performance profile train.py``: our commands where the distribution is not installed."""

from __future__ import annotations

import sys

from healthcheck_performance.command import main
from healthcheck_performance.lighthouse import lighthouse

COMMANDS = {"profile": main, "lighthouse": lighthouse}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        sys.exit(f"python -m healthcheck_performance COMMAND ...; there are {', '.join(COMMANDS)}")
    sys.exit(COMMANDS[name](sys.argv[2:]))
