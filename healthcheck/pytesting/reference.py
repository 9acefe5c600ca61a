"""Loss, speed and memory of a watched test, compared with its reference file."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import HealthCheckFailed
from healthcheck.pytesting.failure import shown

if TYPE_CHECKING:
    import pytest

    from healthcheck.run.session import Session

FIRST_STEPS = 0.2
"""Part of the steps that is left out of the speed: warm-up."""


class Measures:
    """Times steps from step end to step end, and follows memory."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._start_memory = 0
        self._peak_memory = 0

    def start(self, session: Session) -> None:
        session.on("train_start", self._training)
        session.on("step_end", self._step)

    def _training(self, event: Any) -> None:
        """Model and optimizer are there, and whatever was imported for them."""
        self._start_memory = _memory()

    def _step(self, event: Any) -> None:
        self._ends.append(perf_counter())
        self._peak_memory = max(self._peak_memory, _memory())

    def values(self, losses: list[float]) -> dict[str, float]:
        """``final_loss``, ``throughput`` (steps per second) and ``peak_memory`` (bytes); what is not known is absent.

        On the CPU memory is what the process has grown by since training began.
        """
        found: dict[str, float] = {}
        if losses:
            found["final_loss"] = statistics.median(losses[-max(1, min(10, len(losses) // 10)) :])
        times = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        times = times[int(len(times) * FIRST_STEPS) :]
        if times:
            found["throughput"] = 1.0 / max(1e-9, statistics.median(times))
        if self._peak_memory:
            found["peak_memory"] = float(max(0, self._peak_memory - (0 if _cuda() else self._start_memory)))
        return found


def machine() -> str:
    """Speed and memory mean something on one kind of machine only."""
    torch = _cuda()
    device = torch.cuda.get_device_name() if torch is not None else f"{platform.machine()} {os.cpu_count()} cores"
    return f"{platform.system()} {device}"


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _memory() -> int:
    """Bytes: of the device where one is in use, else resident memory of this process; 0 if unknown."""
    torch = _cuda()
    if torch is not None:
        return int(torch.cuda.memory_allocated())
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


# --------------------------------------------------------------------------------------------------
# The reference file of a test module: what loss, speed and memory were when somebody was content.
#
# ``test_smoke.reference.yaml`` lies beside ``test_smoke.py``; ``pytest --healthcheck-update-reference``
# writes it. Tolerances may be edited there: an update keeps them.


HEAD = """\
# What these tests measured when they were last accepted. Update: pytest --healthcheck-update-reference
# `tolerance` may be edited; speed and memory are compared on the same kind of machine only.
"""
OPTION = "--healthcheck-update-reference"


@dataclass(frozen=True, slots=True)
class Measure:
    """How one measure is compared."""

    worse: str
    """``above`` or ``below``: which side is a failure. The other side is an improvement."""
    tolerance: float
    slack: float = 0.0
    """Absolute difference that never counts."""
    of_machine: bool = True


MEASURES = {
    "final_loss": Measure("above", 0.05, slack=1e-6, of_machine=False),
    "throughput": Measure("below", 0.3),
    "peak_memory": Measure("above", 0.1, slack=32 * 2.0**20),
}


def reference_file(path: Path) -> Path:
    """``tests/test_smoke.py`` -> ``tests/test_smoke.reference.yaml``."""
    return path.with_suffix(".reference.yaml")


def compare(
    item: pytest.Item,
    asked: Iterable[Any],
    values: Mapping[str, float],
    *,
    note: Callable[[str], None],
    left: dict[str, Any],
) -> HealthCheckFailed | None:
    """Compare a test's measures with its entry in the file beside it; remember them instead under the update option.

    :param asked: what the marker and the fixture ask to be compared.
    :param left: what the test leaves for the end of the session; a new entry is put there.
    """
    wanted = {name: given for some in asked for name, given in _wanted(some).items()}
    missing = [name for name in wanted if name not in values]
    if missing:
        return HealthCheckFailed(f"{', '.join(missing)} could not be measured in this test", [_why(missing)])
    path = reference_file(item.path)
    key = item.nodeid.partition("::")[2]
    if item.config.getoption("healthcheck_update_reference"):
        entry = {name: {"value": values[name], "tolerance": wanted[name]} for name in wanted}
        left["reference"] = {"path": str(path), "test": key, "machine": machine(), "entry": entry}
        return None
    known = load(path).get(key, {})
    absent = [name for name in wanted if name not in known]
    if absent:
        return HealthCheckFailed(
            f"{shown(path)} has no {', '.join(absent)} for {key}", [f"  write it: pytest {OPTION}"]
        )
    wrong = []
    for name, given in wanted.items():
        text = judge(name, values[name], known[name], given, note, str(known.get("machine", "")))
        if text:
            wrong.append(text)
    if not wrong:
        return None
    return HealthCheckFailed(wrong[0], [*wrong[1:], f"  reference {shown(path)}", f"  accept    pytest {OPTION}"])


def judge(name: str, value: float, entry: Mapping[str, Any], given: Any, note: Any, where: str) -> str:
    """One sentence if a measure is worse than its reference allows, else an empty one."""
    from healthcheck.core.text import number
    from healthcheck.rulelang.quantities import parse_quantity

    measure, reference = MEASURES[name], float(entry["value"])
    if measure.of_machine and where and where != machine():
        note(f"{name} was not compared: its reference is of another machine ({where}), this is {machine()}")
        return ""
    allowed = given if given is not None else entry.get("tolerance")
    tolerance = measure.tolerance if allowed is None else parse_quantity(allowed)
    room = max(abs(reference) * tolerance, measure.slack)
    worse = value - reference if measure.worse == "above" else reference - value
    unit = {"peak_memory": "bytes", "throughput": "1/s"}.get(name, "")
    if math.isfinite(value) and worse <= room:
        if worse < -room:
            note(
                f"{name} {number(value, unit)} is better than its reference {number(reference, unit)}; accept it: {OPTION}"
            )
        return ""
    return f"{name} is {number(value, unit)}, reference {number(reference, unit)}, {measure.worse} by more than {tolerance:.0%}"


def _wanted(given: Any) -> dict[str, Any]:
    """Measure -> tolerance (None: that of the file). Raises ``HealthCheckFailed`` for an unknown measure."""
    if not given:
        return {}
    names: Mapping[str, Any] = (
        given
        if isinstance(given, Mapping)
        else dict.fromkeys([given] if isinstance(given, str) else MEASURES if given is True else given)
    )
    for name in names:
        if name not in MEASURES:
            raise HealthCheckFailed(f'there is no measure "{name}"; there are: {", ".join(MEASURES)}')
    return dict(names)


def _why(missing: Iterable[str]) -> str:
    return "  no loss was seen" if "final_loss" in missing else "  it needs two steps at least (memory: Linux or CUDA)"


def load(path: Path) -> dict[str, Any]:
    """Test -> its entry. Raises ``HealthCheckFailed`` for a file that is none of ours."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as error:
        raise HealthCheckFailed(f"{shown(path)} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("healthcheck_reference") != 1:
        raise HealthCheckFailed(f"{shown(path)} is not a reference file: healthcheck_reference: 1 is missing")
    return dict(data.get("tests") or {})


def update(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write what tests measured, in the one process that has all of it; returns the files."""
    import yaml

    files: dict[Path, dict[str, Any]] = {}
    for new in entries:
        path = Path(new["path"])
        tests = files.setdefault(path, load(path))
        old = tests.get(new["test"], {})
        tests[new["test"]] = made = {"machine": new["machine"]}
        for name, fresh in new["entry"].items():
            tolerance = (old.get(name) or {}).get("tolerance", fresh["tolerance"])
            made[name] = {"value": float(f"{fresh['value']:.6g}")} | (
                {} if tolerance is None else {"tolerance": tolerance}
            )
    for path, tests in files.items():
        text = HEAD + yaml.safe_dump(
            {"healthcheck_reference": 1, "tests": dict(sorted(tests.items()))}, sort_keys=False
        )
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    return [shown(path) for path in files]
