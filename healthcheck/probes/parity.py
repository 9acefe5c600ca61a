"""What ranks that train copies of one model must have in common, judged from what each of them says: weights, gradients,
optimizer state, learning rate, software; and what they must not: the same batch.

Nothing here knows torch or a store. :mod:`healthcheck.probes.replicas` reads the numbers, on every rank alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from healthcheck.device.checksums import flipped_bit, one_element, slot_of
from healthcheck.probes.labels import first_few

SLOTS = 32
"""Numbers in which a rank says the checksums of all its tensors: the size of a word does not grow with the model."""
NAMED = 16
"""Tensors of which a rank tells the checksum when it is asked for a slot."""
LOOKED_AT = 4
"""Tensors that differ of which is asked whether it is one value or many."""
GIVE_UP = 3
"""Checks after which a difference is reported although ranks have not answered a question about it."""

Words = Mapping[int, Mapping[str, Any]]
"""What each rank has said for one step."""


@dataclass(slots=True)
class Found:
    """One comparison: how many ranks are apart (0: none), and what an alert says of it."""

    metric: str
    value: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Apart:
    """Weights that differ, while ranks are asked in what they differ."""

    step: int
    group: tuple[int, ...]
    minority: list[int]
    certain: bool
    """Whether most ranks agree, so that it is the others that are apart."""
    slots: list[int]
    representatives: tuple[int, int]
    """A rank of the largest class, and one that differs from it."""
    count: int
    tensors: dict[str, int] = field(default_factory=dict)
    """Name and elements of those that differ, as far as known."""
    checks: int = 0
    said: Found | None = None


class ParityJudge:
    """Compares what ranks say, check by check. Lives on the rank that hears.

    Weights are compared only among ranks that hold copies (``g``, the group of the wrapper or the replicated part of a mesh),
    with the same tensors (``l``), at a step in which each of them expects averaged gradients (``y``).
    """

    def __init__(self) -> None:
        self.questions: list[Mapping[str, Any]] = []
        """To be put to all ranks; whoever has put them takes them out."""
        self._apart: dict[tuple[int, ...], _Apart] = {}
        self._equal_until: dict[tuple[int, ...], int] = {}

    # -- a check ------------------------------------------------------------------------

    def check(self, step: int, words: Words) -> list[Found]:
        """All comparisons for which the words of this step have something to compare."""
        found: list[Found] = []
        for members in groups_of(words, "d").values():
            found += _rates(members)
            found += _same_batches(members)
            found += _software(members)
        explained = any(one.value for one in found if one.metric in ("ranks.lr_apart", "ranks.start_apart"))
        for group, members in groups_of(words, "g").items():
            found += self._copies(step, group, members, explained)
        return _worst(found)

    def _copies(self, step: int, group: tuple[int, ...], members: Words, explained: bool) -> list[Found]:
        layouts = _classes({rank: said.get("l") for rank, said in members.items()})
        if len(layouts) > 1:
            facts = _ranks_facts(layouts, len(members)) | {"what": "the models have other tensors, or in another order"}
            return [Found("ranks.start_apart", float(len(_minority(layouts))), facts)]
        if not all(said.get("y") for said in members.values()):
            return []  # each rank trains by itself for a while, on purpose
        found = []
        gradients = [{rank: said["n"][turn] for rank, said in members.items() if said.get("n")} for turn in (0, 1)]
        apart = [_classes(marks) for marks in gradients if len(marks) == len(members)]
        different = [classes for classes in apart if len(classes) > 1]
        if apart:
            found.append(_gradients_apart(different, len(apart), members))
        states = {rank: (tuple(said["t"]), said.get("u")) for rank, said in members.items() if said.get("t")}
        by_layout = {said.get("u") for said in members.values()}
        weights = _classes({rank: tuple(said["w"]) for rank, said in members.items() if said.get("w")})
        if different or explained:
            self._apart.pop(group, None)
            return found  # what else differs comes from that
        if len(by_layout) == 1 and len(states) == len(members):
            classes = _classes({rank: state[0] for rank, state in states.items()})
            # Made of gradients alone, which are the same: it does not follow from weights that differ, they follow from it.
            if len(weights) < 2 or not any(said.get("z") for said in members.values()):
                facts = _ranks_facts(classes, len(members)) if len(classes) > 1 else {}
                if facts:
                    self._apart.pop(group, None)
                    weights = {}
                found.append(Found("ranks.state_apart", float(len(_minority(classes))), facts))
        if weights:
            found += self._weights(step, group, members, weights)
        return found

    # -- weights --------------------------------------------------------------------------

    def _weights(
        self, step: int, group: tuple[int, ...], members: Words, classes: Mapping[Hashable, Sequence[int]]
    ) -> list[Found]:
        minority = _minority(classes)
        if not minority:
            self._apart.pop(group, None)
            self._equal_until[group] = step
            return [Found(metric, 0.0) for metric in _WEIGHTS]
        known = self._apart.get(group)
        if known is not None and known.minority == minority:
            known.checks += 1
            if known.said is not None:
                return _one_of_weights(known.said.metric, known.said.value, known.said.facts)
            if known.checks >= GIVE_UP:
                return self._conclude(known, members, None)
            return []
        usual, other = list(classes.values())[:2]
        slots = [
            slot
            for slot, pair in enumerate(zip(members[usual[0]]["w"], members[other[0]]["w"], strict=False))
            if pair[0] != pair[1]
        ]
        apart = _Apart(
            step, group, minority, _certain(classes), slots, (usual[0], other[0]), int(members[other[0]]["c"])
        )
        self._apart[group] = apart
        self.questions.append({"step": step, "slots": slots[:8], "of": list(apart.representatives)})
        return []

    def tensors(self, step: int, words: Words) -> None:
        """The answer to which tensors differ: ask of these in what."""
        for apart in self._apart.values():
            one, other = (words.get(rank) for rank in apart.representatives)
            if apart.step != step or one is None or other is None or apart.tensors:
                continue
            theirs = {name: mark for name, mark, _ in other["sums"]}
            apart.tensors = {name: size for name, mark, size in one["sums"] if theirs.get(name) != mark}
            if apart.tensors:
                names = list(apart.tensors)[:LOOKED_AT]
                self.questions.append({"of": list(apart.representatives), "for": step, "values": names})

    def values(self, step: int, words: Words) -> list[Found]:
        """The answer to in what they differ: the case is concluded."""
        found: list[Found] = []
        for apart in self._apart.values():
            if apart.said is None and apart.step == next((said.get("for") for said in words.values()), None):
                found += self._conclude(apart, None, words)
        return found

    def _conclude(self, apart: _Apart, members: Words | None, values: Words | None) -> list[Found]:
        facts = self._facts(apart)
        count = float(len(apart.minority))
        answers = [values.get(rank) for rank in apart.representatives] if values is not None else [None, None]
        one, other = answers
        metric = "ranks.weights_apart"
        if one is not None and other is not None:
            facts |= _difference(one["values"], other["values"])
            writers = _writers(one, other, apart.representatives)
            single = _single(one["values"], other["values"])
            if single is not None and len(apart.tensors) == 1:
                metric = "ranks.single_value_apart"
                facts["value"] = single
            if writers:
                metric = "ranks.changed_apart"
                facts = writers | {key: text for key, text in facts.items() if key not in writers}
        apart.said = Found(metric, count, facts)
        return _one_of_weights(metric, count, facts)

    def _facts(self, apart: _Apart) -> dict[str, Any]:
        since = self._equal_until.get(apart.group)
        facts: dict[str, Any] = {"ranks": _named(apart.minority if apart.certain else sorted(apart.group))}
        if apart.tensors:
            facts["tensors"] = (
                f"{first_few(apart.tensors)}"
                if len(apart.tensors) < apart.count
                else f"all {apart.count:,} tensors, first {next(iter(apart.tensors))}"
            )
        facts["since"] = f"step {since:,} to {apart.step:,}" if since is not None else "the first comparison"
        if not apart.certain:
            facts["which"] = "cannot tell which of them is right"
        return facts


_WEIGHTS = ("ranks.weights_apart", "ranks.single_value_apart", "ranks.changed_apart")


def _one_of_weights(metric: str, value: float, facts: dict[str, Any]) -> list[Found]:
    return [Found(name, value if name == metric else 0.0, facts if name == metric else {}) for name in _WEIGHTS]


def _difference(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """How far the sampled values of the first tensor are apart."""
    if not one or not other:
        return {}
    pairs = list(zip(one[0][3], other[0][3], strict=False))
    apart = [abs(a - b) for a, b in pairs if a != b]
    if not apart:
        return {"sampled": f"none of {len(pairs)} sampled values of {one[0][0]} differs"}
    return {"sampled": f"{len(apart)} of {len(pairs)} values differ, by up to {max(apart):.3g}"}


def _single(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> str | None:
    """The one value in which copies differ, in words; None if they differ in more."""
    for mine, theirs in zip(one, other, strict=False):
        name, size, sums = mine[0], int(mine[1]), tuple(map(int, mine[2]))
        others = tuple(map(int, theirs[2]))
        if sums == others:
            continue
        position = one_element((sums[0], sums[1]), (others[0], others[1]), size)
        if position is None:
            return None
        bit = flipped_bit((sums[0], sums[1]), (others[0], others[1]))
        flipped = f", bit {bit} of it" if bit is not None else ""
        return f"element {position:,} of {name}{flipped}"
    return None


def _writers(one: Mapping[str, Any], other: Mapping[str, Any], ranks: tuple[int, int]) -> dict[str, Any]:
    """Which of two ranks wrote to its weights more often than the other: between two updates, or at one of them."""
    mine, theirs = ({int(step): int(extra) for step, extra in said.get("odd", ())} for said in (one, other))
    alone = [
        (rank, step)
        for rank, own, others in ((ranks[0], mine, theirs), (ranks[1], theirs, mine))
        for step in own
        if step not in others
    ]
    guilty = {rank for rank, _ in alone}
    if len(guilty) != 1:
        return {}
    rank, step = alone[0]
    return {
        "ranks": _named([rank]),
        "evidence": f"it wrote to them once more, after the update of step {step:,}",
        "which": "",
    }


# --------------------------------------------------------------------------------------------------
# One comparison each.


def _gradients_apart(different: Sequence[Mapping[Hashable, Sequence[int]]], looks: int, members: Words) -> Found:
    if not different:
        return Found("ranks.gradients_apart", 0.0)
    classes = different[0]
    facts: dict[str, Any] = {"ranks": _ranks_facts(classes, len(members))["ranks"]}
    wrapped = max(int(said.get("m", 1)) for said in members.values())
    if wrapped > 1:
        facts["wrapper"] = f"the model was wrapped {wrapped:,} times, and is used without its wrapper in between"
    if looks > len(different):
        facts["when"] = f"at {len(different)} of {looks} updates in a row: in some steps only"
    replaced = max(int(said.get("x", 0)) for said in members.values())
    if replaced:
        facts["replaced"] = f"{replaced:,} parameters are others than those that were wrapped"
    return Found("ranks.gradients_apart", float(max(1, len(_minority(classes)))), facts)


def _rates(members: Words) -> list[Found]:
    rates = {rank: tuple(said["r"]) for rank, said in members.items() if said.get("r")}
    if len(rates) < 2 or len({len(rate) for rate in rates.values()}) > 1:
        return []
    classes = _classes(rates)
    facts: dict[str, Any] = {}
    if len(classes) > 1:
        (usual, _), (other, ranks) = list(classes.items())[:2]
        pairs = zip(usual, other, strict=True)  # type: ignore[call-overload]
        group, (mine, theirs) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
        facts = _ranks_facts(classes, len(rates))
        facts["learning rate"] = f"{theirs:.6g} on rank {ranks[0]}, {mine:.6g} on others" + (
            f" (group {group})" if group else ""
        )
    return [Found("ranks.lr_apart", float(len(_minority(classes))), facts)]


def _same_batches(members: Words) -> list[Found]:
    """Ranks that were given the same two batches in a row, which are not one batch used for ever."""
    marks = {}
    for rank, said in members.items():
        batches = said.get("b") or said.get("o")
        if batches and None not in batches and batches[0] != batches[1]:
            marks[rank] = (bool(said.get("b")), *batches)
    if len(marks) < 2:
        return []
    alike = [ranks for ranks in _classes(marks).values() if len(ranks) > 1]
    facts: dict[str, Any] = {}
    if alike:
        by_loss = not next(iter(marks.values()))[0]
        facts = {
            "ranks": _named(alike[0]),
            "seen by": "losses that are equal to the last bit" if by_loss else "the contents of two batches in a row",
        }
    return [Found("ranks.equal_batches", float(sum(map(len, alike))), facts)]


def _software(members: Words) -> list[Found]:
    starts = {rank: said["s"] for rank, said in members.items() if said.get("s")}
    if len(starts) < 2:
        return []
    for what in dict.fromkeys(key for start in starts.values() for key in start):
        classes = _classes({rank: start.get(what) for rank, start in starts.items()})
        if len(classes) > 1:
            facts = _ranks_facts(classes, len(starts))
            (usual, _), (other, ranks) = list(classes.items())[:2]
            facts["what"] = f"{what}: {other} on rank {ranks[0]}, {usual} on others"
            return [Found("ranks.start_apart", float(len(_minority(classes))), facts)]
    return [Found("ranks.start_apart", 0.0)]


# --------------------------------------------------------------------------------------------------
# Classes of ranks that say the same.


def groups_of(words: Words, key: str) -> dict[tuple[int, ...], dict[int, Mapping[str, Any]]]:
    """Ranks by the group that they name; groups of which fewer than two have said anything are left out."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, said in words.items():
        text = said.get(key) or ""
        if rank in _members(text):
            found.setdefault(text, {})[rank] = said
    return {ranks_of(text): members for text, members in found.items() if len(members) > 1}


