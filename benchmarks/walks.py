"""Walks through the package, counted: how many of our calls, functions and files a reader passes.

    python benchmarks/walks.py            # a table: a healthy step, a step with a NaN, the key `for:`, the metric grad_norm
    python benchmarks/walks.py --files    # also the files that the longest healthy step and the steps with a NaN pass

A step is ``loss.backward()`` and ``optimizer.step()`` of a model with two tensors, watched by ``healthcheck run`` with
the recommended rules on a CPU, in a process of its own under ``sys.setprofile``; eight late steps are counted, since
what is looked at differs from step to step, and one in a few is the end of a block, at which several steps are judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import healthcheck
from healthcheck.assembly import plugin_host
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.merge import Draft, Entry
from healthcheck.rulelang.rule import Hold

WRITTEN, COMPILED = "3 of 5", Hold(3, 5)
RULE = f"version: 1\nrules:\n  spike: {{metric: loss, when: {{above: 5}}, for: {WRITTEN}}}\n"
ROOT = os.path.dirname(healthcheck.__file__) + os.sep


def functions_of_for() -> list[tuple[str, str]]:
    """Functions that have the value of ``for:`` in their hands on its way from a file to the engine: (file, name).

    A one-rule file is compiled under ``sys.setprofile``. A function counts if an argument or its result is the
    value (what PyYAML read, the text, the compiled form), or the key or rule that has it (see
    :func:`_carries`); whole files and rule sets, in which it is one value among all others, do not. The walk ends
    where the compiled ``Cause`` is made: its rule, with all its causes, is what the engine gets.
    """
    registry = plugin_host().registry
    found: dict[tuple[str, str], None] = {}
    arrived = False

    def profile(frame: FrameType, event: str, result: Any) -> None:
        nonlocal arrived
        code = frame.f_code
        if event == "call" and frame.f_locals.get("hold") == COMPILED and "key_origins" in frame.f_locals:
            arrived = arrived or code.co_name == "__init__"
        if arrived or not code.co_filename.startswith(ROOT):
            return
        if event == "call":
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals.get(name) for name in given]
        elif event == "return":
            values = [result]
        else:
            return
        if any(map(_carries, values)):
            name = getattr(code, "co_qualname", code.co_name)  # qualified from Python 3.11 on
            found[code.co_filename[len(ROOT) :], name] = None

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yaml"
        path.write_text(RULE, encoding="utf-8")
        cached = os.environ.get("HEALTHCHECK_CACHE")
        os.environ["HEALTHCHECK_CACHE"] = "off"  # a file that was read before is not parsed again
        sys.setprofile(profile)
        try:
            load_rules(path, registry=registry)
        finally:
            sys.setprofile(None)
            os.environ.pop("HEALTHCHECK_CACHE")
            if cached is not None:
                os.environ["HEALTHCHECK_CACHE"] = cached
    assert arrived
    return list(found)


def _carries(thing: Any) -> bool:
    """Whether a thing is the value of ``for:``, or the key, map or draft of a rule with it."""
    if isinstance(thing, (tuple, list)):
        return any(map(_carries, thing))
    if isinstance(thing, Draft):
        thing = thing.entries
    if isinstance(thing, Mapping):
        thing = thing.get("for")
    if isinstance(thing, Entry):
        return _carries(thing.value)
    if type(thing).__module__.startswith("yaml."):  # an event or node of PyYAML
        thing = getattr(thing, "value", None)
    return thing in (WRITTEN, COMPILED)


STEPS = 60
"""Steps of the run: probes that look at every tenth one look at the last."""
QUIET = 57
"""Steps of another run, in whose last no probe is due to look closer."""
LATE = 9
"""The last steps that are counted: eight healthy ones, and one whose loss is NaN."""

_CHILD = """
import sys, os, builtins
import healthcheck
from healthcheck.cli import main

root = os.path.dirname(healthcheck.__file__) + os.sep
builtins._walk = root
sys.argv = ["healthcheck", "run", *sys.argv[1:]]
sys.exit(main())
"""

_STEPS = """
import atexit, builtins, json, sys
import torch

root, log = builtins._walk, []

