"""Numbers with units as people write them: ``16MiB``, ``30%``, ``300s``, ``2 evals``, ``3 of 5``.

Every function raises ``QuantityError`` with a sentence that says what is accepted.
"""

from __future__ import annotations

import math
import re
from typing import Any

from healthcheck.core.text import nearest, one_line
from healthcheck.rulelang.rule import Hold, Span

UNITS: dict[str, float] = {
    "%": 0.01,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "B": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
"""Suffixes of a quantity and what they multiply by. Seconds and bytes are the base units."""

SPOKEN = {
    "percent": "%",
    "microseconds": "us",
    "milliseconds": "ms",
    "seconds": "s",
    "minutes": "min",
    "hours": "h",
    "days": "d",
    "bytes": "B",
    "kilobytes": "KB",
    "megabytes": "MB",
    "gigabytes": "GB",
}
"""Units as people say them, answered with how they are written."""

NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_QUANTITY = re.compile(rf"\s*({NUMBER})\s*([A-Za-z%]*)\s*")
_DURATION = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*(us|ms|s|min|m|h|d)\s*")
_COUNT = re.compile(r"\s*(\d[\d_]*)\s*(samples?|steps?|evals?|evaluations?)?\s*")
_PACE = re.compile(r"([^,]+),\s*then\s+([^,]+)")
_K_OF_N = re.compile(r"\s*(\d+)\s*(?:of|/)\s*(\d+)\s*(samples?|evals?|evaluations?)?\s*")

LONGEST = 64
"""Longest text that is looked at: a quantity is short, and a regular expression should stay so."""


class QuantityError(ValueError):
    """A quantity, span or hold cannot be read; the message says what is accepted.

    :param problem: what is wrong.
    :param advice: what to write instead, where that holds in a rule only; ``str`` has both.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"{problem}; {advice}" if advice else problem)
        self.problem = problem


def _nearest_unit(written: str) -> str:
    """``gb`` -> ``GB``, ``GBs`` -> ``GB``, ``seconds`` -> ``s``; empty if nothing is near."""
    words = {**{unit: unit for unit in UNITS}, **SPOKEN}
    alike = next((unit for unit in UNITS if unit.lower() == written.lower()), "")
    return alike or words.get(nearest(written, words, 0.66), "")


def parse_quantity(value: Any) -> float:
    """``0.3``, ``30%``, ``16MiB``, ``300ms`` as a number in base units (seconds, bytes, fraction)."""
    if isinstance(value, bool):  # an int for Python, a slip in YAML
        raise QuantityError(f"expected a number, found {str(value).lower()}")
    if isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            raise QuantityError("this number is too large") from None
    else:
        text = str(value)
        found = _QUANTITY.fullmatch(text) if len(text) <= LONGEST else None
        if found is None:
            raise QuantityError(f'"{one_line(text)}" is not a number; write for instance 0.3, 30%, 300ms or 16MiB')
        unit = found[2]
        if unit and unit not in UNITS:
            near = _nearest_unit(unit)
            hint = f'; write "{near}"' if near else f"; known units: {', '.join(UNITS)}"
            raise QuantityError(f'unknown unit "{unit}"{hint}')
        number = float(found[1].replace("_", "")) * UNITS.get(unit, 1.0)
    if not math.isfinite(number):
        raise QuantityError("a threshold must be finite", "to catch NaN and infinity write `when: nonfinite`")
    return number


def parse_duration(value: Any) -> float:
    """``300s``, ``5m``, ``1h30m`` in seconds. A bare number is refused: it has no unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise QuantityError(f'a duration needs a unit; write "{value:g}s", or m, h')
    seconds = duration_or_none(value)
    if seconds is None:
        raise QuantityError(f'"{one_line(str(value))}" is not a duration; write for instance 30s, 5m or 1h30m')
    return seconds


def duration_or_none(value: Any) -> float | None:
    """Seconds if the text is a duration, else None."""
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST:
        return None
    seconds, at = 0.0, 0
    while at < len(value):
        found = _DURATION.match(value, at)
        if found is None:
            return None
        seconds += float(found[1].replace("_", "")) * UNITS[found[2]]
        at = found.end()
    return seconds


def parse_span(value: Any, *, default: str = "steps") -> Span:
    """``100`` (in ``default`` units), ``100 steps``, ``20 samples``, ``2 evals``, ``30s``.

    An evaluation is one sample of an evaluation metric, so ``2 evals`` becomes two samples.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise QuantityError("a length cannot be negative")
        return Span(value, default)
    seconds = duration_or_none(value)
    if seconds is not None:
        return Span(seconds, "seconds")
    text = str(value)
    found = _COUNT.fullmatch(text) if isinstance(value, str) and len(text) <= LONGEST else None
    if found is None:
        raise QuantityError(
            f'"{one_line(text)}" is not a length; write a number of {default}, "100 steps", "20 samples", "2 evals" or "30s"'
        )
    unit = found[2] or default
    return Span(int(found[1].replace("_", "")), "steps" if unit.startswith("step") else "samples")


def parse_hold(value: Any) -> Hold:
    """The value of ``for``: ``3``, ``3 samples``, ``3 of 5``, ``30s``."""
    text = value if isinstance(value, str) and len(value) <= LONGEST else ""
    if isinstance(value, int) and not isinstance(value, bool):
        need = of = value
    elif of_both := _K_OF_N.fullmatch(text):
        need, of = int(of_both[1]), int(of_both[2])
    elif (seconds := duration_or_none(text)) is not None:
        if seconds <= 0:
            raise QuantityError("`for` must be longer than zero")
        return Hold(seconds=seconds)
    elif counted := _COUNT.fullmatch(text):
        if (counted[2] or "").startswith("step"):
            raise QuantityError(
                f'`for` counts samples, not steps; write "{counted[1]} samples", or a duration such as "30s"'
            )
        need = of = int(counted[1])
    else:
        raise QuantityError(f'"{one_line(str(value))}" is not valid for `for`; write 3, "3 of 5" or "30s"')
    if need < 1:
        raise QuantityError("`for` needs at least 1 sample")
    if need > of:
        raise QuantityError(f"{need} of {of} can never happen; the second number is the larger one")
    if of > 1_000_000:
        raise QuantityError(f"`for` looks back {of:,} samples; that is more than a million")
    return Hold(need=need, of=of)


def parse_pace(value: Any) -> tuple[int, int]:
    """The value of ``every``: ``10``, ``10 steps``, ``10, then 50``. The second number is 0 where it is not written."""
    both = _PACE.fullmatch(value) if isinstance(value, str) and len(value) <= LONGEST else None
    paces = [parse_span(part) for part in (both.groups() if both else (value,))]
    if any(pace.unit != "steps" for pace in paces):
        raise QuantityError("`every` counts steps; write for instance every: 100")
    if any(pace.amount < 1 for pace in paces):
        raise QuantityError("`every` must be at least 1")
    every, settled = int(paces[0].amount), int(paces[1].amount) if both else 0
    if settled % every:
        raise QuantityError(
            f"`every: {every}, then {settled}` would leave the steps of the first number: "
            f"the second must be a multiple of it, such as {-(-settled // every) * every}"
        )
    return every, settled


def parse_steps(value: Any) -> tuple[int, int | None]:
    """The span of a mute: ``12000..12500``, ``12000..``, ``..500``, ``12000``; both ends included."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    found = re.fullmatch(r"\s*(\d[\d_]*)?\s*\.\.\s*(\d[\d_]*)?\s*", str(value)[:LONGEST])
    if found is None:
        single = re.fullmatch(r"\s*(\d[\d_]*)\s*", str(value)[:LONGEST])
        if single is None:
            raise QuantityError(f'"{one_line(str(value))}" is not a span of steps; write "12000..12500" or "12000.."')
        step = int(single[1].replace("_", ""))
        return step, step
    first = int(found[1].replace("_", "")) if found[1] else 0
    last = int(found[2].replace("_", "")) if found[2] else None
    if last is not None and last < first:
        raise QuantityError(f"the span {first}..{last} ends before it begins")
    return first, last
