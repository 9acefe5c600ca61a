"""``above``, ``below``, ``at_least``, ``at_most``, ``equals``, ``outside``: the value itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.comparators import COMPARATORS, make_comparator
from healthcheck.rulelang.conditions.base import Compiled, Identity, OptionError, comparator_schemas
from healthcheck.rulelang.quantities import QuantityError


def threshold_type(kind: str) -> ConditionType:
    """The condition type of one comparator."""

    def compile(options: Any, rule: Mapping[str, Any]) -> Condition:
        try:
            comparator = make_comparator(kind, options)
        except QuantityError as error:
            raise OptionError(str(error)) from None
        return Compiled(kind, comparator, Identity, sentence="{series} {value} is {threshold}")

    schema = comparator_schemas()[kind]
    return ConditionType(kind, schema, compile, help=str(schema["description"]).replace("score", "value"))


THRESHOLDS = tuple(threshold_type(kind) for kind in COMPARATORS)
