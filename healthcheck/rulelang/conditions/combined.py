"""``all`` and ``any``: several conditions in one rule, one level deep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import EMPTY, Bound, Comparator, Condition, ConditionType, OtherPart, Scored, Scorer
from healthcheck.rulelang.comparators import COMPARATORS, EVERYTHING, Threshold
from healthcheck.rulelang.conditions.base import CompiledCondition, OptionError, UnboundedScorer

PART_COMPILER = "compile_part"
"""Key under which the rule compiler hands itself to these two conditions: selectors and other
conditions are its business. ``compile_part(part, index) -> (Selector or None, Condition)``."""


class OwnParts:
    """The parts on the rule's own series that one scorer serves."""

    __slots__ = ("_breaches", "before", "count", "exact", "learn", "quiet", "scorer", "tests", "update")

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.update = scorer.update
        self.learn: Callable[[Sequence[float], Sequence[int]], int] | None = getattr(scorer, "learn", None)
        self.quiet: Bound = EVERYTHING
        """Scores with which none of the parts breaches."""
        self.tests: list[tuple[float, float, Comparator | None]] = []
        """For each part its healthy scores, and its comparator where others may be healthy as well."""
        self.exact = True
        """Whether there is no such comparator."""
        self.count = 0
        """How many parts there are."""
        self.before = 0
        """How many are judged before them."""
        self._breaches: list[Comparator] = []

    def add(self, breaches: Comparator) -> None:
        """One more part with this comparator."""
        low, high = breaches.healthy.low, breaches.healthy.high
        self._breaches.append(breaches)
        self.tests.append((low, high, None if breaches.exact else breaches))
        self.exact = self.exact and breaches.exact
        self.count += 1
        self.quiet = Bound(max(self.quiet.low, low), min(self.quiet.high, high))

    def bounds(self) -> list[tuple[float, float]]:
        """The healthy values of each part, of a scorer that has no memory."""
        found = [self.scorer.bound(breaches.healthy) or EMPTY for breaches in self._breaches]
        return [(bound.low, bound.high) for bound in found]


