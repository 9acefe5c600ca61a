"""A recorded run as samples in order: a metric name for every number, whatever the layout of its file.

Looks at the first rows of a file once and decides; later columns are fitted in as they come. Where
several columns are known names of one metric, those with at least 80 % as many values as the fullest
stay in the race and the surest name wins (``loss`` before ``train_loss`` before ``avg_loss``); the
others keep their own names. Nothing is lost except bookkeeping.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.names import OF_AGENTS
from healthcheck.core.protocols import Position
from healthcheck.core.samples import NO_LABELS, Labels, Sample, series_name
from healthcheck.core.text import load_json
from healthcheck.readers.base import PEEK_ROWS, UNNAMED, UnreadableRunError, to_number
from healthcheck.readers.columns import (
    Columns,
    Identity,
    Row,
    Series,
    Target,
    identify,
    joined,
    of_batch,
    own_name,
    show,
    step_rank,
)
from healthcheck.readers.names import (
    AGENT_WORDS,
    EVAL_WORDS,
    POLICY_WORDS,
    TRAIN_WORDS,
)
from healthcheck.readers.rows import (
    Nulls,
    Numbers,
    RowReader,
    filled_with_nan,
    find_epoch,
    find_phase,
    find_steps,
    find_time,
)
from healthcheck.record.lines import parse_series

if TYPE_CHECKING:
    from healthcheck.core.protocols import Reader

_DATASET = re.compile(r"^(?:eval|val|valid|validation|test)_(.+)_(?:runtime|samples_per_second)$")
IGNORE = frozenset({"-", "ignore", "off"})
"""Names that ``--map COLUMN=`` understands as "leave it out"."""


def decide(
    rows: Sequence[tuple[Position | None, Row]],
    mapping: Mapping[str, str] | None = None,
    declared: frozenset[str] = frozenset(),
) -> Columns:
    """Read the columns of a file from its first rows. ``mapping``: column -> name, wins over all.

    ``declared``: names that the file says before its rows, also of columns that fill later.
    """
    columns = Columns(declared=declared)
    peek = [row for _, row in rows]
    columns.positioned = any(p is not None and p.step is not None for p, _ in rows)
    numbers: dict[str, list[tuple[int, float]]] = {}
    for index, row in enumerate(peek):
        for name, value in row.items():
            number = to_number(value)
            if number is not None:
                numbers.setdefault(name, []).append((index, number))
            else:
                numbers.setdefault(name, [])
    forced = _forced(columns, mapping or {}, numbers)
    find_phase(columns, peek)
    if "step" not in forced.values() and not columns.positioned:
        find_steps(
            columns, peek, numbers, frozenset(i for i, (p, _) in enumerate(rows) if p is not None and p.phase == "eval")
        )
    find_epoch(columns, peek, numbers)
    if "time" not in forced.values():
        find_time(columns, peek, numbers)
    columns.datasets = frozenset(m.group(1) for n in numbers if (m := _DATASET.match(joined(n))))
    _settle(columns, numbers, forced)
    return columns


def _forced(columns: Columns, mapping: Mapping[str, str], numbers: Mapping[str, Any]) -> dict[str, str]:
    unknown = [name for name in mapping if name not in numbers]
    if unknown and numbers:
        shown = ", ".join(list(numbers)[:12])
        raise UsageError(f'--map: no column is called "{unknown[0]}"; there are {shown}')
    for name, wanted in mapping.items():
        if wanted in IGNORE or wanted == "epoch":
            columns.targets[name] = None
        elif wanted == "step":
            columns.steps = (*columns.steps, name)
            columns.targets[name] = None
        elif wanted == "time":
            columns.time = name
            columns.targets[name] = None
        else:
            metric, labels = parse_series(wanted)
            columns.targets[name] = Target(metric, labels, "eval" if metric.startswith("eval.") else "train")
            columns.owners[metric, labels] = name
    return dict(mapping)


def _settle(columns: Columns, numbers: Numbers, forced: Mapping[str, str]) -> None:
    known: dict[str, Identity] = {}
    for name, values in numbers.items():
        if name in columns.targets:
            continue
        if columns.special(name) or name == columns.phase_column:
            columns.targets[name] = None
        elif values:
            known[name] = identify(name, columns.datasets)
    _settle_families(known)
    _settle_scores(known, numbers)
    counts = {name: len(numbers[name]) for name in known}
    _settle_losses(columns, known, counts, numbers)
    _settle_rates(known, counts)
    for name, identity in list(known.items()):
        rival = any(
            other != name and not known[other].test and known[other].metric == identity.metric for other in known
        )
        if identity.test and rival:
            known[name] = replace(identity, labels=(*identity.labels, ("dataset", "test")))
    groups: dict[Series, list[str]] = {}
    for name, identity in known.items():
        groups.setdefault((identity.metric, identity.labels), []).append(name)
    for series, names in groups.items():
        # The result of an evaluation is what it says of the whole set, however many batches are listed beside it.
        whole = [n for n in names if not (known[n].phase == "eval" and of_batch(n))] or [
            n for n in names if not (columns.declared and columns.is_batch_of(n, known[n]))
        ]
        fullest = max((counts[n] for n in whole), default=0)
        running = [n for n in whole if counts[n] >= 0.8 * fullest]
        winner = (
            min(running, key=lambda n: (known[n].rank, len(n), n), default="") if series not in columns.owners else ""
        )
        for name in names:
            identity = known[name]
            target = Target(*series, identity.phase, identity.scale) if name == winner else own_name(name, identity)
            if name != winner and target.series in columns.owners:
                target = Target(f"{target.metric}_", target.labels, target.phase)
            columns.targets[name] = target
            columns.owners[target.series] = name


_ENTROPY_AS_LOSS = (
    ("train/entropy_loss", "train/policy_gradient_loss", -1.0),  # Stable-Baselines3: negated, as the loss has it
    ("Loss/entropy", "Loss/surrogate", 1.0),  # rsl_rl
)
"""Columns of losses that hold the entropy of a policy, the neighbour that tells whose they are, and the factor."""


_GAMES = frozenset(
    {
        "episode",
        "episodes",
        "episode_number",
        "episode_num",
        "episode_id",
        "game",
        "games",
        "num_games",
        "n_games",
        "n_episodes",
    }
)
_SCORES = ("score", "total_score", "episode_score", "ep_score", "game_score", "final_score", "scores")


def _settle_scores(known: dict[str, Identity], names: Iterable[str]) -> None:
    """The score of a game is its reward: where rows are episodes, or actions are explored, and nothing else is called a reward."""
    if any(identity.metric.removeprefix("eval.") == "reward" for identity in known.values()):
        return
    if not any(joined(name) in _GAMES for name in names) and not any(i.metric == "exploration" for i in known.values()):
        return
    found = [name for name in known if joined(name) in _SCORES and known[name].phase == "train"]
    if found:
        name = min(found, key=lambda n: _SCORES.index(joined(n)))
        known[name] = replace(known[name], metric="reward", rank=40, known=True)


def _settle_families(known: dict[str, Identity]) -> None:
    """What a name means only beside its neighbours, which tell whose it is."""
    if any(n.startswith("metrics/") and i.phase == "eval" for n, i in known.items()):
        # Ultralytics and YOLOv5: precision, recall and accuracy beside a mean average precision are of the same evaluation.
        for name in [n for n, i in known.items() if n.startswith("metrics/") and i.phase == "train"]:
            known[name] = identify(f"eval/{name.removeprefix('metrics/').removesuffix('(B)')}")
    nets = {dict(i.labels).get("optimizer", "") for i in known.values()}
    if "discriminator" in nets and "generator" not in nets:
        # A letter is a discriminator beside its adversary; alone (of a damping, a distance) it is a part like others.
        for name, identity in known.items():
            if identity.part == "d" and ("optimizer", "discriminator") in identity.labels:
                known[name] = replace(identity, labels=(("part", "d"),), rank=max(identity.rank, 40))
    if any(i.metric == "entropy" for i in known.values()):
        return
    for name, neighbour, scale in _ENTROPY_AS_LOSS:
        if name in known and neighbour in known:
            known[name] = replace(known[name], metric="entropy", labels=NO_LABELS, scale=scale, part="")


def _settle_losses(
    columns: Columns,
    known: dict[str, Identity],
    counts: Mapping[str, int],
    numbers: Numbers,
) -> None:
    """Give each phase a plain loss where the columns allow it, and say how."""
    for metric in ("loss", "eval.loss"):
        losses = {n: i for n, i in known.items() if i.metric == metric}
        if not losses:
            continue
        if any(not i.labels for i in losses.values()) or (metric, NO_LABELS) in columns.owners:
            for name, identity in losses.items():
                net = dict(identity.labels).get("optimizer", "")
                if net.startswith(("critic", "value")):
                    known[name] = replace(identity, labels=(("part", "value" if net == "value" else identity.part),))
            continue
        nets = [n for n, i in losses.items() if "optimizer" in dict(i.labels)]
        if nets or any("dataset" in dict(i.labels) for i in losses.values()):
            continue
        losses = _without_agent(losses, acts=any(i.metric in OF_AGENTS for i in known.values()))
        if not losses:
            continue
        kinds = [n for n, i in losses.items() if i.rank < 40]
        chosen = sorted(kinds, key=lambda n: (-counts[n], losses[n].rank))[:1]
        parts = list(losses)
        if not chosen and len(parts) > 1 and len({tuple(i for i, _ in numbers[n]) for n in parts}) == 1:
            columns.sums[metric, NO_LABELS] = tuple(parts)
            columns.owners[metric, NO_LABELS] = "+".join(parts)
            columns.notes.append(f"no column is the whole {metric}: taken as {' + '.join(parts)}")
            continue
        chosen = chosen or [max(parts, key=lambda n: counts[n])]
        known[chosen[0]] = replace(losses[chosen[0]], labels=NO_LABELS)
        columns.notes.append(f'"{chosen[0]}" is taken as {metric}: no column has a plainer name')


def _without_agent(losses: dict[str, Identity], *, acts: bool) -> dict[str, Identity]:
    """The losses without the terms of a policy's objective, which add up to nothing that should fall.

    An entropy or KL term alone is no sign of a policy: a variational autoencoder has the latter.
    """
    said = {n: set(i.part.split("_")) for n, i in losses.items()}
    if all(POLICY_WORDS.isdisjoint(words) for words in said.values()):
        return losses
    left = {n: i for n, i in losses.items() if AGENT_WORDS.isdisjoint(said[n])}
    return left if left or acts or len(losses) > 1 else losses  # a cloned behaviour has a policy's loss, and no reward


def _settle_rates(known: dict[str, Identity], counts: Mapping[str, int]) -> None:
    rates = [n for n, i in known.items() if i.metric == "lr" and i.labels]
    if rates and not any(i.metric == "lr" and not i.labels for i in known.values()):
        first = min(rates, key=lambda n: (-counts[n], known[n].rank))
        known[first] = replace(known[first], labels=NO_LABELS)


# --------------------------------------------------------------------------------------------------
# Long tables: one row per value, with the metric's name in a column (Comet, exported databases).


Item = tuple[Position | None, Mapping[str, Any]]

_NAME = frozenset({"metric", "metric_name", "metricname", "name", "key", "tag", "series", "variable", "metric_key"})
_PHASES = TRAIN_WORDS | EVAL_WORDS
"""A value that is called by its phase alone is the loss."""
_VALUE = frozenset({"value", "metric_value", "metricvalue", "val", "scalar"})


def name_and_value(peek: Sequence[Item]) -> tuple[str, str] | None:
    """The columns that hold the metric's name and its value, if this is a long table."""
    if not peek:
        return None
    columns = list(dict.fromkeys(name for _, row in peek for name in row))
    names = [c for c in columns if joined(c) in _NAME and any(isinstance(row.get(c), str) for _, row in peek)]
    values = [c for c in columns if joined(c) in _VALUE and any(to_number(row.get(c)) is not None for _, row in peek)]
    return (names[0], values[0]) if names and values else None


