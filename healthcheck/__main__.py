"""``python -m healthcheck``. Prefer the console command: see docs on name clashes."""

import os
import sys


def _leave_the_folder() -> None:
    """Import nothing from the working directory, which ``python -m`` has put first on the search path.

    The console command has the folder of the program there. What is run (``healthcheck run``) gets its own.
    """
    try:
        here = os.getcwd()
    except OSError:  # the folder is gone
        here = ""
    if not getattr(sys.flags, "safe_path", False) and sys.path and sys.path[0] in ("", here):
        sys.path[0] = os.path.dirname(sys.executable)


if __name__ == "__main__":
    _leave_the_folder()
    from healthcheck.cli import main

    raise SystemExit(main())