class CombinedScorer(UnboundedScorer):
    """Score: how many parts breach; None while a part that is needed has not judged yet.

    Parts that remember the same ``join``, so that they learn it once. In an ``all`` that has failed already, a part
    that can ``learn`` without judging only does that. Of a part whose score depends on the value alone only the
    healthy values are kept.
    """

    __slots__ = ("_asked", "_bounds", "_need_all", "_others", "_own", "_shares", "_total")

    def __init__(self, parts: Sequence[Condition], others: Sequence[OtherPart], *, need_all: bool) -> None:
        self._need_all = need_all
        self._others = others
        self._total = len(others) + len(parts)
        served: dict[int, OwnParts] = {}
        self._shares = False
        """Whether a part reads what another one remembers: then they are asked about one sample after the other."""
        for part in parts:
            scorer, shares = _joined(part.start(), [own.scorer for own in served.values()])
            self._shares = self._shares or shares
            if id(scorer) not in served:
                served[id(scorer)] = OwnParts(scorer)
            served[id(scorer)].add(part.breaches)
        # Those that can learn without judging come last: an `all` has often failed by then.
        self._own = sorted(served.values(), key=lambda own: own.learn is not None)
        self._settle()

    def _settle(self) -> None:
        """Sort the parts into those that must be asked, and those whose healthy values are known for good.

        A scorer may lose its memory when it could not judge yet.
        """
        self._asked: list[OwnParts] = []
        self._bounds: list[tuple[float, float]] = []
        for own in self._own:
            if own.exact and own.scorer.memoryless:
                self._bounds += own.bounds()
            else:
                self._asked.append(own)
        before = len(self._others) + len(self._bounds)
        for own in self._asked:
            own.before = before
            before += own.count

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        if self._shares and len(values) > 1:  # what parts share must not be ahead of the sample at hand
            singly: list[Scored] = []
            for at in range(len(values)):
                singly += self.update(values[at : at + 1], steps[at : at + 1], EMPTY if singly else quiet)
            return singly
        breaches = unknown = 0
        for other in self._others:
            if other.breach is None:
                unknown += 1
            elif other.breach:
                breaches += 1
        count = len(values)
        if count == 1:  # the same as below, written out for a run of one: it needs no lists, and no call
            value = values[0]
            for low, high in self._bounds:
                if not low <= value <= high:
                    breaches += 1
            for own in self._asked:
                if own.learn is not None and self._need_all and breaches + unknown < own.before:
                    unknown += own.count * own.learn(values, steps)
                    continue  # what has failed stays failed
                found = own.update(values, steps, own.quiet)
                if not found:
                    continue  # healthy for all of them
                score = found[0][0]
                if score is None:
                    unknown += own.count
                    continue
                for low, high, test in own.tests:
                    if (score < low or score > high) if test is None else test(score):
                        breaches += 1
            if unknown:
                for own in self._asked:
                    if own.exact and own.scorer.memoryless:  # as of now
                        self._settle()
                        break
                if self._need_all or unknown == self._total:
                    return [(None, None)]
            return () if quiet.low <= breaches <= quiet.high else [(float(breaches), None)]
        all_breaches, all_unknown = [breaches] * count, [unknown] * count
        for low, high in self._bounds:
            place = 0
            for value in values:
                if not low <= value <= high:
                    all_breaches[place] += 1
                place += 1  # noqa: SIM113 - `enumerate` costs more for a run of one
        none_unknown = not unknown
        for own in self._asked:
            # An `all` of which a cheap part does not breach has failed: what is costly need not be judged for it.
            if own.learn is not None and self._need_all:
                self._learn_or_ask(own, values, steps, all_breaches, all_unknown)
                none_unknown = False
                continue
            found = own.update(values, steps, own.quiet)
            place = count - len(found)  # those before are healthy for all of them
            for score, _ in found:
                if score is None:
                    all_unknown[place] += own.count
                    none_unknown = False
                else:
                    for low, high, test in own.tests:
                        if (score < low or score > high) if test is None else test(score):
                            all_breaches[place] += 1
                place += 1
        scored: list[Scored] | tuple[()] = ()
        settle = False
        # An `any` goes by those parts that could judge; an `all` needs them all. The count of breaching parts is a score
        # like any other: its closest approach says how many were near.
        for place in range(count):
            breaches = all_breaches[place]
            if not none_unknown and (unknown := all_unknown[place]):
                settle = True
                if self._need_all or unknown == self._total:
                    scored = scored or []
                    scored.append((None, None))
                    continue
            if scored:
                scored.append((float(breaches), None))
            elif not quiet.low <= breaches <= quiet.high:
                scored = [(float(breaches), None)]
        if settle:
            for own in self._asked:
                if own.exact and own.scorer.memoryless:  # as of now
                    self._settle()
                    break
        return scored

    def _learn_or_ask(
        self,
        own: OwnParts,
        values: Sequence[float],
        steps: Sequence[int],
        all_breaches: list[int],
        all_unknown: list[int],
    ) -> None:
        """A costly part of an ``all``: where that has failed already, it only learns."""
        assert own.learn is not None
        begin, count = 0, len(values)
        while begin < count:
            failed = all_breaches[begin] + all_unknown[begin] < own.before
            end = begin + 1
            while end < count and (all_breaches[end] + all_unknown[end] < own.before) is failed:
                end += 1
            part, which = values[begin:end], steps[begin:end]
            if failed:
                early = own.learn(part, which)
                for place in range(begin, begin + early):
                    all_unknown[place] += own.count
            else:
                found = own.update(part, which, own.quiet)
                place = end - len(found)
                for score, _ in found:
                    if score is None:
                        all_unknown[place] += own.count
                    else:
                        for low, high, test in own.tests:
                            all_breaches[place] += bool((score < low or score > high) if test is None else test(score))
                    place += 1
            begin = end

    def state(self) -> Any:
        return [own.scorer.state() for own in self._own]

    def restore(self, state: Any) -> None:
        for own, saved in zip(self._own, state, strict=True):
            own.scorer.restore(saved)
        self._settle()


def _joined(scorer: Scorer, earlier: Sequence[Scorer]) -> tuple[Scorer, bool]:
    """The scorer, and whether it reads now what an earlier one remembers; or an earlier one that scores the same."""
    join: Callable[[Scorer], Scorer | None] | None = getattr(scorer, "join", None)
    if join is not None:
        for other in earlier:
            joined = join(other)
            if joined is not None:
                return joined, joined is not other
    return scorer, False


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
        own = [condition for selector, condition in parts if selector is None]
        return CompiledCondition(
            name,
            Threshold("at_least", need, words),
            lambda *others: CombinedScorer(own, others, need_all=name == "all"),
            "{series} {value}: {threshold}",
            baseline=any(condition.baseline for _, condition in parts),
            min_samples=max((condition.min_samples for _, condition in parts), default=1),
            window=max((condition.window for _, condition in parts), default=0),
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
    return "" if condition.name in (*COMPARATORS, "nonfinite", "unchanged", "no_improvement") else condition.name


ALL = _type("all", "Breaches when all of these conditions breach; each may name its own `metric`.")
ANY = _type("any", "Breaches when one of these conditions breaches; each may name its own `metric`.")
