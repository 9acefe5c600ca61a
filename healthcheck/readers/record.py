"""Our own run record: a run folder with ``samples.jsonl``, or that file.

The lines are described in :mod:`healthcheck.record.lines`. They are evaluations already: names,
steps, times and batches are taken as they are, so that a replay sees what the live run saw.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.core.samples import Labels, Sample
from healthcheck.core.text import decode_number, has_huge_number, load_json
from healthcheck.readers.base import head_text, open_text
from healthcheck.record.lines import parse_series
from healthcheck.record.segments import PACKED, has_samples, sample_lines
from healthcheck.record.segments import TAIL as FILE

THINNED = "only a part of the evaluations was kept"
MISSING = "evaluations are missing: they could not be written in time"
_decode = json.JSONDecoder().raw_decode


class RecordReader:
    """The record that every watched run writes."""

    name = "record"
    help = "our own run record: a run folder, or its samples.jsonl"

    def recognises(self, path: Path, head: bytes) -> float:
        if path.is_dir():
            # A run that never took a step has no samples, and is one run all the same.
            empty = (path / "run.json").is_file() and (path / "rules.yaml").is_file()
            return 1.0 if has_samples(path) or empty else 0.0
        for line in head_text(head).split("\n")[:50]:
            try:
                entry = load_json(line)
            except ValueError:
                return 0.0
            if not isinstance(entry, dict):
                return 0.0
            if isinstance(entry.get("m"), dict):
                return 1.0 if "step" in entry and "t" in entry else 0.0
            if not {"series", "gap", "thinned"} & set(entry):
                return 0.0
        return 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        for _, time, samples in self.batches(path, notes):
            for sample in samples:
                yield Position(sample.step, time, sample.phase), {sample.metric: sample.value}

    def batches(self, path: Path, notes: list[str]) -> Iterator[tuple[int, float, list[Sample]]]:
        """Yield each evaluation as ``(step during which it was judged, seconds, samples)``."""
        file = path / FILE if path.is_dir() else path
        # The tail of a longer record was named: its closed parts belong to it.
        whole = path.is_dir() or (path.name == FILE and (path.parent / PACKED).is_file())
        names: dict[str, tuple[str, Labels]] = {}
        bad = gaps = thinned_to = 0
        at, now = 0, 0.0
        samples: list[Sample] | None = None
        with contextlib.ExitStack() as opened:
            lines: Iterable[str]
            if whole:
                lines = (line.decode("utf-8", "replace") for line in sample_lines(file.parent))
            else:
                lines = opened.enter_context(open_text(file))
            for line in lines:
                try:
                    entry = load_json(line) if has_huge_number(line) else _decode(line)[0]
                    values = entry.get("m")
                    if values is None:
                        for name, (metric, labels) in entry.get("series", {}).items():
                            names[name] = (metric, tuple((str(k), str(v)) for k, v in labels))
                        gaps += int(entry.get("gap", 0))
                        thinned_to = int(entry.get("to", thinned_to))
                        continue
                    step, phase = int(entry["step"]), str(entry.get("p", "train"))
                    begins = samples is None or "cont" not in entry
                    following = (int(entry.get("at", step)), float(entry["t"])) if begins else (at, now)
                    if not math.isfinite(following[1]):
                        raise ValueError("no time")
                    numbers = [(n, v if v.__class__ is float else decode_number(v)) for n, v in values.items()]
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    bad += bool(line.strip())
                    continue
                # Only of a line that is whole: half of one would be the evaluation before it again.
                if samples is None:
                    samples = []
                elif begins:
                    yield at, now, samples
                    samples = []
                at, now = following
                for name, number in numbers:
                    series = names.get(name)
                    if series is None:
                        series = names[name] = parse_series(name)
                    samples.append(Sample(series[0], step, number, series[1], phase, now))
        if samples is not None:
            yield at, now, samples
        if bad:
            notes.append(f"{bad} lines of {file.name} are damaged; skipped")
        if gaps:
            notes.append(f"{gaps} {MISSING}")
        if thinned_to:
            notes.append(f"up to step {thinned_to:,} {THINNED}")


def incomplete(notes: Iterable[str]) -> str:
    """Why a record is not all that its run judged, from the notes of its reading; empty if it is."""
    return "; ".join(dict.fromkeys(note for note in notes if note.endswith((THINNED, MISSING))))
