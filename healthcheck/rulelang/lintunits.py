"""Warnings of ``healthcheck check`` about limits whose unit was probably forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from healthcheck.errors import Problem
from healthcheck.registry import Registry
from healthcheck.rulelang.comparators import COMPARATORS
from healthcheck.rulelang.merge import Draft, Merged
from healthcheck.rulelang.quantities import number_text
from healthcheck.rulelang.rule import Rule, RuleSet

SAME_UNIT = ("mean", "median", "percentile", "min", "max")
"""Conditions whose score has the unit of the metric."""
SMALLEST_BYTES = 1024


def missing_units(rules: RuleSet, merged: Merged, registry: Registry) -> Iterator[Problem]:
    """``memory.fraction`` above 92: a part of one never is. ``memory.allocated`` above 20: that is 20 bytes."""
    for rule in rules.rules:
        metric = registry.metrics.get(rule.selector.key)
        draft = merged.rules[rule.id]
        if metric is not None and metric.unit in ("fraction", "bytes") and draft.document.own:
            yield from _limits(rule, draft, metric.unit)


def _limits(rule: Rule, draft: Draft, unit: str) -> Iterator[Problem]:
    entry = draft.entries["when"]
    where = entry.where
    body = entry.value
    for name in SAME_UNIT:
        if isinstance(body, Mapping) and name in body:
            body, where = body[name], (*where, name)
    if not isinstance(body, Mapping):
        return
    for key in COMPARATORS:
        limit = body.get(key)
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            continue
        if unit == "fraction" and limit > 1:
            percent = f"{number_text(limit)}%"
            fix = (str(limit), percent) if limit <= 100 else None
            text = f"{rule.selector} is a part of 1, and {number_text(limit)} means {number_text(limit * 100)}%"
            hint = f'did you mean "{percent}"?' if fix else "write a percentage, for instance 90%"
        elif unit == "bytes" and 0 < limit < SMALLEST_BYTES:
            fix = None
            text = f"{rule.selector} counts bytes, and this is {number_text(limit)} of them"
            hint = f"did you mean {number_text(limit)}GiB or {number_text(limit)}MiB?"
        else:
            continue
        yield entry.document.problem(
            (*where, key),
            "missing-unit",
            f'rule "{rule.id}": {text}',
            severity="warning",
            suggestion=hint,
            fix=fix,
        )