def pivoted(items: Iterator[Item], name: str, value: str, notes: list[str]) -> Iterator[Item]:
    """The same values as ordinary rows, in the order of their steps.

    Such tables list one metric after the other, so all of it is kept in memory.
    """
    rows: list[tuple[float, int, Item]] = []
    step = ""
    for order, (position, row) in enumerate(items):
        if not step:
            step = min((c for c in row if step_rank(c) is not None), key=lambda c: step_rank(c) or (9, 9), default="")
        label = row.get(name)
        if not isinstance(label, str):
            continue
        kept = {
            k: v
            for k, v in row.items()
            if k not in (name, value) and (k == step or not isinstance(v, str) or "time" in k)
        }
        kept[f"{label}_loss" if label in _PHASES else label] = row.get(value)
        at = to_number(row.get(step)) if step else None
        rows.append((at if at is not None and at == at else float(order), order, (position, kept)))
    rows.sort(key=lambda r: r[:2])
    notes.append(f'long table: metrics named by column "{name}", {len(rows)} values sorted by step')
    yield from (item for _, _, item in rows)


# --------------------------------------------------------------------------------------------------
# Stale training losses in result tables.
#
# The HuggingFace Trainer writes one row per evaluation, with the training loss that it *logged* last. If
# it logs more rarely than it evaluates, values repeat: "No log", 2.31, 0.72, 0.66, 0.63, 0.63, 0.61. With
# logging every L steps, a row at step s shows the log of floor(s / L) * L, so the repeats stand where
# floor(s / L) has not grown. A repeat is dropped only if one L explains the whole table; 0.0 and NaN are
# never dropped, and a loss that does not move at all is kept: that is a finding, not a repeat.


