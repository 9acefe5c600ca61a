"""Which column is what: the step, the clock, and a metric name for every number.

Looks at the first rows of a file once and decides; later columns are fitted in as they come. Where
several columns are known names of one metric, those with at least 80 % as many values as the fullest
stay in the race and the surest name wins (``loss`` before ``train_loss`` before ``avg_loss``); the
others keep their own names. Nothing is lost except bookkeeping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from healthcheck.errors import UsageError
from healthcheck.readers.base import Position
from healthcheck.readers.columns import Columns, Row, Series, Target, own_name
from healthcheck.readers.identify import Identity, identify, joined
from healthcheck.readers.locate import Numbers, find_epoch, find_phase, find_steps, find_time
from healthcheck.readers.values import to_number
from healthcheck.reports.record.samplelines import parse_series
from healthcheck.samples import NO_LABELS

_DATASET = re.compile(r"^(?:eval|val|valid|validation|test)_(.+)_(?:runtime|samples_per_second)$")
IGNORE = frozenset({"-", "ignore", "off"})
"""Names that ``--map COLUMN=`` understands as "leave it out"."""


def decide(rows: Sequence[tuple[Position | None, Row]], mapping: Mapping[str, str] | None = None) -> Columns:
    """Read the columns of a file from its first rows. ``mapping``: column -> name, wins over all."""
    columns = Columns()
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
        fullest = max(counts[n] for n in names)
        running = [n for n in names if counts[n] >= 0.8 * fullest]
        winner = min(running, key=lambda n: known[n].rank) if series not in columns.owners else ""
        for name in names:
            identity = known[name]
            target = Target(*series, identity.phase, identity.scale) if name == winner else own_name(name, identity)
            if name != winner and target.series in columns.owners:
                target = Target(f"{target.metric}_", target.labels, target.phase)
            columns.targets[name] = target
            columns.owners[target.series] = name


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
                    known[name] = replace(identity, labels=(("part", identity.part),))
            continue
        nets = [n for n, i in losses.items() if "optimizer" in dict(i.labels)]
        if nets or any("dataset" in dict(i.labels) for i in losses.values()):
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


def _settle_rates(known: dict[str, Identity], counts: Mapping[str, int]) -> None:
    rates = [n for n, i in known.items() if i.metric == "lr" and i.labels]
    if rates and not any(i.metric == "lr" and not i.labels for i in known.values()):
        first = min(rates, key=lambda n: (-counts[n], known[n].rank))
        known[first] = replace(known[first], labels=NO_LABELS)
