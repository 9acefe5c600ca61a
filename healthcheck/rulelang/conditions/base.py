"""What conditions share: the compiled form, option errors, pieces of schema, which breaching samples a baseline learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from healthcheck.core.protocols import AbsenceScorer, Bound, Comparator, Condition, Scored, Scorer, lacking
from healthcheck.rulelang.comparators import Threshold, comparator_in
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
class CompiledCondition:
    """One compiled condition; what each field means says :class:`healthcheck.core.protocols.Condition`."""

    name: str
    breaches: Comparator
    start: Callable[..., Scorer]
    """Makes the memory of one series: often the class of the scorer, or a ``lambda`` that hands it its options."""
    sentence: str = "{series} {value}: {threshold}"
    judges_nonfinite: bool = False
    bounded: bool = False
    baseline: bool = False
    min_samples: int = 1
    window: int = 0
    absence: str = ""
    first: float = 0.0
    across: str = ""
    parts: tuple[tuple[Any, Condition], ...] = ()


def must_fit(condition: Condition) -> None:
    """Raise ``TypeError`` if a compiled condition, or what it is made of, lacks a name that its protocol asks for."""
    # Said when rules are read: missing names would only show as an AttributeError in the middle of a training.
    missing = lacking(condition, Condition)
    if not missing:
        missing = [f"breaches.{name}" for name in lacking(condition.breaches, Comparator)]
    if not missing and not condition.parts:
        scorer = AbsenceScorer if condition.absence else Scorer
        missing = [f"start().{name}" for name in lacking(condition.start(), scorer)]
    if missing:
        raise TypeError(f"it lacks {', '.join(missing)}")


Found = list[Scored] | tuple[()]
"""What ``update`` returns: all from the first sample on that is not quiet. No list is made for those that all are."""


class UnboundedScorer:
    """What a scorer says that publishes no bound; one with a baseline keeps its own ``normal``."""

    __slots__ = ()

    normal: float | None = None
    memoryless = False

    def bound(self, healthy: Bound) -> Bound | None:
        return None


def the_comparator(options: Mapping[str, Any], name: str) -> Threshold:
    """The comparator among a condition's options; exactly one is needed."""
    try:
        found = comparator_in(options)
    except QuantityError as error:
        raise OptionError(str(error)) from None
    if found is None:
        raise OptionError(f"`{name}` needs something to compare with, such as `above: ...` or `below: ...`")
    try:
        return Threshold(*found)
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


# --------------------------------------------------------------------------------------------------
# Which breaching samples enter a baseline: the rule keys ``outliers`` and ``reseed``.
#
# ``include`` learns every sample, ``exclude`` none that breaches, ``clip`` learns a breaching sample as the value that lies just
# at the threshold: a burst does not mask itself, and a lasting new level is still accepted in time. ``reseed: n`` accepts the
# new level after n breaching samples in a row: the baseline starts again from them.


POLICIES = ("include", "exclude", "clip")


class Learning:
    """The policy of one rule; shared by its series.

    :param rule: the keys of the rule that a compiler of conditions is given.
    :param default: what ``outliers`` is where the rule does not say.
    :param window: samples that the baseline holds at most.

    Raises ``OptionError`` when ``reseed`` asks for more samples than the window holds.
    """

    __slots__ = ("breaches", "outliers", "plain", "reseed")

    def __init__(self, rule: Mapping[str, Any], breaches: Comparator, *, default: str = "include", window: int) -> None:
        self.outliers: str = rule.get("outliers") or default
        self.reseed: int = rule.get("reseed") or 0
        self.breaches = breaches
        if self.reseed > window:
            raise OptionError(f"reseed {self.reseed} is more than the window of {window} samples", rule_key="reseed")
        self.plain = self.outliers == "include" and not self.reseed
        """True if nothing has to be decided: every sample is learnt as it is."""

    def admit(
        self,
        value: float,
        score: float | None,
        streak: list[float],
        bound: Callable[[Bound], Bound | None],
    ) -> tuple[Sequence[float], bool]:
        """What to learn of a sample that was scored: ``(values, afresh)``.

        :param streak: the breaching samples in a row, kept up to date here; part of the scorer's saved state.
        :param bound: the scorer's own ``bound``: where its threshold lies now.

        ``afresh`` says that the baseline starts again from the values.
        """
        if score is None or not self.breaches(score):
            streak.clear()
            return (value,), False
        if self.reseed:
            # Kept whatever is learnt meanwhile: once the streak is long enough it is the new level.
            streak.append(value)
            if len(streak) >= self.reseed:
                level = streak[:]
                streak.clear()
                return level, True
        if self.outliers == "include":
            return (value,), False
        # Without an exact interval of healthy scores (`equals`) there is no threshold to clip to.
        if self.outliers == "clip" and self.breaches.exact:
            fine = bound(self.breaches.healthy)
            if fine is not None:
                nearest = fine.high if score > self.breaches.healthy.high else fine.low
                return ((nearest,) if isfinite(nearest) else ()), False
        return (), False