_NICE = tuple(m * 10**e for e in range(6) for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5, 8))


def stale_rows(steps: Sequence[float], losses: Sequence[float | None]) -> tuple[set[int], int]:
    """Indices of rows whose training loss is a repeat, and the logging interval that explains them."""
    best: set[int] = set()
    interval = 0
    distinct = len({v for v in losses if v is not None})
    leading = next((i for i, v in enumerate(losses) if v is not None), len(losses))
    if distinct < (2 if leading else 3):
        return best, interval
    for every in sorted({int(n) for n in _NICE if n == int(n)}):
        stale = _explained(steps, losses, every, leading)
        if stale is not None and len(stale) > len(best):
            best, interval = stale, every
    return {i for i in best if losses[i] not in (0.0,) and losses[i] == losses[i]}, interval


def _explained(steps: Sequence[float], losses: Sequence[float | None], every: int, leading: int) -> set[int] | None:
    """Rows that must repeat with this interval; ``None`` if the table says otherwise."""
    stale: set[int] = set()
    for i, step in enumerate(steps):
        if leading and (step < every) != (i < leading):
            return None
        if i > leading and step // every == steps[i - 1] // every:
            if losses[i] != losses[i - 1]:
                return None
            stale.add(i)
    return stale


# --------------------------------------------------------------------------------------------------
# Settings that stand beside a recorded run.


