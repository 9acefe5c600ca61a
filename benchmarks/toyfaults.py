"""The toy faults of ``../shared/faults`` and tests/faults, run live under a pack and scored: ``detection.py --faults``.

A fault is found if a cause that answers for one of its detectors (tests/faults/detectors.yaml) fires in the
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from scoring import judged_causes, named_causes

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT.parent / "shared" / "faults"
OURS = ROOT / "tests" / "faults"
DETECTORS = OURS / "detectors.yaml"


@dataclass(frozen=True, slots=True)
class ToyResult:
    """One script at one seed."""

    id: str
    seed: int
    wanted: str
    verdict: str
    """``found``, ``missed``, ``early``; for controls ``clean`` or ``false``."""
    alerts: list[tuple[str, int, str]]
    script: str = ""
    answers: list[str] = field(default_factory=list)
    """Causes that answer for one of its detector words."""
    right: list[str] = field(default_factory=list)
    """Those of them that fired in the range."""
    judged: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_faults(rules: Sequence[str], seeds: Sequence[int]) -> list[ToyResult]:
    """Run all scripts, one process each."""
    detectors = yaml.safe_load(DETECTORS.read_text(encoding="utf-8"))
    return [_run(entry, seed, rules, detectors) for entry in entries() for seed in seeds]


def entries() -> list[dict[str, Any]]:
    """The shared set where it is there, our own faults, and the healthy scripts that look like one."""
    found = []
    for folder in (FAULTS, OURS / "own"):
        if (folder / "faults.yaml").exists():
            listed = yaml.safe_load((folder / "faults.yaml").read_text(encoding="utf-8"))["entries"]
            found += [{**entry, "path": folder / entry["script"]} for entry in listed]
    alike = sorted((OURS / "lookalikes").glob("**/*.py"))
    return found + [{"id": path.stem, "kind": "control", "path": path} for path in alike]


def _answers(words: Sequence[str], detectors: Mapping[str, Any], causes: Sequence[str]) -> list[str]:
    named = {name for word in words for name in detectors[word]}
    return [cause for cause in causes if {cause, cause.partition(".")[0]} & named]


def _run(entry: Mapping[str, Any], seed: int, rules: Sequence[str], detectors: Mapping[str, Any]) -> ToyResult:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report.json"
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
        env |= {"HEALTHCHECK_RUNS": folder, "OMP_NUM_THREADS": "1"}
        given = [word for file in rules for word in ("--rules", file)]
        command = [sys.executable, "-m", "healthcheck", "run", *given, "--report", f"json={target}"]
        subprocess.run(
            [*command, str(entry["path"]), "--seed", str(seed)],
            env=env,
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        report = json.loads(target.read_text(encoding="utf-8"))
    return scored(entry, seed, report, detectors)


def scored(entry: Mapping[str, Any], seed: int, report: Mapping[str, Any], detectors: Mapping[str, Any]) -> ToyResult:
    """What the report of one run is worth."""
    named = [found for alert in report["alerts"] for found in named_causes(alert)]
    loud = [(name, step, severity) for name, step, severity in named if severity != "info"]
    judged = sorted(judged_causes(report))
    script = str(entry["path"].relative_to(OURS)) if entry["path"].is_relative_to(OURS) else ""
    if entry["kind"] == "control":
        return ToyResult(entry["id"], seed, "none", "false" if loud else "clean", loud, script, judged=judged)
    answers = _answers(entry["detectors"], detectors, _causes_of(report))
    first, last = entry["alarm"]["first"] + 1, entry["alarm"]["last"] + 1
    right = sorted({name for name, step, _ in loud if name in answers and first <= step <= last})
    early = any(step <= entry["healthy_until"] for _, step, _ in loud)
    verdict = "early" if early else "found" if right else "missed"
    return ToyResult(entry["id"], seed, f"{first}..{last}", verdict, loud, script, answers, right, judged)


def _causes_of(report: Mapping[str, Any]) -> list[str]:
    """Full names of all causes of the rules that the run had."""
    return [
        f"{rule}.{cause}" if cause else rule
        for rule, entry in report["rules"].items()
        for cause in entry.get("causes", {"": None})
    ]


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
