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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healthcheck.commands.doctor_checks import Finding
from healthcheck.errors import UsageError

ORDER = ("bare", "watched", "watched", "bare", "bare", "watched")
STEPS = 30
TIMEOUT = 1800
NOISY = 1.25
"""Runs of the same that differ by more say nothing about a few percent."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the script."""

    mode: str
    steps: int
    seconds_per_step: float | None
    losses: tuple[str, ...]
    memory: dict[str, int]
    cpu_seconds_per_step: float | None = None
    """Time of the processors, which other load on the machine hardly touches."""


def run_trials(
    script: str, arguments: Sequence[str], steps: int = STEPS, say: Callable[[str], None] = lambda text: None
) -> list[Trial]:
    """Run the script in turn without and with us.

    :param say: told one line per run, since all of them may take minutes.

    Raises ``UsageError`` if there is no such script, or if it does not run on its own.
    """
    if not Path(script).is_file():
        raise UsageError(_no_script(script, arguments))
    say(
        f"{script}: {len(ORDER)} runs of {steps} steps, without and with us in turn; files that it writes, it writes each time"
    )
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for number, mode in enumerate(ORDER):
            found = _run(script, arguments, steps, mode, Path(folder) / f"{number}.json")
            trial = Trial(
                mode,
                found["steps"],
                found["seconds_per_step"],
                tuple(found["losses"]),
                found["memory"],
                found["cpu_seconds_per_step"],
            )
            trials.append(trial)
            took = f", {trial.seconds_per_step * 1e3:.3g} ms each" if trial.seconds_per_step else ""
            words = "without us" if mode == "bare" else "with us"
            say(f"run {number + 1} of {len(ORDER)}, {words}: {trial.steps} steps{took}")
            if not trial.steps:
                break
    return trials


def _run(script: str, arguments: Sequence[str], steps: int, mode: str, out: Path) -> dict[str, Any]:
    """What one process measured. Raises ``UsageError`` if it failed or did not end."""
    command = [sys.executable, "-m", "healthcheck.commands.doctor_child", mode, str(steps), str(out), script]
    environment = {**os.environ, "HEALTHCHECK_RUNS": str(out.parent / "runs")}
    environment.pop("HEALTHCHECK", None)
    try:
        done = subprocess.run(
            [*command, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{script} took over {TIMEOUT // 60} minutes for {steps} steps; try --steps with fewer"
        ) from None
    found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    if done.returncode or not found:
        last = "\n".join(done.stderr.strip().splitlines()[-5:]) or f"exit code {done.returncode}, nothing on stderr"
        raise UsageError(f"{script} did not run {'under healthcheck' if mode == 'watched' else 'on its own'}:\n{last}")
    return found


def _no_script(script: str, arguments: Sequence[str]) -> str:
    if Path(script).name.startswith(("python", "torchrun", "accelerate")):
        own = next((a for a in arguments if a.endswith(".py")), "train.py")
        return f"doctor runs the script itself, in one process: healthcheck doctor {own}"
    return f"no such script: {script}"


def compare(trials: Sequence[Trial]) -> tuple[dict[str, Any], list[Finding]]:
    """Numbers for a program, findings for a person."""
    bare, watched = ([t for t in trials if t.mode == mode] for mode in ("bare", "watched"))
    result: dict[str, Any] = {"steps": trials[0].steps, "runs": len(trials)}
    if not trials[0].steps:
        text = "no step of a torch optimizer was seen in the whole script"
        advice = (
            "an optimizer that never steps is a fault: healthcheck run shows it; other optimizers cannot be measured"
        )
        return result, [Finding("problem", "script", text, advice)]
    findings = [_time(bare, watched, result), *_memory(bare, watched, result), _losses(bare, watched, result)]
    return result, findings


def _time(bare: Sequence[Trial], watched: Sequence[Trial], result: dict[str, Any]) -> Finding:
    wall, cpu = _ratio(bare, watched, "seconds_per_step"), _ratio(bare, watched, "cpu_seconds_per_step")
    if wall is None:
        return Finding("note", "step time", f"only {result['steps']} steps: too few to time")
    without, with_us, spread = wall
    ratio = with_us / without
    result |= {"ratio": ratio, "bare_ms": without * 1e3, "watched_ms": with_us * 1e3, "bare_spread": spread}
    text = f"{without * 1e3:.3g} ms a step without us, {with_us * 1e3:.3g} ms with: {ratio:.3f} times"
    if cpu is not None:
        result |= {"cpu_ratio": cpu[1] / cpu[0], "cpu_bare_spread": cpu[2]}
    if spread > 1.1 * max(ratio, 1.0) or spread > NOISY:
        noise = f"{text}; runs without us differ by {spread:.2f} times, so this says little"
        on_device = any("device" in t.memory for t in bare)
        if cpu is None or on_device or cpu[2] > NOISY:
            return Finding("note", "step time", noise, "a quieter machine, or more --steps")
        ratio = cpu[1] / cpu[0]
        text = (
            f"{cpu[0] * 1e3:.3g} ms of processor time a step without us, {cpu[1] * 1e3:.3g} ms with: {ratio:.3f} times "
            f"(by the clock runs without us differ by {spread:.2f} times: the machine is busy)"
        )
    if ratio <= 1.05:
        return Finding("ok", "step time", text)
    return Finding(
        "note", "step time", text, "--profile production, which looks at much only every 50 steps, or minimal"
    )


def _ratio(bare: Sequence[Trial], watched: Sequence[Trial], what: str) -> tuple[float, float, float] | None:
    """``(median without us, median with us, largest over smallest without us)``; None if a side was not timed."""
    times = [[value for t in some if (value := getattr(t, what))] for some in (bare, watched)]
    if not all(times):
        return None
    without, with_us = (statistics.median(some) for some in times)
    return without, with_us, max(times[0]) / min(times[0])


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
