"""The text of a failed rule test: the difference, and the steps around it. Nothing else."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.alerts import State
from healthcheck.core.text import aligned
from healthcheck.engine.trace import TraceRow, trace
from healthcheck.rulelang.rule import Cause, Origin, RuleSet
from healthcheck.ruletests.compare import Difference
from healthcheck.ruletests.loading import RuleTest
from healthcheck.ruletests.play import Played

ROWS = 8
"""Steps shown at most; the middle of a longer stretch is left out."""


def failure_text(
    test: RuleTest, played: Played, found: list[Difference], fresh: Callable[[], RuleSet], folder: Path
) -> str:
    """All differences of one test.

    :param fresh: makes the rule set of this test anew, for the trace.
    :param folder: of the test file; rule files beside it are named without their folder.
    """
    lines: list[str] = []
    for difference in found:
        lines.append(f"{difference.rule}: {difference.text}")
        lines += [f"  {line}" for line in _evidence(difference, played, fresh, folder)]
    lines += _remarks(test, played, found)
    return "\n".join(lines)


def _remarks(test: RuleTest, played: Played, found: list[Difference]) -> Iterator[str]:
    late = [d.wanted for d in found if d.kind in ("silent", "fires", "clears") and d.wanted is not None]
    if played.stopped_at is not None and not test.continue_after_stop:
        if any(step > played.stopped_at for step in late) or any(
            d.kind == "silent" and d.wanted is None for d in found
        ):
            yield f"{played.stopped_by} stopped the run at step {played.stopped_at:,}; `continue_after_stop: true` plays on"
    elif any(step > played.last_step for step in late):
        yield f"the series end at step {played.last_step:,}"
    for sentence in dict.fromkeys(played.fresh):
        yield f"after the resume: {sentence}"


def _evidence(difference: Difference, played: Played, fresh: Callable[[], RuleSet], folder: Path) -> Iterator[str]:
    name = _cause(difference, played)
    rule = next((r for r in played.rules.causes if r.id == name), None)
    if rule is None:
        return
    if difference.kind not in ("fires", "silent", "unexpected", "clears"):
        if difference.kind in rule.key_origins:
            yield f"<- {_key(rule, difference.kind, folder)}"
        return
    if difference.happened is None and difference.wanted is not None and difference.wanted > played.last_step:
        return  # the run was over by then; a remark says why
    rows = _rows(difference, played, fresh)
    if not rows:
        yield f"no sample of {rule.selector} came"
        return
    key = _deciding(rule, difference, rows)
    mark = _decided_at(difference, rows)
    yield from _table(rows, mark, f"<- {_key(rule, key, folder)}" if key else "")


def _cause(difference: Difference, played: Played) -> str:
    """The cause to look at: the one that fired, else the most certain one of the rule."""
    named = difference.cause or difference.rule
    return next((c.id for c in played.rules.causes if named in (c.id, c.rule)), named)


def _rows(difference: Difference, played: Played, fresh: Callable[[], RuleSet]) -> list[TraceRow]:
    batches = played.batches.get(difference.rank, [])
    steps = [s for s in (difference.wanted, difference.happened) if s is not None and s <= played.last_step]
    if not steps:
        state = played.engines[difference.rank].by_id.get(_cause(difference, played))
        closest = state.closest if state is not None else None
        steps = [closest[1] if closest is not None else played.last_step]
    if difference.kind == "clears" and difference.happened is None:
        steps.append(min(played.last_step, steps[0] + 2))
    first, last = min(steps), max(steps)
    before = last - first + (2 if difference.kind in ("unexpected", "silent") else 1)
    return trace(
        fresh(),
        _cause(difference, played),
        batches,
        last,
        before,
        0,
        rank=difference.rank,
        series=difference.series,
        start_step=played.start_step,
    )


def _deciding(rule: Cause, difference: Difference, rows: list[TraceRow]) -> str:
    """The key of the rule that made the difference."""
    has_for = rule.hold.need > 1 or rule.hold.of > 1 or rule.hold.seconds > 0
    if difference.kind == "clears":
        return "recover" if rule.recover is not None else "for" if has_for else "when"
    early = difference.kind == "unexpected" or (difference.happened or math.inf) < (difference.wanted or 0)
    if early:
        return "for" if has_for else "when"
    row = next((r for r in rows if r.step == difference.wanted), rows[-1])
    if row.state is State.WARMING:
        return "min_samples" if row.key == "min_samples" else "warmup"
    if row.key:
        return row.key
    if row.note:
        return ""
    if row.state in (State.PENDING, State.FIRING):
        return "for" if has_for else "when"
    return "when"


def _decided_at(difference: Difference, rows: list[TraceRow]) -> int:
    """Index of the row that carries the mark."""
    wanted = difference.happened if difference.happened is not None else difference.wanted
    there = [index for index, row in enumerate(rows) if row.step == wanted]
    if difference.kind == "clears":
        return there[-1] if there else len(rows) - 1
    firing = [index for index in there if rows[index].state is State.FIRING]
    return firing[0] if firing else there[0] if there else len(rows) - 1


def _table(rows: list[TraceRow], mark: int, remark: str) -> Iterator[str]:
    cells = [(f"{row.step:,}", aligned(row.value), aligned(row.score), row.words) for row in rows]
    head = ("step", "value", "score", "state")
    wide = [max(len(head[i]), *(len(row[i]) for row in cells)) for i in range(4)]
    yield "  ".join(head[i].ljust(wide[i]) for i in range(4)).rstrip()
    for index, row in enumerate(cells):
        if len(cells) > ROWS and index == ROWS // 2 and mark >= ROWS // 2:
            yield "..."
        if len(cells) > ROWS and ROWS // 2 <= index < len(cells) - ROWS // 2 and index != mark:
            continue
        line = "  ".join(row[i].ljust(wide[i]) for i in range(4))
        yield f"{line}  {remark}".rstrip() if index == mark else line.rstrip()


def _key(rule: Cause, key: str, folder: Path) -> str:
    """```for: 3` at stability.yaml:14``, or that it is a default."""
    written = {
        "for": rule.hold,
        "when": rule.when,
        "warmup": rule.warmup,
        "every": rule.every,
        "severity": rule.severity,
        "min_samples": max(rule.min_samples, rule.condition.min_samples),
        "only_if": ", ".join(guard.metric for guard in rule.only_if),
        "recover": getattr(rule.recover, "text", ""),
        "then": [f"{a.name} (after {a.after})" if a.after > 1 else a.name for a in rule.actions],
    }
    text = f"`{key}: {_flow(written[key])}`" if key in written else f"`{key}`"
    origin = rule.key_origins.get(key)
    if origin is None:
        return f"{text}, the default" if key != "when" else f"{text} at {_place(rule.origin, folder)}"
    return f"{text} at {_place(origin, folder)}"


def _place(origin: Origin, folder: Path) -> str:
    path = Path(origin.path)
    if path.is_absolute() or path.exists():
        near = os.path.relpath(path, folder)
        shown = path.name if near == path.name else (near if not near.startswith("..") else origin.path)
        return f"{shown}:{origin.line}" if origin.line else shown
    return str(origin)


def _flow(value: Any) -> str:
    """YAML flow style, short."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text.removesuffix(" samples").removeprefix("for ")
