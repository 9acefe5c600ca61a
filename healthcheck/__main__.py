"""``python -m healthcheck``. Prefer the console command: see docs on name clashes."""

from healthcheck.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
