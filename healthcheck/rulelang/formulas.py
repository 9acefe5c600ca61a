"""The ``metrics:`` block: formulas compiled, and ordered so that each comes after what it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from healthcheck.errors import Problem
from healthcheck.registry import Registry
from healthcheck.rulelang.arithmetic import Formula, parse_formula
from healthcheck.rulelang.formulaparser import FormulaError
from healthcheck.rulelang.known import KnownMetrics
from healthcheck.rulelang.merge import Entry, Merged
from healthcheck.rulelang.rule import Derived


def compile_formulas(merged: Merged, problems: list[Problem], registry: Registry) -> tuple[list[Derived], list[str]]:
    """Compiled formulas in an order in which each comes after those it uses; external names."""
    external = [str(entry.value) for entry in merged.external]
    formulas: dict[str, Formula] = {}
    for name, entry in merged.metrics.items():
        if name in registry.metrics:
            problems.append(
                entry.document.problem(
                    entry.where, "metric-exists", f'a probe provides "{name}" already; choose another name', key=True
                )
            )
            continue
        try:
            formulas[name] = parse_formula(name, str(entry.value), entry.origin)
        except FormulaError as error:
            problems.append(
                entry.document.problem(
                    entry.where,
                    error.slug,
                    str(error),
                    offset=error.column,
                    width=error.width,
                    suggestion=error.suggestion,
                )
            )
    return _sorted(formulas, merged.metrics, problems), external


def _sorted(formulas: dict[str, Formula], entries: Mapping[str, Entry], problems: list[Problem]) -> list[Derived]:
    done: dict[str, Formula] = {}
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 2 or name not in formulas:
            return
        if state.get(name) == 1:
            ring = " -> ".join([*path[path.index(name) :], name])
            entry = entries[name]
            problems.append(
                entry.document.problem(entry.where, "metric-cycle", f"this formula needs itself: {ring}", key=True)
            )
            return
        state[name] = 1
        for used in formulas[name].inputs:
            visit(used, (*path, name))
        state[name] = 2
        done[name] = formulas[name]

    if len(formulas) > 500:
        entry = next(iter(entries.values()))
        problems.append(
            entry.document.problem(("metrics",), "too-many-metrics", f"{len(formulas)} formulas; at most 500", key=True)
        )
        return []
    for name in formulas:
        visit(name, ())
    return list(done.values())


def check_formulas(derived: Sequence[Derived], merged: Merged, known: KnownMetrics, problems: list[Problem]) -> None:
    for formula in derived:
        entry = merged.metrics[formula.name]
        for use in getattr(formula, "uses", ()):
            if not known.has(use.name):
                text, hint = known.unknown(use.name)
                problems.append(
                    entry.document.problem(
                        entry.where, "unknown-metric", text, offset=use.column, width=len(use.name), suggestion=hint
                    )
                )
