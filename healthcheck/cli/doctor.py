"""``healthcheck doctor``: whether this environment can watch a run, and what is in the way.

With a script: what watching it costs here, and that it changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from healthcheck import __version__
from healthcheck.cli.options import add_format, add_plugin_option, print_json
from healthcheck.core.errors import HealthCheckError, RuleFileError, UsageError
from healthcheck.core.text import plural

NAME = "doctor"
HELP = "report on this environment: versions, devices, name clashes, plugins, rules"

_MARK = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script",
        nargs="?",
        metavar="SCRIPT",
        help="run its first steps alternately with and without healthcheck (six runs, as it stands, acting on nothing): step time, "
        "memory, identical losses",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script")
    parser.add_argument("--steps", type=int, default=None, metavar="N", help=f"steps of each run ({STEPS})")
    parser.add_argument(
        "--fullgraph",
        action="store_true",
        help="instead: test whether what SCRIPT compiles fits into one graph each (what torch.compile(fullgraph=True) asks for); each "
        f"graph break with its line and what to change. {FULLGRAPH_STEPS} steps unless --steps says more; a script that compiles "
        "nothing has its model compiled for the test",
    )
    add_plugin_option(parser)
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    measured: dict[str, Any] = {}
    if args.steps is not None and args.steps < 2:
        raise UsageError(f"--steps {args.steps}: at least 2 are needed")
    if args.script is None:
        if args.fullgraph:
            raise UsageError("--fullgraph needs the script to test: healthcheck doctor --fullgraph train.py")
        findings = list(all_checks(args.plugins))
    elif args.fullgraph:
        measured, findings = fullgraph(args.script, args.arguments, args.steps or FULLGRAPH_STEPS)
    else:
        steps = args.steps or STEPS
        trials = run_trials(args.script, args.arguments, steps, say=lambda text: print(text, file=sys.stderr))
        measured, findings = compare(trials)
    problems = [f for f in findings if f.level == "problem"]
    if args.format == "json":
        content = {"problems": len(problems), "findings": [asdict(f) for f in findings]}
        print_json({**content, **({"measured": measured} if measured else {})})
    else:
        for finding in findings:
            print("\n".join(_lines(finding)))
        print(f"healthcheck doctor: {plural(len(problems), 'problem') if problems else 'no problems'}")
    return 1 if problems else 0


def _lines(finding: Finding) -> list[str]:
    lines = [f"{_MARK[finding.level]} {finding.topic}: {finding.text}"]
    if finding.advice:
        lines.append(f"        try: {finding.advice}")
    return lines


# --------------------------------------------------------------------------- the environment

OURS = "torch-healthcheck"
FOREIGN = "healthcheck"
LITTLE_SPACE = 2**30
"""Free bytes under which the record of a long run may not fit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``level`` is ``ok``, ``note`` or ``problem``."""

    level: str
    topic: str
    text: str
    advice: str = ""


def all_checks(plugins: Sequence[str] = ()) -> Iterator[Finding]:
    """Metadata first: a foreign package of the same name must be found before anything is imported."""
    yield from name_clashes(Path.cwd())
    yield from versions()
    yield from torch_and_devices()
    yield from limits()
    host: Any = None
    try:
        from healthcheck.assembly import plugin_host

        host = plugin_host(plugins)
        yield from plugin_state(host)
    except Exception as error:  # whatever it is, it is the finding
        yield Finding(
            "problem",
            "plugins",
            f"built-ins did not load: {type(error).__name__}: {error}",
            "reinstall torch-healthcheck",
        )
    yield from run_folder()
    if host is not None:
        yield from rules(host)


def name_clashes(folder: Path) -> Iterator[Finding]:
    """The foreign distribution of the same import name, and local files that hide ours."""
    if any(_canonical(dist) == FOREIGN for dist in metadata.distributions()):
        yield Finding(
            "problem",
            "name",
            'another package called "healthcheck" is installed; it owns the same import name and overwrites our files',
            "pip uninstall healthcheck, then pip install --force-reinstall torch-healthcheck",
        )
    for local in (folder / "healthcheck.py", folder / "healthcheck" / "__init__.py"):
        if local.is_file() and not _is_this_package(local):
            yield Finding(
                "note",
                "name",
                f"{local.relative_to(folder)} here has our import name: `python -m healthcheck` would run it instead, and "
                "a script's `import healthcheck` gets one of the two",
                "use the command `healthcheck`, or rename the file",
            )


def _canonical(dist: metadata.Distribution) -> str:
    name: str = dist.metadata["Name"] or ""
    return name.lower().replace("_", "-")


def _is_this_package(path: Path) -> bool:
    try:
        return path.resolve().is_relative_to(Path(__file__).resolve().parent.parent)
    except OSError:
        return False


def versions() -> Iterator[Finding]:
    yield Finding("ok", "healthcheck", f"{__version__} ({Path(__file__).resolve().parent.parent})")
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in ("pluggy", "PyYAML", "jsonschema", "rich", "pytest"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("problem", name, "not installed", f"pip install {name}")


def torch_and_devices() -> Iterator[Finding]:
    """Imports torch if it is there; without it everything but watching works."""
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding(
            "note", "torch", "not installed: run and watch need it; check, replay, why, report, metrics do not"
        )
        return
    try:
        import torch
    except Exception as error:
        yield Finding(
            "problem", "torch", f"{installed} is installed but does not import: {type(error).__name__}: {error}"
        )
        return
    yield Finding(
        "ok", "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"
    )
    try:
        yield from _devices(torch)
    except Exception as error:
        yield Finding("problem", "devices", f"cannot be asked: {type(error).__name__}: {error}")


def _devices(torch: Any) -> Iterator[Finding]:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            yield Finding("ok", "device", f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    elif torch.backends.mps.is_available():
        yield Finding("ok", "device", "mps")
    elif getattr(torch, "xpu", None) is not None and torch.xpu.is_available():
        yield Finding("ok", "device", f"{torch.xpu.device_count()} xpu")
    else:
        built = "torch is built without CUDA" if not torch.version.cuda else "torch sees no CUDA card"
        yield Finding("ok", "device", f"cpu only ({built})")


def limits() -> Iterator[Finding]:
    """Memory and processors that this process may use, cgroup limits included."""
    from healthcheck.probes.memory_readings import memory_limit_bytes, physical_bytes

    allowed, physical = memory_limit_bytes(), physical_bytes()
    if allowed is not None and physical is not None:
        source = f"cgroup limit; the machine has {physical / 2**30:.1f}" if allowed < physical else "the machine's"
        yield Finding("ok", "memory", f"{allowed / 2**30:.1f} GiB ({source})")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    yield Finding("ok", "processors", f"{cores} cores" + (f", cgroup quota {quota:g}" if quota is not None else ""))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the cgroup grants this process, None without a quota (v2 and v1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return micros / int((root / "cpu" / "cpu.cfs_period_us").read_text()) if micros > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def plugin_state(host: Any) -> Iterator[Finding]:
    others = [info for info in host.infos if info.source != "built in"]
    names = ", ".join(f"{info.name} ({info.source})" for info in others) or "none beside the built-ins"
    yield Finding("ok", "plugins", names)
    for failure in host.failures:
        yield Finding("problem", "plugins", str(failure), f"fix it, or set HEALTHCHECK_DISABLE_PLUGINS={failure.name}")


def run_folder() -> Iterator[Finding]:
    """Whether records can be written where they would go. Leaves nothing behind."""
    from healthcheck.record.folder import RUNS_VARIABLE, runs_folder

    wanted = runs_folder()
    existing = wanted
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        yield Finding(
            "problem",
            "records",
            f"{wanted} cannot be written: {error.strerror or error}",
            f"set {RUNS_VARIABLE} to a folder that you can write to",
        )
        return
    text = f"{wanted} can be written, {free / 2**30:.1f} GiB free"
    if free < LITTLE_SPACE:
        yield Finding("problem", "records", text, "free some space: a full disk means a record in memory only")
    else:
        yield Finding("ok", "records", text)


def rules(host: Any) -> Iterator[Finding]:
    """Which rules a run here would use, and whether they are valid."""
    from healthcheck.assembly import load_rules_for

    notes: list[str] = []
    try:
        found = load_rules_for(host=host, notes=notes)
    except RuleFileError as error:
        first = error.problems[0]
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        yield Finding("problem", "rules", f"{first}{more}", "healthcheck check")
        return
    except HealthCheckError as error:
        yield Finding("problem", "rules", str(error))
        return
    stopping = ", ".join(rule.id for rule in found.rules if rule.may_stop) or "none"
    yield Finding("ok", "rules", f"{len(found.rules)} rules of {found.source}; may stop a run: {stopping}")
    for note in notes:
        yield Finding("note", "rules", note)
    if os.environ.get("HEALTHCHECK", "").lower() == "off":
        yield Finding("note", "rules", "HEALTHCHECK=off is set: nothing is watched", "unset HEALTHCHECK")


# --------------------------------------------------------------------------- a script, with and without us

# Each run is a process of its own (doctor_child.py): a second training in one process would find a warm allocator,
# a compiled model and our hooks from before.

ORDER = ("bare", "watched", "watched", "bare", "bare", "watched")
"""The first four are mirrored, so that a machine that warms up or slows down costs both sides the same."""
STEPS = 30
FULLGRAPH_STEPS = 3
"""Steps of each run with ``--fullgraph``: the second meets recompilations, the third what follows them."""
TIMEOUT = 1800
"""Seconds that one run may take."""
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

    :param say: gets one line per run, since all of them may take minutes.

    Raises ``UsageError`` if there is no such script, or if it does not run on its own.
    """
    if not Path(script).is_file():
        raise UsageError(_no_script(script, arguments))
    say(
        f"{script}: {len(ORDER)} runs of {steps} steps, alternately without and with healthcheck; files that the script writes are written every time"
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
            words = "without healthcheck" if mode == "bare" else "with healthcheck"
            say(f"run {number + 1} of {len(ORDER)}, {words}: {trial.steps} steps{took}")
            if not trial.steps:
                break
    return trials


def _run(script: str, arguments: Sequence[str], steps: int, mode: str, out: Path) -> dict[str, Any]:
    """What one process measured. Raises ``UsageError`` if it failed or did not end."""
    child = "fullgraph_child" if mode in ("explain", "whole") else "doctor_child"
    command = [sys.executable, "-m", f"healthcheck.cli.{child}", mode, str(steps), str(out), script]
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
    text = f"{without * 1e3:.3g} ms a step without healthcheck, {with_us * 1e3:.3g} ms with: {ratio:.3f} times"
    if cpu is not None:
        result |= {"cpu_ratio": cpu[1] / cpu[0], "cpu_bare_spread": cpu[2]}
    if spread > 1.1 * max(ratio, 1.0) or spread > NOISY:
        noise = f"{text}; runs without healthcheck differ by {spread:.2f} times, so this says little"
        on_device = any("device" in t.memory for t in bare)
        if cpu is None or on_device or cpu[2] > NOISY:
            return Finding("note", "step time", noise, "a quieter machine, or more --steps")
        ratio = cpu[1] / cpu[0]
        text = (
            f"{cpu[0] * 1e3:.3g} ms of processor time a step without healthcheck, {cpu[1] * 1e3:.3g} ms with: {ratio:.3f} times "
            f"(by the clock, runs without healthcheck differ by {spread:.2f} times: the machine is busy)"
        )
    if ratio <= 1.05:
        return Finding("ok", "step time", text)
    return Finding(
        "note", "step time", text, "--profile production, which measures many things only every 50 steps, or minimal"
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
        text = f"peak {without / 2**20:,.0f} MiB without healthcheck, {with_us / 2**20:,.0f} MiB with"
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
            "two runs without healthcheck differ, so runs with it cannot be compared",
            "seed the script for this",
        )
    same = all(t.losses == bare[0].losses for t in watched)
    result["identical_losses"] = same
    if same:
        return Finding(
            "ok", "losses", f"{len(bare[0].losses)} losses, bit for bit the same with and without healthcheck"
        )
    other = next(t for t in watched if t.losses != bare[0].losses)
    pairs = zip(bare[0].losses, other.losses, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(bare[0].losses))
    return Finding("problem", "losses", f"watching changes them, from loss {first + 1} on", "please report this")


# --------------------------------------------------------------------------- one graph each


def fullgraph(script: str, arguments: Sequence[str], steps: int) -> tuple[dict[str, Any], list[Finding]]:
    """Whether what a script compiles fits into one graph each: numbers for a program, findings for a person.

    A first run goes on behind graph breaks, so that all are named; where it meets none, a second asks for ``fullgraph``.
    Raises ``UsageError`` if there is no such script, or if it does not run.
    """
    if not Path(script).is_file():
        raise UsageError(_no_script(script, arguments))
    with tempfile.TemporaryDirectory() as folder:
        found = _run(script, arguments, steps, "explain", Path(folder) / "explain.json")
        if found["compiled"] and not found["graph_breaks"]:
            found["failed"] = _run(script, arguments, steps, "whole", Path(folder) / "whole.json")["failed"]
    names = ", ".join(dict.fromkeys(found["compiled"]))
    if not names:
        advice = "more --steps, or a script that calls its model; a model without parameters to train is not chosen"
        return found, [
            Finding("problem", "fullgraph", "the script compiles nothing, and trains no module either", advice)
        ]
    if found["chosen"]:
        names = f"{found['chosen']} (which the script does not compile: compiled for this test)"
    findings = [
        Finding("problem", "graph break", f"{one['place']}: {one['reason']}", one["change"])
        for one in found["graph_breaks"]
    ]
    findings += [
        Finding("note", "recompiled", f"{one['place']}: {one['guard']}", one["change"]) for one in found["recompiles"]
    ]
    if found["failed"] and not found["graph_breaks"]:
        findings.append(Finding("problem", "fullgraph", found["failed"], "change that line, or leave it uncompiled"))
    elif not found["graph_breaks"]:
        findings.insert(
            0, Finding("ok", "fullgraph", f"{names}: one graph each, over {plural(found['steps'], 'step')}")
        )
    return found, findings
