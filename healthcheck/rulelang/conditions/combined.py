"""``all`` and ``any``: several conditions in one rule, one level deep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.comparators import count_reached
from healthcheck.rulelang.conditions.base import CompiledParts, Identity, OptionError

PART_COMPILER = "compile_part"
"""Key under which the rule compiler hands itself to these two conditions: selectors and other
conditions are its business. ``compile_part(part, index) -> (Selector or None, Condition)``."""


def _type(name: str, help: str) -> ConditionType:
    def compile(options: Any, rule: Mapping[str, Any]) -> Condition:
        compile_part: Callable[[Any, int], tuple[Any, Condition]] | None = rule.get(PART_COMPILER)
        if compile_part is None:
            raise OptionError(f"`{name}` cannot stand inside another condition")
        parts = tuple(compile_part(part, index) for index, part in enumerate(options))
        need = len(parts) if name == "all" else 1
        joiner = " and " if name == "all" else " or "
        words = joiner.join(
            " ".join(filter(None, (str(selector or ""), _score_name(condition), condition.breaches.text)))
            for selector, condition in parts
        )
        return CompiledParts(
            name,
            count_reached(need, words),
            Identity,  # the engine hands it the number of parts that breach
            "{series} {value}: {threshold}",
            baseline=any(c.baseline for _, c in parts),
            min_samples=max((getattr(c, "min_samples", 1) for _, c in parts), default=1),
            window=max((getattr(c, "window", 0) for _, c in parts), default=0),
            parts=parts,
        )

    schema = {
        "description": help,
        "type": "array",
        "minItems": 2,
        "maxItems": 8,
        "items": {"$ref": "#/definitions/part"},
        "errorMessage": f"`{name}` takes a list of at least two conditions",
    }
    return ConditionType(name, schema, compile, help=help)


def _score_name(condition: Condition) -> str:
    from healthcheck.rulelang.comparators import COMPARATORS

    return "" if condition.name in (*COMPARATORS, "nonfinite", "unchanged", "no_improvement") else condition.name


ALL = _type("all", "Breaches when all of these conditions breach; each may name its own `metric`.")
ANY = _type("any", "Breaches when one of these conditions breaches; each may name its own `metric`.")