def _classes(marks: Mapping[int, Any]) -> dict[Hashable, list[int]]:
    """Ranks by what they say, the largest class first, of equal ones that of the lowest rank."""
    found: dict[Hashable, list[int]] = {}
    for rank in sorted(marks):
        found.setdefault(marks[rank], []).append(rank)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1][0])))


def _certain(classes: Mapping[Hashable, Sequence[int]]) -> bool:
    sizes = list(map(len, classes.values()))
    return 2 * sizes[0] > sum(sizes)


def _minority(classes: Mapping[Hashable, Sequence[int]]) -> list[int]:
    """Ranks outside of the largest class."""
    return sorted(rank for ranks in list(classes.values())[1:] for rank in ranks)


def _ranks_facts(classes: Mapping[Hashable, Sequence[int]], count: int) -> dict[str, Any]:
    if _certain(classes):
        return {"ranks": _named(_minority(classes))}
    everyone = sorted(rank for ranks in classes.values() for rank in ranks)
    alike = f"each of {count} ranks is different" if len(classes) == count else f"{len(classes)} kinds of {count} ranks"
    return {"ranks": _named(everyone), "which": f"{alike}: cannot tell which is right"}


def _worst(found: Iterable[Found]) -> list[Found]:
    """One for each metric: that with the most ranks apart."""
    worst: dict[str, Found] = {}
    for one in found:
        if one.metric not in worst or one.value > worst[one.metric].value:
            worst[one.metric] = one
    return list(worst.values())


