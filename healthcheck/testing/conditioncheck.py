"""What a plugin's condition lacks, and what does not work without it: tried on its own scorers, without an engine."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import (
    EMPTY,
    AbsenceScorer,
    Bound,
    Comparator,
    Condition,
    ConditionType,
    Scored,
    Scorer,
    lacking,
)

WITHOUT: dict[str, str] = {
    "sentence": "a rule without `message` has no words for its alert",
    "judges_nonfinite": "the engine cannot tell whether NaN and infinity are for it",
    "bounded": "no rule with it can hold back the update of a bad value",
    "baseline": "the rule keys `outliers` and `reseed` do nothing",
    "min_samples": "`plan` cannot say from which sample on it judges",
    "window": "{window} in messages stays empty",
    "absence": "the engine cannot tell whether it is judged by the clock",
    "first": "silence before the first sample is not judged",
    "across": "series cannot be compared with their siblings",
    "parts": "other metrics that it watches are not followed",
    "start": "no series can be judged",
    "breaches": "no score can be judged",
    "text": "alerts and reports cannot say the threshold",
    "direction": "the report cannot say on which side of the threshold a value lies",
    "healthy": "healthy samples are not passed over, and no update can be held back",
    "exact": "the engine cannot tell whether it has to ask about every score outside `healthy`",
    "__call__": "no score can be judged",
    "closer": "the closest value of a run and the worst of several series are not found",
    "quiet": "samples that change nothing cannot be passed over",
    "normal": "alerts cannot say what the value was compared with",
    "memoryless": "samples that change nothing cannot be passed over",
    "update": "no sample can be judged",
    "bound": "no rule with it can hold back the update of a bad value",
    "state": "a resumed run begins again with an empty memory",
    "restore": "a resumed run begins again with an empty memory",
    "arrived": "a sample that ends a silence is not heard",
}
"""What a protocol asks for -> what does not work where it is missing."""

SAMPLES = 48
"""Length of a stream: more than a window with the default of 8 samples needs."""


def check_condition(kind: ConditionType) -> Iterator[str]:
    """One sentence for everything that is missing or goes wrong; nothing for a condition that does all it can.

    Options are taken from the schema (``examples``, or values that its types allow).
    """
    what = f'condition "{kind.name}"'
    condition, why = _compiled(kind)
    if condition is None:
        yield f"{what}: {why}"
        return
    if getattr(condition, "parts", ()):
        return  # made of others, which have been looked at
    missing = [*_missing(what, "compiled form", condition, Condition)]
    if hasattr(condition, "breaches"):
        missing += _missing(what, "comparator", condition.breaches, Comparator)
    if hasattr(condition, "start"):
        try:
            scorer = condition.start()
        except Exception as error:
            missing.append(f"{what}: start() raised {_said(error)}, so no series can be judged")
        else:
            protocol = AbsenceScorer if getattr(condition, "absence", "") else Scorer
            missing += _missing(what, "scorer", scorer, protocol)
    yield from missing
    if not missing:
        yield from _tried(what, condition)


def _missing(what: str, part: str, thing: Any, protocol: type) -> list[str]:
    return [f'{what}: its {part} has no "{name}": {WITHOUT[name]}' for name in lacking(thing, protocol)]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# --------------------------------------------------------------------------- options to try it with


def _compiled(kind: ConditionType) -> tuple[Condition | None, str]:
    """The condition under the first options that its schema and its compiler accept; else None and the reason."""
    from jsonschema import Draft7Validator

    from healthcheck.rulelang.schema import shipped_schema

    definitions = shipped_schema()["definitions"]
    validator = Draft7Validator({**kind.schema, "definitions": definitions})
    refused = 'its schema leaves open what to try it with; give it "examples"'
    for options in itertools.islice(_values(kind.schema, definitions), 64):
        if not validator.is_valid(options):
            continue
        try:
            return kind.compile(options, {}), ""
        except ValueError as error:  # an OptionError among them: these options do not go together
            refused = f'compile({options!r}, {{}}) raised {_said(error)}; give the schema "examples" that compile'
        except Exception as error:
            return None, f"compile({options!r}, {{}}) raised {_said(error)}"
    return None, refused


def _values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Any]:
    """Values that a schema may allow, the simplest first."""
    yield from schema.get("examples", ())
    if "const" in schema:
        yield schema["const"]
    yield from schema.get("enum", ())
    for reference in (schema, *schema.get("allOf", ())):
        name = str(reference.get("$ref", "")).rpartition("/")[2]
        if name in definitions:
            yield from _values(definitions[name], definitions)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _values(choice, definitions)
    kinds = schema.get("type", ())
    for word in [kinds] if isinstance(kinds, str) else kinds:
        yield from _of_type(word, schema, definitions)


def _of_type(word: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Any]:
    if word in ("number", "integer"):
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        yield from (3, 1, 10, 0.5)
        if math.isfinite(low):
            yield from (low, low + 1)
        yield from (schema[key] for key in ("maximum", "default") if key in schema)
    elif word == "boolean":
        yield from (True, False)
    elif word == "string":
        yield from ("3", "30s", "200 samples", "a")
    elif word == "array":
        items = schema.get("items", {})
        values = list(itertools.islice(_values(items, definitions), 3)) if isinstance(items, Mapping) else []
        numbers = all(isinstance(value, (int, float)) for value in values)
        values = sorted(values) if numbers else values  # such as [low, high]
        yield from (values[:count] for count in range(len(values) + 1))
    elif word == "object":
        yield from _objects(schema, definitions)


def _objects(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The required properties, then one more in turn: a condition with a comparator asks for one of them."""
    properties = schema.get("properties", {})

    def first(name: str) -> list[Any]:
        return list(itertools.islice(_values(properties.get(name, {}), definitions), 3))

    needed = {name: first(name) for name in schema.get("required", ())}
    base = {name: values[0] for name, values in needed.items() if values}
    yield base
    for name in properties:
        for value in first(name) if name not in base else ():
            yield {**base, name: value}


