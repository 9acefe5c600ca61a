"""What probes on different ranks tell each other, through the store in which ranks agree anyway.

Each rank writes what it has to say under a key of its own, at a point at which ranks agree; the rank that speaks for all reads
the keys of all once they are there. Nobody waits, no process group of the user's is touched, and a rank that is missing is merely
missing. Keys are used again after a few words, so that the store stays small.

With many ranks the rank that hears would read thousands of keys: beyond :data:`FANOUT` ranks every first of so many reads those of
its group and writes them down as one, with what they have in common written once.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from healthcheck.core.runinfo import Collectives
from healthcheck.instrument.hangs import matched, word_of

SILENT = 2.0
"""Seconds of silence from which a rank says where it stands, and between two such words."""
LOST = 4 * SILENT
"""Seconds without a new word after which a rank counts as one that does not answer."""
FANOUT = 64
"""Ranks whose words one rank reads."""
SLOTS = 7
"""Words on one topic that may be under way at a time, each under the remainder of its step: a later one takes its place."""
PATIENCE = 20
"""Points of agreement after which what is there is taken as all that comes. Ranks that are in step need two."""
LONGEST = 4096
"""Bytes of one word; a longer one is left out, and that is an error of whoever said it."""


class StoreExchange:
    """Implements :class:`healthcheck.core.runinfo.RankTalk` over a ``torch.distributed`` store.

    :param broadcast: sends a message to all ranks, as the agreement does.
    :param hears: whether this rank reads what all say.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        hears: bool,
        broadcast: Callable[[Mapping[str, Any]], None],
        fanout: int = FANOUT,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hears = hears
        self._store = store
        self._broadcast = broadcast
        self._fanout = max(2, fanout)
        self._leads = world_size > self._fanout and rank % self._fanout == 0
        self._to_say: list[tuple[str, int, str]] = []
        self._to_ask: list[Mapping[str, Any]] = []
        self._awaited: list[_Awaited] = []
        self._heard: dict[str, list[tuple[int, Mapping[int, Mapping[str, Any]]]]] = {}
        self._questions: dict[str, list[Mapping[str, Any]]] = {}
        self._meeting = ""
        self._own_line: Any = None
        """A connection to the store for the watchdog's thread: that of the training may be busy for ever."""
        self._silent_at = 0.0
        self._words = 0
        self._standing: dict[int, tuple[int, float, Mapping[str, Any]]] = {}
        """Of each rank the number of its last word, when that was new, and the word."""
        self._ended: list[int] = []
        self._watching = threading.Lock()

    # -- what probes call -------------------------------------------------------------

    def say(self, topic: str, step: int, values: Mapping[str, Any]) -> None:
        text = json.dumps([step, values], separators=(",", ":"))
        if len(text) > LONGEST:
            raise ValueError(f"{len(text):,} bytes on {topic}: ranks tell each other {LONGEST:,} at most")
        self._to_say.append((topic, step, text))

    def heard(self, topic: str) -> Sequence[tuple[int, Mapping[int, Mapping[str, Any]]]]:
        return self._heard.pop(topic, ())

    def ask(self, topic: str, question: Mapping[str, Any]) -> None:
        self._to_ask.append({"question": topic, **question})

    def asked(self, topic: str) -> Sequence[Mapping[str, Any]]:
        return self._questions.pop(topic, ())

    # -- what the agreement calls -------------------------------------------------------

    def hear(self, message: Mapping[str, Any]) -> None:
        """A question of another rank, or of this one."""
        known = self._questions.setdefault(message["question"], [])
        known.append({key: value for key, value in message.items() if key != "question"})
        del known[:-SLOTS]

    def turn(self, meeting: str, gone: Callable[[], int]) -> None:
        """At a point of agreement: write what there is to say, read what has come.

        :param meeting: prefix of the keys of this training.
        :param gone: asks how many ranks have ended.
        """
        self._meeting = meeting
        while self._to_ask:
            self._broadcast(self._to_ask.pop(0))
        for topic, step, text in self._to_say:
            place = f"{meeting}/said/{topic}/{step % SLOTS}"
            self._store.set(f"{place}/{self.rank}", text)
            if self._leads:
                self._await(_Awaited(topic, step, place, self._group(), 1))
            if self.hears:
                leaders = self._leaders()
                self._await(_Awaited(topic, step, place, leaders or list(range(self.world_size)), 2 if leaders else 0))
        self._to_say.clear()
        for awaited in list(self._awaited):
            if self._look(awaited, gone):
                self._awaited.remove(awaited)

    # -- silence ------------------------------------------------------------------------

    def silent(self, collectives: Collectives | None, step: int, seconds: float) -> None:
        """From the watchdog's thread: nothing has happened for so long. Say where this rank stands, and read where others do."""
        now = monotonic()
        if seconds < SILENT or now < self._silent_at + SILENT or not self._meeting:
            return
        with self._watching, contextlib.suppress(Exception):  # a store that is gone says nothing about ranks
            self._silent_at = now
            if self._own_line is None:
                self._own_line = self._store.clone() if hasattr(self._store, "clone") else self._store
            self._words += 1
            place = f"{self._meeting}/stands"
            word = word_of(collectives, step, seconds)
            self._own_line.set(f"{place}/{self.rank}", json.dumps([self._words, word]))
            if self.hears:
                self._read_standing(place, now)

    def _read_standing(self, place: str, now: float) -> None:
        for rank in range(self.world_size):
            if self._own_line.check([f"{place}/{rank}"]):
                number, word = json.loads(self._own_line.get(f"{place}/{rank}"))
                known = self._standing.get(rank)
                if known is None or known[0] != number:
                    self._standing[rank] = number, now, word
            elif rank not in self._ended and self._own_line.check([f"{self._meeting}/end/{rank}"]):
                self._ended.append(rank)

    def hang(self) -> Mapping[str, Any]:
        """What is known of a hang from the words of all ranks, as facts of its alert; empty where this rank does not hear."""
        if not self.hears or not self._standing:
            return {}
        now = monotonic()
        words = {rank: word for rank, (_, at, word) in list(self._standing.items()) if now - at < LOST}
        return matched(words, self.world_size, self._ended)

    def _await(self, awaited: _Awaited) -> None:
        self._awaited.append(awaited)
        del self._awaited[: -4 * SLOTS]

    def _group(self) -> list[int]:
        return list(range(self.rank, min(self.rank + self._fanout, self.world_size)))

    def _leaders(self) -> list[int]:
        return list(range(0, self.world_size, self._fanout)) if self.world_size > self._fanout else []

    def _look(self, awaited: _Awaited, gone: Callable[[], int]) -> bool:
        """Read what has been said; True once nothing more is waited for."""
        suffix = "/lead" if awaited.level == 2 else ""
        keys = [f"{awaited.place}/{rank}{suffix}" for rank in awaited.ranks]
        awaited.looks += 1
        found: dict[int, Mapping[str, Any]] = {}
        if self._store.check(keys):
            complete = self._read(awaited, keys, found)
        elif awaited.looks > (2 if gone() else PATIENCE) * (1 + (awaited.level == 2)):
            there = [key for key in keys if self._store.check([key])]
            self._read(awaited, there, found)
            complete = True
        else:
            return False
        # A rank whose word for this step is still to come has that of an earlier one under its key.
        if not complete and awaited.looks <= PATIENCE * (1 + (awaited.level == 2)):
            return False
        if awaited.level == 1:
            self._store.set(f"{awaited.place}/{self.rank}/lead", json.dumps([awaited.step, packed(found)]))
        elif found:
            self._heard.setdefault(awaited.topic, []).append((awaited.step, found))
            del self._heard[awaited.topic][:-SLOTS]
        return True

    def _read(self, awaited: _Awaited, keys: Sequence[str], found: dict[int, Mapping[str, Any]]) -> bool:
        """Words for this step among these keys; whether all of them were, or are of a later one already."""
        complete = True
        for key, raw in zip(keys, self._values(keys), strict=True):
            step, values = json.loads(raw)
            if step != awaited.step:
                complete = complete and step > awaited.step
            elif awaited.level == 2:
                found.update(unpacked(values))
            else:
                found[int(key.rpartition("/")[2])] = values
        return complete

    def _values(self, keys: Sequence[str]) -> Sequence[Any]:
        if len(keys) > 1 and self._store.has_extended_api():
            return self._store.multi_get(list(keys))  # type: ignore[no-any-return]
        return [self._store.get(key) for key in keys]


