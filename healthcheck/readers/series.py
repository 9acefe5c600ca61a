"""A recorded run as batches of samples, in the order in which they were written.

::

    run = read_run("runs/7/metrics.csv")
    for step, seconds, samples in run.batches():
        engine.evaluate(step, samples, seconds)

Streaming: apart from the first rows, one row is in memory at a time (tables that must be sorted or
checked as a whole excepted: long tables, result tables of model cards).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from healthcheck.readers import cardtable, longform
from healthcheck.readers.base import PEEK_ROWS, Position
from healthcheck.readers.columns import Columns, show
from healthcheck.readers.normalise import decide
from healthcheck.readers.nulls import Nulls, filled_with_nan
from healthcheck.readers.rows import RowReader
from healthcheck.readers.values import to_number
from healthcheck.samples import NO_LABELS, Labels, Sample, series_name

if TYPE_CHECKING:
    from healthcheck.protocols import Reader

Batch = tuple[int, float, list[Sample]]
Item = tuple[Position | None, Mapping[str, Any]]

_MOST_CARD_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Resume:
    """The run went back: after ``before`` came ``step`` again (a restart from a checkpoint)."""

    before: int
    step: int
    from_start: bool = False
    """At or before the first step of the record: it may as well be another run, appended."""

    def __str__(self) -> str:
        if self.from_start:
            return (
                f"after step {self.before:,} the record begins again at step {self.step:,}; judged as a resume: "
                "if it is another run, give each a file of its own"
            )
        return f"after step {self.before:,} the record goes on at step {self.step:,} (resumed)"


@dataclass(slots=True)
class Column:
    """All values of one series: steps and values, equally long."""

    steps: array[int]
    values: array[float]
    phase: str


class RecordedRun:
    """One recorded run, ready to be replayed. Each call of :meth:`batches` reads the file again."""

    def __init__(self, path: Path, reader: Reader, *, mapping: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.reader = reader
        self.mapping = dict(mapping or {})
        self.notes: list[str] = []
        """What a reader of the result should know: damage, NaN written as null, dropped repeats."""
        self.resumes: list[Resume] = []
        """Filled while the batches are read: each entry is there before its first batch is."""
        self._columns: Columns | None = None
        self._first = 0

    # -- what is in it ----------------------------------------------------------------

    @property
    def columns(self) -> Columns:
        """How the columns were read; looks at the first rows only."""
        if self._columns is None:
            items = self._items([])
            self._columns = decide(list(islice(items, PEEK_ROWS)), self.mapping)
        return self._columns

    def show_columns(self) -> str:
        """Text for ``--show-columns``: which column became which metric."""
        if hasattr(self.reader, "batches"):
            return "our own record: names as they were recorded"
        return show(self.columns)

    @property
    def facts(self) -> dict[str, Any]:
        """Settings of the run found beside it (Lightning's ``hparams.yaml``), if they are readable."""
        from healthcheck.readers.facts import facts_beside

        return facts_beside(self.path)

    # -- reading ----------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """Yield ``(step, seconds, samples)`` in recorded order.

        ``seconds`` counts from the first row and never falls; 0.0 where the file has no clock. Rows
        of one step whose series do not clash are one batch. A step that goes back is yielded as it
        is, after an entry in :attr:`resumes`.
        """
        self.notes = []
        self.resumes = []
        whole = getattr(self.reader, "batches", None)
        read = self._recorded(whole(self.path, self.notes)) if whole is not None else self._normalised()
        for first in read:
            self._first = first[0]
            yield first
            break
        yield from read

    def series(self) -> dict[str, Column]:
        """Everything at once, by series name: compact arrays for plots and benches."""
        found: dict[tuple[str, Labels], Column] = {}
        for step, _, samples in self.batches():
            for sample in samples:
                key = sample.metric, sample.labels
                column = found.get(key)
                if column is None:
                    column = found[key] = Column(array("q"), array("d"), sample.phase)
                column.steps.append(step)
                column.values.append(sample.value)
        return {series_name(*key): column for key, column in found.items()}

    def _items(self, notes: list[str]) -> Iterator[Item]:
        items = cast("Iterator[Item]", iter(self.reader.read(self.path, notes)))
        peek = list(islice(items, PEEK_ROWS))
        items = chain(peek, items)
        long = longform.name_and_value(peek)
        return longform.pivoted(items, *long, notes) if long else items

    def _normalised(self) -> Iterator[Batch]:
        items = self._items(self.notes)
        peek = list(islice(items, PEEK_ROWS))
        columns = self._columns = decide(peek, self.mapping)
        self.notes.extend(columns.notes)
        rows = [row for _, row in peek]
        unused = frozenset(n for n, t in columns.targets.items() if t is None)
        evaluation = frozenset(n for n, t in columns.targets.items() if t is not None and t.phase == "eval")
        nulls = Nulls(rows, unused, evaluation)
        stream: Iterator[Item] = chain(peek, items)
        filled = filled_with_nan(rows, evaluation)
        if filled:
            stream = self._without_fill(stream, filled)
        card = _card_columns(columns, peek)
        if card:
            stream = self._without_stale(list(islice(stream, _MOST_CARD_ROWS)), stream, *card)
        return RowReader(columns, nulls, self.notes, self._resumed).batches(stream)

    def _resumed(self, before: int, step: int) -> None:
        resume = Resume(before, step, from_start=step <= self._first)
        self.resumes.append(resume)
        if len(self.resumes) <= 5:
            self.notes.append(str(resume))

    def _without_stale(self, rows: list[Item], more: Iterator[Item], step: str, loss: str) -> Iterator[Item]:
        steps = [to_number(row.get(step)) or 0.0 for _, row in rows]
        stale, every = cardtable.stale_rows(steps, [to_number(row.get(loss)) for _, row in rows])
        if stale:
            self.notes.append(
                f'{len(stale)} values of "{loss}" repeat the last logged one '
                f"(logged every {every:,} steps, a row per evaluation); dropped"
            )
        for index, (position, row) in enumerate(rows):
            yield position, {k: v for k, v in row.items() if k != loss} if index in stale else row
        yield from more

    def _without_fill(self, items: Iterator[Item], filled: Mapping[str, tuple[int, int]]) -> Iterator[Item]:
        for name, (every, _) in filled.items():
            self.notes.append(f'"{name}" has a number in every {every}th row and nan between: read as empty cells')
        for index, (position, row) in enumerate(items):
            empty = {n for n, (every, first) in filled.items() if (index - first) % every and row.get(n) != row.get(n)}
            yield position, {k: v for k, v in row.items() if k not in empty} if empty else row

    def _recorded(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        last: int | None = None
        for batch in batches:
            if last is not None and batch[0] < last:
                self._resumed(last, batch[0])
            last = batch[0]
            yield batch


def _card_columns(columns: Columns, peek: Sequence[Item]) -> tuple[str, str] | None:
    """Step and training-loss column, if this is a table with one row per evaluation."""
    loss = columns.owners.get(("loss", NO_LABELS), "")
    evaluation = columns.owners.get(("eval.loss", NO_LABELS), "")
    if not (loss and evaluation and columns.epoch and len(columns.steps) == 1) or len(peek) < 4:
        return None
    step = columns.steps[0]
    whole = all(evaluation in row and step in row and columns.epoch in row for _, row in peek)
    return (step, loss) if whole else None