def _named(ranks: Iterable[int]) -> str:
    """``1``, ``0, 1``, ``0-3, 7``, at most eight runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def group_text(ranks: Sequence[int]) -> str:
    """A group of ranks in a few characters: ``first:last:distance`` where they are evenly spaced, else all of them."""
    given = list(ranks)
    if len(given) > 2 and len({b - a for a, b in itertools.pairwise(given)}) == 1:
        return f"{given[0]}:{given[-1]}:{given[1] - given[0]}"
    return ",".join(map(str, given))


@lru_cache(maxsize=1024)
def ranks_of(text: str) -> tuple[int, ...]:
    """The inverse of :func:`group_text`."""
    if ":" in text:
        first, last, distance = map(int, text.split(":"))
        return tuple(range(first, last + 1, distance))
    return tuple(map(int, text.split(","))) if text else ()


@lru_cache(maxsize=1024)
def _members(text: str) -> frozenset[int]:
    return frozenset(ranks_of(text))


def common(marks: Iterable[Hashable]) -> Any:
    """What occurs most often."""
    return Counter(marks).most_common(1)[0][0]


def slots_of(names: Sequence[str], slots: Iterable[int]) -> list[int]:
    """Positions of the tensors in these slots, at most :data:`NAMED`."""
    wanted = set(slots)
    return [index for index in range(len(names)) if slot_of(index, len(names), SLOTS) in wanted][:NAMED]
