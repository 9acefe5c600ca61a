"""Our pack beside other packages that read training logs, on the same recorded runs.

    python -m venv v && v/bin/pip install numpy pandas scipy pyyaml click rich
    for p in losslint trainspotter runmedic trainproof gradsnitch; do v/bin/pip install --no-deps --target pk/$p $p; done
    python benchmarks/peers.py --python v/bin/python --packages pk                                  # on ../shared/corpus
    python benchmarks/peers.py --python v/bin/python --packages pk --corpus ../shared/corpus2

Keep the environment outside the repository. Each package runs at its defaults through the adapters of ``../shared/peerbench`` on each run
of the corpus, normalised to step, loss, eval_loss, learning_rate and grad_norm. Two scores: *said*: anything at warning or above,
whenever (a package that gives no step has only this one); *in window*: the first such finding lies between one sample before the
onset window and its end, whatever it is called. Ours is given both ways too, and once more with the right kind asked for.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from detection import run_corpus
from scoring import CORPUS, Found, labels, score

from healthcheck.cli.replay import Given, judge_of
from healthcheck.readers.base import UnreadableRunError

ADAPTERS = CORPUS.parent / "peerbench" / "offline_adapters.py"
PACKAGES = ("trainspotter", "trainproof", "gradsnitch", "runmedic", "losslint")
COLUMNS = {"loss": "loss", "eval.loss": "eval_loss", "lr": "learning_rate", "grad_norm": "grad_norm"}
"""Our series -> the names that the adapters expect."""


@dataclass(slots=True)
class PeerResult:
    """What one package said of all runs."""

    name: str
    version: str
    seconds: float = 0.0
    said: int = 0
    said_high: int = 0
    dated: bool = False
    in_window: int = 0
    in_window_high: int = 0
    healthy_warned: int = 0
    healthy_error: int = 0
    before: int = 0
    crashed: list[str] = field(default_factory=list)


def normalise(given: Given, corpus: Path, entry: Mapping[str, Any], folder: Path) -> dict[str, list[int]]:
    """Write one run as ``metrics.csv`` and ``metrics.jsonl``; returns the steps of its series."""
    series = _read(given, corpus / entry["file"])
    rows: dict[int, dict[str, float]] = {}
    for name, column in COLUMNS.items():
        found = series.get(name) or _first_of(name, series)
        for step, value in zip(found.steps, found.values, strict=True) if found is not None else ():
            rows.setdefault(step, {})[column] = value
    present = [c for c in COLUMNS.values() if any(c in row for row in rows.values())]
    folder.mkdir()
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *present])
        for step, row in sorted(rows.items()):
            writer.writerow([step, *(row.get(c, "") for c in present)])
    with (folder / "metrics.jsonl").open("w") as lines:
        for step, row in sorted(rows.items()):
            lines.write(json.dumps({"step": step, **row}) + "\n")
    return {name: list(column.steps) for name, column in series.items()}


def _read(given: Given, path: Path) -> Mapping[str, Any]:
    try:
        return given.read(str(path)).series()
    except UnreadableRunError:  # nobody is shown anything of it
        return {}


def _first_of(name: str, series: Mapping[str, Any]) -> Any:
    """The longest of several losses, where there is no plain one: critic, discriminator, several evaluation sets."""
    several = [column for key, column in series.items() if key.startswith(f"{name}[")]
    return max(several, key=lambda column: len(column.steps), default=None)


def run_package(
    name: str,
    python: str,
    packages: Path,
    entries: Sequence[Mapping[str, Any]],
    folders: Path,
    steps: Mapping[str, dict[str, list[int]]],
) -> PeerResult:
    result = PeerResult(name, _version(packages / name, name))
    start = time.perf_counter()
    done = subprocess.run(
        [python, str(ADAPTERS), name, *(str(folders / e["id"]) for e in entries)],
        env={**os.environ, "PEERS": str(packages.resolve()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    result.seconds = time.perf_counter() - start
    answers = {answer["run"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    for entry in entries:
        answer = answers.get(entry["id"])
        if answer is None or "error" in answer:
            result.crashed.append(entry["id"])
        words = {"warn": "warning", "error": "error"}
        found = [
            Found(f["kind"], f["step"], words.get(f["sev"], "info"), frozenset({entry["kind"]}))
            for f in (answer or {}).get("findings", [])
        ]
        count(result, entry, found, steps[entry["id"]])
    return result


def count(result: PeerResult, entry: Mapping[str, Any], found: list[Found], steps: Mapping[str, list[int]]) -> None:
    """Add one run to a result."""
    loud = [f for f in found if f.severity in ("warning", "error")]
    if entry["label"] != "incident":
        result.healthy_warned += bool(loud)
        result.healthy_error += any(f.severity == "error" for f in loud)
        return
    high = entry.get("confidence") == "high"
    result.said += bool(loud)
    result.said_high += bool(loud) and high
    dated = sorted((f for f in loud if f.step is not None), key=lambda f: f.step or 0)
    if dated:
        result.dated = True
        scored = score(entry, dated, steps)
        result.in_window += scored.verdict == "caught"
        result.in_window_high += scored.verdict == "caught" and high
        result.before += bool(scored.false)


def ours(given: Given, corpus: Path) -> list[PeerResult]:
    """Our own pack, of any kind and of the right kind."""
    from healthcheck import __version__

    scored = run_corpus(given, corpus)
    judge = judge_of(given)
    start = time.perf_counter()
    for s in scored:
        judge(str(corpus / s.entry["file"]))
    seconds = time.perf_counter() - start
    any_kind = PeerResult("healthcheck, any rule", __version__, seconds)
    right = PeerResult("healthcheck, right kind", __version__, seconds)
    for s in scored:
        steps = {name: list(c.steps) for name, c in _read(given, corpus / s.entry["file"]).items()}
        anything = [Found(f.name, f.step, f.severity, frozenset({s.entry["kind"]}), f.series) for f in s.found]
        count(any_kind, s.entry, anything, steps)
        fitting = [f for f in s.found if not s.incident or s.entry["kind"] in f.kinds]
        count(right, s.entry, fitting, steps)
    return [right, any_kind]


def _version(folder: Path, name: str) -> str:
    plain = name.replace("-", "_")
    found = [p.name for p in folder.glob("*.dist-info") if p.name.lower().startswith(f"{plain.lower()}-")]
    return found[0].removesuffix(".dist-info").rpartition("-")[2] if found else "?"


def table(results: Sequence[PeerResult], incidents: int, high: int, healthy: int) -> list[str]:
    lines = [
        f"| package | version | in window ({incidents}) | high confidence ({high}) | said at all ({incidents}) | "
        f"high confidence ({high}) | incidents with an alert before the window | healthy with a warning ({healthy}) | with an error | failed on | s |",
        "|" + "---|" * 11,
    ]
    for r in results:
        timed = [str(r.in_window), str(r.in_window_high)] if r.dated else ["no step", "no step"]
        before = str(r.before) if r.dated else "no step"
        cells = [
            r.name,
            r.version,
            *timed,
            str(r.said),
            str(r.said_high),
            before,
            str(r.healthy_warned),
            str(r.healthy_error),
        ]
        lines.append("| " + " | ".join([*cells, str(len(r.crashed)), f"{r.seconds:.0f}"]) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", help="interpreter with the packages' dependencies")
    parser.add_argument("--packages", type=Path, help="folder with one `pip install --target` tree per package")
    parser.add_argument("--only", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--rules", action="append")
    parser.add_argument("--corpus", type=Path, default=CORPUS, metavar="FOLDER", help="a set of recordings")
    args = parser.parse_args()
    if not args.python or not args.packages or not ADAPTERS.exists() or not args.corpus.exists():
        print(
            "peers: needs --python and --packages, and the corpus and peerbench beside the repository; nothing was run"
        )
        return 0
    entries = labels(args.corpus)
    given = Given({"rules": args.rules or ["healthcheck:recommended"]})
    with tempfile.TemporaryDirectory() as folder:
        steps = {entry["id"]: normalise(given, args.corpus, entry, Path(folder) / entry["id"]) for entry in entries}
        results = ours(given, args.corpus)
        for name in args.only or PACKAGES:
            if not (args.packages / name).is_dir():
                print(f"{name}: not installed in {args.packages}")
                continue
            results.append(run_package(name, args.python, args.packages, entries, Path(folder), steps))
    bad = [e for e in entries if e["label"] == "incident"]
    high = sum(e.get("confidence") == "high" for e in bad)
    print("\n".join(table(results, len(bad), high, len(entries) - len(bad))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
