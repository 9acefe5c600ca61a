"""The lines of ``samples.jsonl``: evaluations as JSON, in the order in which rules saw them.

One evaluation is usually one line::

    {"step": 131, "t": 12.25, "p": "train", "m": {"loss": "nan", "grad_norm[head.scale]": 0.5}}

``step`` is the step of the samples, ``t`` the session's seconds of active training when they were
judged, ``m`` the values in their order. What does not fit one line adds keys:

- ``"at": n``: judged during step n, when that is not ``step`` (values that arrived late);
- ``{"cont": true, ...}``: goes on with the evaluation of the line before (another step, phase, or
  a second value of the same series);
- ``{"series": {name: [metric, labels]}}``: labels that the name alone does not give back;
- ``{"gap": n}``: n evaluations could not be written in time and are missing here;
- ``{"thinned": n, "to": step}``: up to this step only a part of the evaluations was kept.

Non-finite values are the strings ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.samples import Labels, Sample, series_name
from healthcheck.core.text import decode_number, encode_number, load_json

Row = tuple[str, Labels, int, str, Any]
"""(metric, labels, step, phase, value)"""

CONTINUED = b'{"cont":true,'
MARKERS = (b'{"series":', b'{"gap":', b'{"thinned":')


@dataclass(slots=True)
class Batch:
    """One evaluation as the record holds it."""

    at: int
    """The step during which it was judged."""
    now: float
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class RecordedSamples:
    """Everything in one ``samples.jsonl``."""

    batches: list[Batch]
    thinned_to: int = 0
    """Up to this step the record is incomplete; 0 if it is complete."""
    gaps: int = 0
    """Evaluations that could not be written in time."""
    bad_lines: int = 0

    @property
    def complete(self) -> bool:
        """Whether a replay must give the same alerts as the run gave."""
        return not self.thinned_to and not self.gaps


class SampleEncoder:
    """Evaluations to lines. Remembers which series names need their labels spelled out."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, Labels], str] = {}
        self._taken: set[str] = set()

    def lines(self, at: int, now: float, rows: Sequence[Row]) -> list[bytes]:
        made: list[bytes] = []
        segment: dict[str, float | str | None] = {}
        position: tuple[int, str] | None = None
        count = 0

        def close() -> None:
            nonlocal segment, count
            place = position or (at, "train")
            entry: dict[str, Any] = {"cont": True} if count else {}
            entry |= {"step": place[0], "t": round(now, 6), "p": place[1]}
            if place[0] != at:
                entry["at"] = at
            entry["m"] = segment
            made.append(_dump(entry))
            count += 1
            segment = {}

        for metric, labels, step, phase, value in rows:
            name = self._names.get((metric, labels)) or self._new_name(metric, labels, made)
            if position is not None and ((step, phase) != position or name in segment):
                close()
            position = (step, phase)
            segment[name] = encode_number(float(value))
        close()
        return made

    def _new_name(self, metric: str, labels: Labels, made: list[bytes]) -> str:
        name = series_name(metric, labels)
        while name in self._taken:
            name += "'"
        if parse_series(name) != (metric, labels):
            made.append(_dump({"series": {name: [metric, [list(pair) for pair in labels]]}}))
        self._names[metric, labels] = name
        self._taken.add(name)
        return name


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parse_series(name: str) -> tuple[str, Labels]:
    """``grad_norm[head.scale]`` -> metric and labels; the inverse of ``series_name`` for plain labels."""
    metric, bracket, inner = name.partition("[")
    if not bracket or not inner.endswith("]"):
        return name, ()
    pairs = []
    for piece in inner[:-1].split(","):
        key, equals, value = piece.partition("=")
        pairs.append((key, value) if equals else ("parameter", key))
    return metric, tuple(pairs)


def read_samples(lines: Iterable[bytes | str]) -> RecordedSamples:
    """Read a whole record. A torn last line, as a killed process leaves it, is counted and skipped."""
    found = RecordedSamples([])
    names: dict[str, tuple[str, Labels]] = {}
    for entry in _entries(lines, found):
        try:
            _take(entry, found, names)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # somebody else wrote this line
            found.bad_lines += 1
    return found


def _take(entry: dict[str, Any], found: RecordedSamples, names: dict[str, tuple[str, Labels]]) -> None:
    if "m" in entry:
        step = int(entry["step"])
        if not entry.get("cont") or not found.batches:
            found.batches.append(Batch(int(entry.get("at", step)), float(entry["t"])))
        batch = found.batches[-1]
        phase, now = str(entry.get("p", "train")), batch.now
        for name, value in entry["m"].items():
            known = names.get(name)
            if known is None:
                known = names[name] = parse_series(name)
            batch.samples.append(Sample(known[0], step, decode_number(value), known[1], phase, now))
    elif "series" in entry:
        for name, (metric, labels) in entry["series"].items():
            names[name] = (metric, tuple((str(k), str(v)) for k, v in labels))
    elif "gap" in entry:
        found.gaps += int(entry["gap"])
    elif "thinned" in entry:
        found.thinned_to = int(entry["to"])


def _entries(lines: Iterable[bytes | str], found: RecordedSamples) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            entry = load_json(line)
        except ValueError:
            found.bad_lines += 1
            continue
        if isinstance(entry, dict):
            yield entry
        else:
            found.bad_lines += 1


class Thinner:
    """Leaves out every second evaluation of the older steps of a record, piece by piece.

    Evaluations within ``keep_steps`` steps of the steps in ``around`` (alerts) all stay, and those after step ``until``.
    Lines that are no evaluation stay too, except an older marker.
    """

    def __init__(self, until: int, around: Sequence[int], keep_steps: int = 100) -> None:
        self._until, self._around, self._near = until, around, keep_steps
        self._keep, self._index = True, 0

    def marker(self, times: int) -> bytes:
        """The first line of the thinned record. ``times``: how often it was thinned, this time included."""
        return _dump({"thinned": times, "to": self._until})

    def take(self, content: bytes) -> bytes:
        """What is kept of the next piece of the record, whole lines."""
        kept: list[bytes] = []
        for line in content.splitlines(keepends=True):
            if line.startswith(b'{"thinned":'):
                continue
            if line.startswith(MARKERS):
                kept.append(line)
                continue
            if not line.startswith(CONTINUED):
                self._index += 1
                step = self.step_of(line) or 0
                near = step > self._until or any(abs(step - at) <= self._near for at in self._around)
                self._keep = near or self._index % 2 == 0
            if self._keep:
                kept.append(line)
        return b"".join(kept)

    @staticmethod
    def step_of(line: bytes) -> int | None:
        """The step of a line that ``SampleEncoder`` wrote, without parsing all of it; None if it has none in front."""
        if not line.startswith(b'{"step":'):
            return None
        try:
            return int(line[len(b'{"step":') : line.index(b",")])
        except ValueError:
            return None
