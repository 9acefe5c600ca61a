"""The toy faults of ``../shared/faults``, run live under a pack and scored. Used by ``detection.py --faults``.

A fault is found if a rule that answers for one of its detectors (tests/faults/detectors.yaml: by tags) fires in the
stated range, and nothing above info fires before ``healthy_until``; a control is passed if nothing above info fires.
Index i of faults.yaml is step i + 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT.parent / "shared" / "faults"
DETECTORS = ROOT / "tests" / "faults" / "detectors.yaml"


@dataclass(frozen=True, slots=True)
class ToyResult:
    """One script at one seed."""

    id: str
    seed: int
    wanted: str
    verdict: str
    """``found``, ``missed``, ``early``; for controls ``clean`` or ``false``."""
    alerts: list[tuple[str, int, str]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_faults(rules: Sequence[str], seeds: Sequence[int]) -> list[ToyResult]:
    """Run all scripts, one process each."""
    entries = yaml.safe_load((FAULTS / "faults.yaml").read_text(encoding="utf-8"))["entries"]
    tags = yaml.safe_load(DETECTORS.read_text(encoding="utf-8"))
    return [_run(entry, seed, rules, tags) for entry in entries for seed in seeds]


def _run(entry: Mapping[str, Any], seed: int, rules: Sequence[str], tags: Mapping[str, Any]) -> ToyResult:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
        env |= {"HEALTHCHECK_RUNS": folder, "OMP_NUM_THREADS": "1"}
        given = [word for file in rules for word in ("--rules", file)]
        command = [sys.executable, "-m", "healthcheck", "run", *given, "--report", f"json={target}"]
        subprocess.run(
            [*command, str(FAULTS / entry["script"]), "--seed", str(seed)],
            env=env,
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        report = json.loads(target.read_text(encoding="utf-8"))
    loud = [a for a in report["alerts"] if a["severity"] != "info"]
    alerts = [(a["rule"], a["fired_step"], a["severity"]) for a in loud]
    if entry["kind"] == "control":
        return ToyResult(entry["id"], seed, "none", "false" if loud else "clean", alerts)
    wanted = [set(tags[word]) for word in entry["detectors"] if tags.get(word)]
    first, last = entry["alarm"]["first"] + 1, entry["alarm"]["last"] + 1
    found = any(first <= a["fired_step"] <= last and any(w <= set(a["tags"]) for w in wanted) for a in loud)
    early = any(a["fired_step"] <= entry["healthy_until"] for a in loud)
    verdict = "early" if early else "found" if found else "missed"
    return ToyResult(entry["id"], seed, f"{first}..{last}", verdict, alerts)


def text(results: Sequence[ToyResult]) -> str:
    lines = ["toy faults, run live"]
    for r in results:
        said = ", ".join(f"{'!' if s == 'error' else ''}{rule}@{step}" for rule, step, s in r.alerts[:6])
        lines.append(
            f"  {r.id} seed {r.seed}  {r.wanted:<10} {r.verdict.upper() if r.verdict in BAD else 'ok':<7} {said}"
        )
    return "\n".join([*lines, summary(results)])


BAD = ("missed", "early", "false")


def summary(results: Sequence[ToyResult]) -> str:
    faults = [r for r in results if r.wanted != "none"]
    controls = [r for r in results if r.wanted == "none"]
    found = sum(r.verdict == "found" for r in faults)
    early = sum(r.verdict == "early" for r in faults)
    false = sum(r.verdict == "false" for r in controls)
    return f"found {found} of {len(faults)} faults, {early} with an early alarm; {false} of {len(controls)} controls with one"


def markdown(results: Sequence[ToyResult]) -> list[str]:
    wrong = [r for r in results if r.verdict in BAD]
    lines = [f"{summary(results)[0].upper()}{summary(results)[1:]} (a script at a seed counts once).", ""]
    for r in wrong:
        said = ", ".join(f"{rule} at {step}" for rule, step, _ in r.alerts[:4]) or "nothing was said"
        lines.append(f"- `{r.id}`, seed {r.seed}, alarm expected at {r.wanted}: {r.verdict}; {said}.")
    return lines
