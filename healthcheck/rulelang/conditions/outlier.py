"""``outlier``: one series against its siblings, for instance one rank against the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.conditions.base import Compiled, Identity, options_schema, the_comparator


def compile_outlier(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "outlier")
    return Compiled(
        "outlier",
        breaches,
        Identity,  # the engine hands it value / median of the siblings
        f"{{series}} {{value}} is {{score:.2f}} times the median over all {options['across']}s, {{normal}}",
        across=str(options["across"]),
    )


OUTLIER = ConditionType(
    "outlier",
    options_schema(
        "value / median of the sibling series that differ from it in one label.",
        required=("across",),
        across={
            "description": "The label whose values are siblings: rank, parameter, group, ...",
            "type": "string",
            "minLength": 1,
        },
    ),
    compile_outlier,
    help="The value divided by the median of its sibling series.",
)