_MOST_BYTES = 1 << 20


def facts_beside(path: Path) -> dict[str, Any]:
    """``hparams.yaml`` (Lightning), ``args.yaml`` (Ultralytics) or ``config.json`` of a run, parsed safely.

    Files with Python tags are not read: nothing is unpickled or constructed.
    """
    folder = path if path.is_dir() else path.parent
    for name in ("hparams.yaml", "args.yaml"):
        file = folder / name
        if file.is_file() and file.stat().st_size <= _MOST_BYTES:
            try:
                import yaml

                loaded = yaml.safe_load(file.read_text("utf-8", "replace"))
            except Exception:
                continue
            if isinstance(loaded, dict):
                return loaded
    report = folder / "report.json"
    if report.is_file() and report.stat().st_size <= 16 * _MOST_BYTES:
        try:
            loaded = load_json(report.read_text("utf-8", "replace"))
        except ValueError:
            return {}
        if isinstance(loaded, dict):
            return {"report": loaded}
    return {}


# --------------------------------------------------------------------------------------------------
# A recorded run as batches of samples, in the order in which they were written.
#
# ::
#
#     run = read_run("runs/7/metrics.csv")
#     for step, seconds, samples in run.batches():
#         engine.evaluate(step, samples, seconds)
#
# Streaming: apart from the first rows, one row is in memory at a time (tables that must be sorted or
# checked as a whole excepted: long tables, result tables of model cards).


Batch = tuple[int, float, Sequence[Sample]]

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
                f"after step {self.before:,} the record begins again at step {self.step:,}: "
                "judged as another run if its loss begins again too, otherwise as a resume"
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
            self._columns = self._decided(list(islice(items, PEEK_ROWS)))
        return self._columns

    def _decided(self, peek: Sequence[Item]) -> Columns:
        said = getattr(self.reader, "names", None)
        columns = decide(peek, self.mapping, frozenset(said(self.path)) if said is not None else frozenset())
        names = {name for _, row in peek for name in row}
        if names and not self.mapping and all(re.fullmatch(rf"{UNNAMED}\d+", name) for name in names):
            first = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in peek[0][1].values())
            raise UnreadableRunError(
                self.path,
                f"this table has no header: its first line is {first[:60]}{' ...' if len(first) > 60 else ''}",
                "write the names of the columns above it, or say which is which, for example "
                f"--map {UNNAMED}1=step --map {UNNAMED}2=loss",
            )
        return columns

    def show_columns(self) -> str:
        """Text for ``--show-columns``: which column became which metric."""
        if hasattr(self.reader, "batches"):
            return "our own record: names as they were recorded"
        return show(self.columns)

    @property
    def facts(self) -> dict[str, Any]:
        """Settings of the run found beside it (Lightning's ``hparams.yaml``), if they are readable."""
        from healthcheck.readers.series import facts_beside

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
        items: Iterator[Item] = iter(self.reader.read(self.path, notes))
        peek = list(islice(items, PEEK_ROWS))
        items = chain(peek, items)
        long = name_and_value(peek)
        return pivoted(items, *long, notes) if long else items

    def _normalised(self) -> Iterator[Batch]:
        items = self._items(self.notes)
        peek = list(islice(items, PEEK_ROWS))
        columns = self._columns = self._decided(peek)
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
        stale, every = stale_rows(steps, [to_number(row.get(loss)) for _, row in rows])
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
