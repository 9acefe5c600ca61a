"""What ``make demo`` runs: a script that dies of NaN, watched, then the same script on sound data.

Exits 0 only if both end as promised: the first is stopped with exit 1, its evidence is on the
disk and ``healthcheck why`` explains it; the second goes through with exit 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/gpt_text.py"
CLEAN = "examples/data/reads-clean.csv"
RUNS = Path(os.environ.get("HEALTHCHECK_RUNS") or ROOT / "healthcheck-runs")


class Broken(Exception):
    """The demo did not end as promised; the message says in which point."""


def command(*args: str) -> tuple[int, str]:
    """Run ``healthcheck ARGS`` from the repository root; its output is shown as it comes and returned."""
    beside = Path(sys.executable).with_name("healthcheck")
    head = [str(beside)] if beside.exists() else [sys.executable, "-m", "healthcheck"]
    print(f"\n$ healthcheck {' '.join(args)}", flush=True)
    lines = []
    with subprocess.Popen(
        [*head, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def expect(truth: bool, what: str) -> None:
    if not truth:
        raise Broken(what)


def newest_record() -> Path | None:
    latest = RUNS / "latest"
    return latest.resolve() if latest.exists() else None


def sick_run() -> None:
    before = newest_record()
    code, output = command("run", SCRIPT)
    expect(code == 1, f"the run that meets NaN should exit 1, not {code}")
    expect("loss-not-finite" in output, "the alert should name loss-not-finite")
    expect("Traceback" not in output, "a deliberate stop should not look like a crash")
    record = newest_record()
    expect(record is not None and record != before, f"the run should have left a record in {RUNS}")
    assert record is not None
    print(f"\n# that exited {code}. What it left behind, in {RUNS.name}/latest:")
    evidence = False
    for path in sorted(record.rglob("*")):
        if path.is_file():
            evidence = evidence or "alerts" in path.relative_to(record).parts[:-1]
            print(f"    {path.relative_to(record).as_posix():40} {path.stat().st_size:>9,} bytes")
    expect(evidence, "there should be evidence under alerts/")

    code, output = command("why")
    expect(code == 0 and "loss-not-finite" in output, "`healthcheck why` should explain loss-not-finite and exit 0")


def sound_run() -> None:
    code, _ = command("run", SCRIPT, "--weights", CLEAN)
    expect(code == 0, f"the healthy run should exit 0, not {code}")
    print(f"\n# that exited {code}.")


def main() -> int:
    try:
        sick_run()
        sound_run()
    except Broken as problem:
        print(f"\ndemo: BROKEN: {problem}", file=sys.stderr)
        return 1
    print("\ndemo: as promised: the sick run was caught (exit 1), the sound one went through (exit 0)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
