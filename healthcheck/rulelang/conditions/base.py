"""What all conditions share: the compiled form, option errors, pieces of schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.protocols import Comparator, Condition, Scorer
from healthcheck.rulelang.comparators import Bound, comparator_in, make_comparator
from healthcheck.rulelang.quantities import QuantityError, parse_span

DEFAULT_MIN_SAMPLES = 8
"""Samples from which a condition with a baseline judges, unless the rule says otherwise."""


class OptionError(ValueError):
    """An option of a condition does not make sense.

    ``path`` is the key path below the condition's value, so that the error points at the line;
    ``rule_key`` names a key of the rule instead (``min_samples``).
    """

    def __init__(self, message: str, *path: str | int, suggestion: str = "", rule_key: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.suggestion = suggestion
        self.rule_key = rule_key


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled condition; see :class:`healthcheck.protocols.Condition`."""

    name: str
    breaches: Comparator
    make: Callable[[], Scorer]
    """Makes the memory of one series."""
    sentence: str = "{series} {value} is {threshold}"
    """Default message of a rule with this condition."""
    judges_nonfinite: bool = False
    absence: str = ""
    baseline: bool = False
    min_samples: int = 1
    """Samples from which it judges, after defaults."""
    window: int = 0
    """Samples that it looks back at most; the placeholder ``{window}``."""
    across: str = ""
    """Label whose siblings an ``outlier`` is compared with."""
    after: float = 0.0
    """``stale``, ``missing``: the budget in seconds or steps."""
    first: float = 0.0
    """``stale``, ``missing``: the budget until the first sample."""

    def start(self) -> Scorer:
        return self.make()


@dataclass(frozen=True, slots=True)
class CompiledParts(Compiled):
    """``all`` and ``any``: the engine feeds the parts and hands their count to ``breaches``."""

    parts: tuple[tuple[Any, Condition], ...] = ()
    """(Selector or None for the rule's own series, Condition)."""


class Identity:
    """The score is the value: thresholds, and conditions whose value the engine prepares."""

    __slots__ = ("normal",)

    is_identity = True
    """Lets the engine leave out the call of ``update``."""
    forgetful = True

    def __init__(self) -> None:
        self.normal: float | None = None

    def update(self, value: float, step: int) -> float | None:
        return value

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


def the_comparator(options: Mapping[str, Any], name: str) -> Bound:
    """The comparator among a condition's options; exactly one is needed."""
    try:
        found = comparator_in(options)
    except QuantityError as error:
        raise OptionError(str(error)) from None
    if found is None:
        raise OptionError(f"`{name}` needs something to compare with, such as `above: ...` or `below: ...`")
    try:
        return make_comparator(*found)
    except QuantityError as error:
        raise OptionError(str(error), found[0]) from None


def min_samples_of(rule: Mapping[str, Any], window: int, *, default: int = DEFAULT_MIN_SAMPLES) -> int:
    """From how many samples on to judge: the rule's ``min_samples``, else the default."""
    wanted = rule.get("min_samples")
    if wanted is None:
        return max(1, min(default, window))
    if wanted > window:
        raise OptionError(
            f"min_samples {wanted} is more than the window of {window} samples ever holds", rule_key="min_samples"
        )
    return int(wanted)


# --------------------------------------------------------------------------- schema pieces

QUANTITY: dict[str, Any] = {"$ref": "#/definitions/quantity"}


def comparator_schemas() -> dict[str, Any]:
    """The six comparators as properties."""
    return {
        "above": {**_described("Breaches when the score is greater than this."), "allOf": [QUANTITY]},
        "below": {**_described("Breaches when the score is less than this."), "allOf": [QUANTITY]},
        "at_least": {**_described("Breaches when the score is this or greater."), "allOf": [QUANTITY]},
        "at_most": {**_described("Breaches when the score is this or less."), "allOf": [QUANTITY]},
        "equals": {
            **_described("Breaches when the score is exactly this. For NaN write `nonfinite`."),
            "allOf": [QUANTITY],
        },
        "outside": {
            **_described("Breaches when the score is less than the first or greater than the second: [low, high]."),
            "type": "array",
            "items": QUANTITY,
            "minItems": 2,
            "maxItems": 2,
        },
    }


def options_schema(
    description: str, *, compare: bool = True, required: tuple[str, ...] = (), **own: Any
) -> dict[str, Any]:
    """The schema of a condition's options: its own keys beside the comparators."""
    schema: dict[str, Any] = {
        "description": description,
        "type": "object",
        "properties": {**(comparator_schemas() if compare else {}), **own},
        "additionalProperties": False,
    }
    if required:
        schema["required"] = list(required)
    return schema


def window_schema(
    text: str = "Samples to look back at most; it judges from `min_samples` on.", least: int = 2
) -> dict[str, Any]:
    return {**_described(text), "allOf": [{"$ref": "#/definitions/samples"}], "minimum": least}


def flag_schema(text: str) -> dict[str, Any]:
    return {**_described(text), "type": "boolean"}


def choice_schema(text: str, *words: str) -> dict[str, Any]:
    return {**_described(text), "enum": list(words)}


def number_schema(text: str, **limits: Any) -> dict[str, Any]:
    return {**_described(text), "type": "number", **limits}


def _described(text: str) -> dict[str, Any]:
    return {"description": text}


def sample_count(options: Mapping[str, Any], key: str, default: int, *, least: int = 1) -> int:
    """A number of samples among the options: ``200`` or ``200 samples``, ``least`` to a million."""
    value = options.get(key, default)
    if isinstance(value, str):
        try:
            span = parse_span(value, default="samples")
        except QuantityError as error:
            raise OptionError(str(error), key) from None
        if span.unit != "samples":
            raise OptionError(f'`{key}` counts samples; write a number, or "200 samples"', key)
        value = span.amount
    count = int(value)
    if count < least:
        raise OptionError(f"`{key}` must be at least {least}", key)
    if count > 1_000_000:
        raise OptionError(f"`{key}` is more than a million samples", key)
    return count
