"""``healthcheck doctor train.py``: what watching costs this script on this machine, and that it changes nothing.

The script runs for a few steps in processes of its own, without and with us in turn (ABBA), so that a
machine that warms up or slows down is not taken for our cost.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthcheck.commands.doctor_checks import Finding
from healthcheck.errors import UsageError

ORDER = ("bare", "watched", "watched", "bare", "bare", "watched")
STEPS = 30
TIMEOUT = 1800


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the script."""

    mode: str
    steps: int
    seconds_per_step: float | None
    losses: tuple[str, ...]
    memory: dict[str, int]


def run_trials(script: str, arguments: Sequence[str], steps: int = STEPS) -> list[Trial]:
    """Run the script in turn without and with us.

    Raises ``UsageError`` if there is no such script, or if it does not run on its own.
    """
    if not Path(script).is_file():
        raise UsageError(f"no such script: {script}")
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for number, mode in enumerate(ORDER):
            out = Path(folder) / f"{number}.json"
            command = [sys.executable, "-m", "healthcheck.commands.doctor_child", mode, str(steps), str(out), script]
            environment = {**os.environ, "HEALTHCHECK_RUNS": str(Path(folder) / "runs")}
            environment.pop("HEALTHCHECK", None)
            done = subprocess.run(
                [*command, *arguments], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
            found = json.loads(out.read_text()) if out.is_file() else {}
            if done.returncode or not found:
                last = "\n".join(done.stderr.strip().splitlines()[-5:])
                raise UsageError(
                    f"{script} did not run {'under healthcheck' if mode == 'watched' else 'on its own'}:\n{last}"
                )
            trials.append(
                Trial(mode, found["steps"], found["seconds_per_step"], tuple(found["losses"]), found["memory"])
            )
    return trials


def compare(trials: Sequence[Trial]) -> tuple[dict[str, Any], list[Finding]]:
    """Numbers for a program, findings for a person."""
    bare, watched = ([t for t in trials if t.mode == mode] for mode in ("bare", "watched"))
    result: dict[str, Any] = {"steps": trials[0].steps, "runs": len(trials)}
    if not trials[0].steps:
        return result, [Finding("problem", "script", "no optimizer step was seen", "healthcheck plan")]
    findings = [_time(bare, watched, result), *_memory(bare, watched, result), _losses(bare, watched, result)]
    return result, findings


def _time(bare: Sequence[Trial], watched: Sequence[Trial], result: dict[str, Any]) -> Finding:
    times = [[t.seconds_per_step for t in some if t.seconds_per_step] for some in (bare, watched)]
    if not all(times):
        return Finding("note", "step time", f"only {result['steps']} steps: too few to time")
    without, with_us = (statistics.median(some) for some in times)
    ratio = with_us / without
    spread = max(times[0]) / min(times[0])
    result |= {"ratio": ratio, "bare_ms": without * 1e3, "watched_ms": with_us * 1e3, "bare_spread": spread}
    text = f"{without * 1e3:.3g} ms a step without us, {with_us * 1e3:.3g} ms with: {ratio:.3f} times"
    if spread > 1.1 * max(ratio, 1.0):
        return Finding(
            "note", "step time", f"{text}; runs without us differ by {spread:.2f} times, so this says little"
        )
    return Finding("ok" if ratio <= 1.05 else "note", "step time", text, "" if ratio <= 1.05 else "overhead_budget: 1%")


def _memory(bare: Sequence[Trial], watched: Sequence[Trial], result: dict[str, Any]) -> list[Finding]:
    findings = []
    for kind in ("host", "device"):
        if not all(kind in t.memory for t in (*bare, *watched)):
            continue
        without, with_us = (statistics.median(t.memory[kind] for t in some) for some in (bare, watched))
        result[f"{kind}_memory"] = {"bare": without, "watched": with_us}
        text = f"peak {without / 2**20:,.0f} MiB without us, {with_us / 2**20:,.0f} MiB with"
        findings.append(Finding("ok", f"{kind} memory", text))
    return findings


def _losses(bare: Sequence[Trial], watched: Sequence[Trial], result: dict[str, Any]) -> Finding:
    if not bare[0].losses:
        return Finding("note", "losses", "the script calls no loss.backward() that could be compared")
    if any(t.losses != bare[0].losses for t in bare):
        result["identical_losses"] = None
        return Finding(
            "note",
            "losses",
            "two runs without us differ, so runs with us cannot be compared",
            "seed the script for this",
        )
    same = all(t.losses == bare[0].losses for t in watched)
    result["identical_losses"] = same
    if same:
        return Finding("ok", "losses", f"{len(bare[0].losses)} losses, the same bits with and without us")
    other = next(t for t in watched if t.losses != bare[0].losses)
    pairs = zip(bare[0].losses, other.losses, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(bare[0].losses))
    return Finding("problem", "losses", f"watching changes them, from loss {first + 1} on", "please report this")
