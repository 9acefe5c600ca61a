"""From the series of a test to the moments that the engine sees, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from healthcheck.readers.record import RecordReader
from healthcheck.record.lines import parse_series
from healthcheck.ruletests.model import RuleTest, Source
from healthcheck.ruletests.notation import expand
from healthcheck.samples import Labels, Sample, series_name

EVAL_PREFIXES = ("eval.", "val.", "test.")
"""Series that belong to phase ``eval``, as in ``healthcheck.log``."""


@dataclass(slots=True)
class Moment:
    """One step of a played run."""

    step: int
    pause: float
    """Seconds between the moment before and this one."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By rank; ranks without a sample are absent."""


class RecordError(ValueError):
    """A recorded series cannot be used; ``source`` says which."""

    def __init__(self, source: Source, message: str) -> None:
        super().__init__(message)
        self.source = source


def series_of(name: str) -> tuple[str, Labels]:
    """``lr[group=1]`` as metric and labels, in the order that the engine expects."""
    metric, labels = parse_series(name)
    return metric, tuple(sorted(labels))


def timeline(test: RuleTest) -> Iterator[Moment]:
    """All moments of a test in order; the last one may be a gap without samples (its step repeats).

    Raises ``RecordError`` when a record lacks a series.
    """
    steps: dict[int, dict[int, list[Sample]]] = {}
    gaps: dict[int, float] = {}
    """Step before which time passes -> seconds. The same gap in several series is one gap."""
    times: dict[int, float] = {}
    length = 0
    for rank, sources in test.ranks.items():
        for source in sources:
            if source.record is not None:
                length = max(length, _recorded(rank, source, steps, times))
            else:
                length = max(length, _written(test, rank, source, steps, gaps))
    order = sorted({*steps, *range(1, length + 1)} if not times else steps)
    yield from _paced(test, order, steps, gaps, times)


def _paced(
    test: RuleTest,
    order: list[int],
    steps: dict[int, dict[int, list[Sample]]],
    gaps: dict[int, float],
    times: dict[int, float],
) -> Iterator[Moment]:
    before_step = order[0] - 1 if order else 0
    before_time: float | None = None
    for step in order:
        pause = (step - before_step) * test.step_time
        if step in times:
            if before_time is not None:
                pause = max(0.0, times[step] - before_time)
            before_time = times[step]
        pause += sum(seconds for at, seconds in gaps.items() if before_step < at <= step)
        samples = steps.get(step, {})
        for listed in samples.values():
            listed.sort(key=lambda sample: sample.phase != "train")  # an evaluation follows its step
        yield Moment(step, pause, samples)
        before_step = step
    trailing = sum(seconds for at, seconds in gaps.items() if at > before_step)
    if trailing:
        yield Moment(before_step, trailing)


def _written(
    test: RuleTest, rank: int, source: Source, steps: dict[int, dict[int, list[Sample]]], gaps: dict[int, float]
) -> int:
    metric, labels = series_of(source.series)
    phase = "eval" if metric.startswith(EVAL_PREFIXES) else "train"
    seed = f"{test.name}/{source.series}" if rank == 0 else f"{test.name}/{source.series}/{rank}"
    made = expand(list(source.pieces), seed)
    for index, value in enumerate(made.values):
        if value is not None:
            samples = steps.setdefault(index + 1, {}).setdefault(rank, [])
            samples.append(Sample(metric, index + 1, value, labels, phase))
    for index, seconds in made.gaps.items():
        gaps[index + 1] = max(gaps.get(index + 1, 0.0), seconds)
    return len(made.values)


def _recorded(rank: int, source: Source, steps: dict[int, dict[int, list[Sample]]], times: dict[int, float]) -> int:
    assert source.record is not None
    reader = RecordReader()
    head = b""
    if source.record.is_file():
        with source.record.open("rb") as stream:
            head = stream.read(65536)
    if not reader.recognises(source.record, head):
        raise RecordError(source, f"{source.record.name} is not a run record (a run folder, or its samples.jsonl)")
    names: set[str] = set()
    found = 0
    for at, time, batch in reader.batches(source.record, []):
        for sample in batch:
            name = series_name(sample.metric, sample.labels)
            names.add(name)
            if source.metric and name != source.metric:
                continue
            metric, labels = series_of(source.series) if source.series else (sample.metric, sample.labels)
            made = Sample(metric, sample.step, sample.value, labels, sample.phase)
            steps.setdefault(sample.step, {}).setdefault(rank, []).append(made)
            found += 1
        times[at] = max(times.get(at, 0.0), time)
    if not found:
        what = f"no series {source.metric}" if source.metric else "no samples"
        close = ", ".join(sorted(names)[:8])
        raise RecordError(source, f"{source.record.name} holds {what}" + (f"; it has {close}" if close else ""))
    return max(steps)