class _Awaited:
    """Words of some ranks on one topic for one step."""

    __slots__ = ("level", "looks", "place", "ranks", "step", "topic")

    def __init__(self, topic: str, step: int, place: str, ranks: list[int], level: int) -> None:
        self.topic = topic
        self.step = step
        self.place = place
        self.ranks = ranks
        self.level = level
        """0: of all ranks; 1: of a group, by the first of it; 2: of all groups."""
        self.looks = 0


def packed(found: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """Values of many ranks, with what most of them have in common written once: ``[common, {rank: what differs}]``."""
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for values in found.values() for key in values):
        texts = Counter(json.dumps(values[key]) for values in found.values() if key in values)
        text, count = texts.most_common(1)[0]
        if count > 1:
            common[key] = json.loads(text)
    apart = {
        rank: {
            "+": {key: value for key, value in values.items() if key not in common or common[key] != value},
            "-": [key for key in common if key not in values],
        }
        for rank, values in found.items()
    }
    return [common, {rank: {sign: part for sign, part in parts.items() if part} for rank, parts in apart.items()}]


def unpacked(written: Sequence[Any]) -> dict[int, Mapping[str, Any]]:
    """The inverse of :func:`packed`."""
    common, apart = written
    return {
        int(rank): {
            key: value for key, value in {**common, **parts.get("+", {})}.items() if key not in parts.get("-", ())
        }
        for rank, parts in apart.items()
    }
