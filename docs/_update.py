"""Put the real output of ``make demo`` into the README's picture.

    python docs/_update.py            run the demo's first command and rewrite the picture
    python docs/_update.py --check    exit 1 if the picture is not what the command prints

The picture stands between the two marks in README.md. What differs from run to run (times, the
share of time that watching cost, how many rules had time to be judged) is kept as it was when only
that differs, but not when a rule more or less makes it another picture; the line of a machine so slow that the budget leaves steps out is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- demo: begin -->\n", "<!-- demo: end -->\n"
TYPED = "healthcheck run examples/gpt_text.py"


def stderr_of_the_demo() -> str:
    """What the watched run of the demo says on stderr: all that is ours and nothing of the script's."""
    beside = Path(sys.executable).with_name("healthcheck")
    with tempfile.TemporaryDirectory() as runs:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
        env |= {"HEALTHCHECK_RUNS": str(Path(runs) / "healthcheck-runs"), "NO_COLOR": "1"}
        result = subprocess.run(
            [beside, *TYPED.split()[1:]], cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8"
        )
        if result.returncode != 1:
            raise SystemExit(f"the demo's run exited {result.returncode}, not 1\n{result.stderr}")
        return result.stderr.replace(str(Path(runs)) + os.sep, "")


def picture(stderr: str) -> str:
    lines = [
        line.rstrip() for line in stderr.splitlines() if not line.startswith("healthcheck: to keep within the budget ")
    ]
    return "\n".join(["```text", f"$ {TYPED}", *lines, "```"]) + "\n"


def steady(text: str) -> str:
    """The picture without what differs between two runs of the same code."""
    text = re.sub(r"\b\d+(\.\d+)? ?(%|MiB|MB|kB|KB|KiB|bytes)", "N", text)
    text = re.sub(r"\b(\d+ h )?(\d+ m )?\d+(\.\d+)? ?m?s\b", "T", text)
    text = re.sub(r"\d+ of \d+ checks", "N of N checks", text)
    text = re.sub(r"\d{4}-\d{4}-[\w-]+", "RUN", text)
    return re.sub(r"[ \t]+", " ", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Update the picture in README.md from a real run.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the picture is stale")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"README.md has no place for the picture ({BEGIN.strip()} ... {END.strip()})")
    before, rest = text.split(BEGIN, 1)
    shown, after = rest.split(END, 1)
    now = picture(stderr_of_the_demo())
    if steady(now) == steady(shown):
        return 0
    if check:
        print(f"README.md shows another picture than `{TYPED}` gives; run: python docs/_update.py", file=sys.stderr)
        return 1
    README.write_text(before + BEGIN + now + END + after, encoding="utf-8")
    print("README.md: picture updated")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