def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(root):
        log.append((frame.f_code.co_filename[len(root):], frame.f_code.co_qualname))

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps, late, walked = STEPS, LATE, []
atexit.register(lambda: json.dump(walked, open("walked.json", "w")))
for i in range(steps):
    x = torch.randn(8, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    if i == steps - 1:
        loss = loss * float("nan")
    optimizer.zero_grad()
    if i >= steps - late:
        log.clear()
        sys.setprofile(profile)
    try:
        loss.backward()
        optimizer.step()
    finally:
        if i >= steps - late:
            sys.setprofile(None)
            walked.append(list(log))
"""

_NORM = '''
import atexit, builtins, json, math, sys
import torch

root, files, wanted = builtins._walk, set(), [float("nan")]

def carries(value, depth=0):
    """A number, its sample, or samples among which it is."""
    if isinstance(value, float):
        return math.isclose(value, wanted[0], rel_tol=1e-6)
    if getattr(value, "metric", None) == "grad_norm":
        return True
    if depth < 2 and isinstance(value, (list, tuple)):
        return any(carries(v, depth + 1) for v in value[:50] if not isinstance(v, float))
    return False

def profile(frame, event, argument):
    if event == "return" and frame.f_code.co_filename.startswith(root):
        if carries(argument) or any(carries(value) for value in list(frame.f_locals.values())):
            files.add((frame.f_code.co_filename[len(root):], frame.f_code.co_qualname))

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
atexit.register(lambda: json.dump(sorted(files), open("walked.json", "w")))
for i in range(80):
    x = torch.randn(8, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    if i == 39:
        wanted[0] = torch.nn.utils.get_total_norm(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)).item()
        sys.setprofile(profile)  # to the end: the step is judged in a block with up to 31 later ones
    loss.backward()
    optimizer.step()
sys.setprofile(None)
'''


@dataclass(frozen=True, slots=True)
class StepWalk:
    """Our calls in one step, in their order: (file, function)."""

    log: tuple[tuple[str, str], ...]

    @property
    def calls(self) -> int:
        return len(self.log)

    @property
    def files(self) -> int:
        return len(self.by_file())

    def by_file(self) -> dict[str, Counter[str]]:
        """The calls of each function, by file, in the order in which files are entered."""
        counted: dict[str, Counter[str]] = {}
        for file, function in self.log:
            counted.setdefault(file, Counter())[function] += 1
        return counted


def walk_of_steps(steps: int = STEPS) -> tuple[list[StepWalk], StepWalk]:
    """The late healthy steps, and the step with a NaN, of a run of so many."""
    source = _STEPS.replace("STEPS", str(steps), 1).replace("LATE", str(LATE), 1)
    walks = [StepWalk(tuple((file, function) for file, function in calls)) for calls in _walked(source)]
    return walks[:-1], walks[-1]


def functions_of_grad_norm() -> list[tuple[str, str]]:
    """Functions that have the gradient norm of a step in their hands until it is judged, as a number or a sample: (file, name)."""
    return [(str(file), str(name)) for file, name in _walked(_NORM)]


def _walked(script: str, *options: str) -> list:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "child.py").write_text(_CHILD)
        (place / "train.py").write_text(script)
        environment = {**os.environ, "HEALTHCHECK_RUNS": str(place / "runs")}
        done = subprocess.run(
            [sys.executable, "child.py", *options, "train.py"],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        walked = place / "walked.json"
        if not walked.exists():
            raise RuntimeError(f"the watched script left no walk:\n{done.stderr}")
        return json.loads(walked.read_text())  # type: ignore[no-any-return]


def main(*options: str) -> None:
    healthy, bad = walk_of_steps()
    mean = sum(step.calls for step in healthy) / len(healthy)
    least, most = min(step.calls for step in healthy), max(step.calls for step in healthy)
    few, files = min(step.files for step in healthy), max(step.files for step in healthy)
    print(f"healthy step   {mean:.0f} calls ({least} to {most}) in {few} to {files} files")
    if "--files" in options:
        _print_files(max(healthy, key=lambda step: step.files))
    print(f"step with NaN  {bad.calls:,} calls in {bad.files} files, where probes are due to look closer as well")
    if "--files" in options:
        _print_files(bad)
    _, bad = walk_of_steps(QUIET)
    print(f"               {bad.calls:,} calls in {bad.files} files, where none is")
    if "--files" in options:
        _print_files(bad)
    _print_walk("for:", functions_of_for(), "before the engine")
    _print_walk("grad_norm", functions_of_grad_norm(), "until it is judged")


def _print_walk(name: str, walk: list[tuple[str, str]], where: str) -> None:
    files = dict.fromkeys(file for file, _ in walk)
    print(f"{name:<14} {len(walk)} functions in {len(files)} files {where}")
    for file in files:
        print(f"  {file}: {', '.join(function for place, function in walk if place == file)}")


def _print_files(step: StepWalk) -> None:
    for file, functions in step.by_file().items():
        calls = ", ".join(f"{name} {count}" if count > 1 else name for name, count in functions.most_common())
        print(f"  {file} ({functions.total()}): {calls}")


if __name__ == "__main__":
    main(*sys.argv[1:])