# --------------------------------------------------------------------------- what it does


def _streams(condition: Condition) -> Iterator[tuple[str, list[float]]]:
    """Series of several kinds; the same in every process."""
    noise = random.Random(0)
    if condition.absence:
        yield "silences", [float(n % 7) for n in range(SAMPLES)]
        return
    yield "noise around 2", [2.0 + noise.gauss(0.0, 0.1) for _ in range(SAMPLES)]
    yield "a rise with spikes", [1.0 + 0.1 * n + 20.0 * (n % 11 == 10) for n in range(SAMPLES)]
    yield "equal values", [3.0] * SAMPLES
    yield "values of both signs", [noise.uniform(-5.0, 5.0) for _ in range(SAMPLES)]
    if condition.judges_nonfinite:
        yield "values with NaN", [math.nan if n % 9 == 8 else 1.0 for n in range(SAMPLES)]


def _tried(what: str, condition: Condition) -> Iterator[str]:
    """Each check says at most one sentence: a mistake usually shows in every stream."""
    checks: tuple[Callable[[Condition, list[float]], str], ...] = (
        _answers,
        _cut_into_runs,
        _saved_and_restored,
        _bound_agrees,
        _comparator_agrees,
    )
    for check in checks:
        for name, values in _streams(condition):
            try:
                problem = check(condition, values)
            except Exception as error:
                problem = f"{check.__doc__} cannot be tried: it raised {_said(error)}"
            if problem:
                yield f"{what}: {problem} (tried on {name})"
                break
        else:
            continue
        if check is _answers:
            return  # the others would only say it again


def _scored(
    scorer: Scorer, values: Sequence[float], start: int = 0, run: int = 1, quiet: Bound = EMPTY
) -> list[Scored]:
    """What a scorer answers to a stream that is cut into runs of one length."""
    found: list[Scored] = []
    for first in range(0, len(values), run):
        part = values[first : first + run]
        found += scorer.update(part, range(start + first + 1, start + first + 1 + len(part)), quiet)
    return found


def _same(one: Sequence[Scored], other: Sequence[Scored]) -> bool:
    return repr(list(one)) == repr(list(other))  # NaN equals itself here


def _answers(condition: Condition, values: list[float]) -> str:
    """update"""
    scorer = condition.start()
    for step, value in enumerate(values, start=1):
        answer = scorer.update((value,), (step,), EMPTY)
        if len(answer) != 1 or len(answer[0]) != 2:
            return (
                f"update must return one (score, normal) for each value when nothing is quiet, it returned {answer!r}"
            )
        if any(part is not None and not isinstance(part, (int, float)) for part in answer[0]):
            return f"update must return numbers or None, it returned {answer[0]!r}"
    return ""


def _cut_into_runs(condition: Condition, values: list[float]) -> str:
    """update with runs"""
    whole = _scored(condition.start(), values)
    for run in (2, 7, len(values)):
        if not _same(_scored(condition.start(), values, run=run), whole):
            return f"scores differ when {run} samples come in one run: a run that is judged late is judged otherwise"
    healthy = condition.breaches.healthy
    scorer, first = condition.start(), 0
    while first < len(values):
        part = values[first : first + 5]
        kept = scorer.update(part, range(first + 1, first + 1 + len(part)), healthy)
        expected = whole[first : first + len(part)]
        left_out = expected[: len(expected) - len(kept)]
        if not _same(kept, expected[len(left_out) :]):
            return (
                "scores differ when healthy ones may be left out: only the first of a run may be, and they are learnt"
            )
        if any(score is not None and not healthy.holds(score) for score, _ in left_out):
            return "a score was left out that is not quiet: a breach is overlooked"
        first += len(part)
    return ""


def _saved_and_restored(condition: Condition, values: list[float]) -> str:
    """state and restore"""
    half = len(values) // 2
    before = condition.start()
    _scored(before, values[:half])
    state = before.state()
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"its state is not JSON ({_said(error)}): a resumed run begins again with an empty memory"
    after = condition.start()
    after.restore(json.loads(text))
    if not _same(_scored(after, values[half:], half), _scored(before, values[half:], half)):
        return (
            "after restore(state()) scores differ: a resumed run judges differently from one that was not interrupted"
        )
    return ""


def _bound_agrees(condition: Condition, values: list[float]) -> str:
    """bound"""
    healthy, published = condition.breaches.healthy, False
    for count in range(0, len(values), 5):
        scorer = condition.start()
        _scored(scorer, values[:count])
        before = json.dumps(scorer.state())
        found = scorer.bound(healthy)
        if json.dumps(scorer.state()) != before:
            return "bound must learn nothing, but its state changed"
        if found is None:
            continue
        published = True
        if not condition.bounded and condition.breaches.exact and not condition.across:
            return "bound gives an interval, but `bounded` is False: no rule with it can hold back an update"
        for value in _around(found, values[: count + 1]):
            again = condition.start()
            _scored(again, values[:count])
            [(score, _)] = again.update((value,), (count + 1,), EMPTY)
            fine = score is None or not condition.breaches(score)
            # Without `exact` nothing is said of values outside.
            if fine != found.holds(value) and (condition.breaches.exact or not fine):
                held = "be let through" if found.holds(value) else "be held back"
                return (
                    f"bound and score disagree: the update of a value of {value!r} would {held}, its score is {score!r}; "
                    "see healthcheck.exact_bound"
                )
    if condition.bounded and not published and len(set(values)) > 1:
        return "`bounded` is True, but bound never gives an interval: an update that a rule holds back is let through"
    return ""


def _around(bound: Bound, values: Sequence[float]) -> Iterator[float]:
    """Values at and next to the edges of a bound, and those of the stream."""
    for edge in (bound.low, bound.high):
        if math.isfinite(edge):
            yield from (edge, math.nextafter(edge, math.inf), math.nextafter(edge, -math.inf))
    yield from values[-3:]


def _comparator_agrees(condition: Condition, values: list[float]) -> str:
    """the comparator"""
    breaches = condition.breaches
    healthy = breaches.healthy
    scores = sorted({score for score, _ in _scored(condition.start(), values) if score is not None and score == score})
    scores = [*scores[:: max(1, len(scores) // 8)], *_around(healthy, ())]
    for score in scores:
        if healthy.holds(score) and breaches(score):
            return f"a score of {score!r} lies within `healthy` and breaches: it would be overlooked"
        if breaches.exact and not healthy.holds(score) and not breaches(score):
            return f"`exact` is True, but a score of {score!r} outside `healthy` does not breach: a false alarm"
    for one, other in itertools.product(scores, repeat=2):
        if not breaches(one) and breaches.quiet(one).holds(other) and (breaches(other) or breaches.closer(other, one)):
            return f"quiet({one!r}) holds {other!r}, which is closer to a breach: the closest value of a run is wrong"
        if breaches.closer(one, other) and breaches.closer(other, one):
            return f"closer says of {one!r} and {other!r} that each is closer: the closest value of a run is wrong"
    return ""
