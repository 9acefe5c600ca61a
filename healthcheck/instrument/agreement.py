"""All ranks decide together: a stop is a proposal until every rank is at the same step for it.

One rank that leaves a training loop alone makes the others hang in their next collective. So a rank that wants to stop
says so at a *sync point* (every ``sync_every`` steps). Whoever hears of it first names a step that nobody has passed yet;
each rank waits there for the others, a moment, and one that is too far on says no. Whether all have come is decided once,
by whoever knows first, and all ranks at that step read the same answer. After a no a later step is tried.

While nobody asks for anything no rank waits for another: ranks may be any number of steps apart (local SGD).

The ranks talk through the rendezvous store that ``torch.distributed`` has anyway. That needs no process group of our
own, so a rank that is not watched cannot be made to hang in a collective that it does not know of; it is merely
missing, and then nobody agrees on anything.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from healthcheck.core.digest import sha256
from healthcheck.core.runinfo import Elsewhere
from healthcheck.core.text import shorten
from healthcheck.extend.guard import describe
from healthcheck.instrument.exchange import StoreExchange
from healthcheck.run.actor import CHECKPOINT, MUTE, PACE
from healthcheck.run.ending import LOST

PREFIX = "healthcheck/agree"
PATIENCE_SECONDS = 1.5
"""How long a rank waits at a named step for the others; then a later step is tried."""
ROUNDS = 8
"""Steps that are tried for one decision; the distances grow fourfold. After the last one the ranks only report."""
PACE_SECONDS, PACE_ROUNDS = 0.2, 2
"""The same two where ranks would only like to watch fewer steps: those that are not in step go on watching all of them."""
ENDS_SECONDS = 5.0
"""How long the rank that speaks waits at its end for those of the others: they may still be writing evidence."""
LOST_SECONDS = 15.0
"""The same where it was left alone in a collective: why, another rank has to say, which writes its report at this moment."""
PARTING_SECONDS = 20.0
"""How long rank 0 stays after an agreed stop, so that slower ranks can still read the decision."""
LEAVING_SECONDS = 300.0
"""How long a process that exits with a failure of ours waits for the others, who may be saving their last checkpoint."""
WRITTEN_SECONDS = 10.0
"""How long a rank waits for what another one has begun to write. Without a limit it would wait for the store's own, five minutes."""
_DONE_ONCE = (CHECKPOINT, MUTE, PACE)
POLLS = 50
MISSING_SECONDS = 30.0
"""Sync points and seconds after which ranks that have not announced themselves count as not watched. Both: fifty steps
of a small model are over before a rank that loads its data has begun."""


class StoreAgreement:
    """Implements :class:`healthcheck.run.actor.Agreement` over a ``torch.distributed`` store.

    :param store: has ``add``, ``set``, ``get``, ``check``; shared by all ranks.
    :param sync_every: steps between two sync points; the same on all ranks.
    :param note: says one line to the user.
    :param speaks: whether this rank speaks for all: rank 0, or another one that stands in for it.
    :param folder: record of this rank; that of the rank that speaks is where all save.
    :param config: digest of what this rank judges by; ranks under other rules than the one that speaks are named.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        sync_every: int,
        note: Callable[[str], None],
        patience: float = PATIENCE_SECONDS,
        speaks: bool | None = None,
        folder: str = "",
        config: str = "",
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.sync_every = self._least_every = max(1, sync_every)
        self.note = note
        self.patience = patience
        self.speaks = rank == 0 if speaks is None else speaks
        self.folder = folder
        self.config = config
        self.broken = ""
        """Why the ranks do not agree (any more); empty while they do or may yet."""
        self._meeting = ""
        """Under which this training's keys stand; empty until this rank has announced itself."""
        self._decided = False
        self._joined = False
        """Whether all ranks have announced themselves."""
        self._together = (math.inf, math.inf)
        """All ranks know after the first of these steps that they agree, and until the second."""
        self._polls = 0
        self._met_at = math.inf
        self._lost = self._closed = False
        self._unheard = ""
        self._spoken = False
        """Whether all ranks stop at one step, none has ended before it: then the one that speaks says why, for all."""
        self._proposals: dict[str, Mapping[str, Any]] = {}
        """By rule and cause: what this rank asks for, until all have decided or the cause has recovered."""
        self._said: set[str] = set()
        """Rules and causes of which the others know that this rank asks for them."""
        self._read = 0
        """Messages of all ranks that were read."""
        self._asked: dict[tuple[str, int], tuple[int, Mapping[str, Any]]] = {}
        """``(rule.cause, rank)`` -> number of the message, and what is asked for: the same on all ranks that have read as
        much."""
        self._round = 0
        self._failed = 0
        """Rounds without an agreement since the last one with one."""
        self._target: int | None = None
        """The step of the round under way."""
        self._paces = True
        """Whether ranks may try to watch the same steps: they have not failed to meet for that."""
        self.talk: StoreExchange | None = StoreExchange(
            store, rank, world_size, hears=self.speaks, broadcast=self._message
        )
        """What probes tell each other; None once that has failed."""

    @property
    def ready(self) -> bool:
        """Whether a proposal made now will be decided by all ranks."""
        return not self.broken

    def together(self, step: int) -> bool:
        """Whether all ranks know at this step that they agree, so that each does what the others do.

        For ranks that are in step, which are those whose gradients are the same. A rank that holds back an update before
        another one has come, or after one has given up, would be the only one.
        """
        return not self._lost and self._together[0] < step <= self._together[1]

    def propose(self, request: Mapping[str, Any]) -> None:
        """Ask all ranks for something at the next sync point; the first proposal of a cause stands.

        With ``unanimous`` in the request it is decided only once every rank has asked for the same cause.
        """
        if request["rule"] != PACE or self._paces:
            self._proposals.setdefault(_name(request), dict(request))

    def withdraw(self, name: str) -> None:
        """Ask no longer for what this cause (``rule.cause``) wanted."""
        self._proposals.pop(name, None)

    def exchange(self, step: int) -> list[Mapping[str, Any]]:
        """Call at the end of every step on every rank. Returns what all ranks do now: save, then stop."""
        if self._lost or step % self.sync_every or (self.broken and self.talk is None):
            return []
        decided: list[Mapping[str, Any]] = []
        try:
            if not self.broken:
                if not self._joined:
                    self._meet(step)
                decided = self._sync(step) if self._joined else []
            if self.talk is not None and self._joined and not self._decided:
                self._let_talk(self.talk)
        except Exception as error:
            self._lose(error)
        return decided

    def _let_talk(self, talk: StoreExchange) -> None:
        """Ranks go on to tell each other what they read where they cannot agree on stops: it takes no decision."""
        try:
            talk.turn(self._meeting, lambda: int(self.store.add(f"{self._meeting}/done", 0)))
        except RuntimeError:  # the store does not answer
            raise
        except Exception as error:
            self.talk = None
            if self.speaks:
                self.note(f"ranks are compared no longer: {describe(error)}")

    def _lose(self, error: Exception) -> None:
        """The store is gone: a rank has left, or the network has. Nothing more is asked of it."""
        self._lost = True
        self._only_report(f"the rendezvous store does not answer ({type(error).__name__})")

    def close(self, failed: str = "", warned: str = "") -> Elsewhere:
        """This rank is done; the others must not wait for its answers. See the protocol for what is returned."""
        elsewhere = Elsewhere()
        if self._lost or self._closed:
            return elsewhere._replace(unseen=self.broken)
        self._closed = True
        try:
            self._see_who_is_here()
            if not self._joined:
                self.store.set(f"{self._meeting}/over", "")
            self.store.set(f"{self._meeting}/end/{self.rank}", json.dumps([failed, warned]))
            if not self.speaks:  # before this rank counts as done: then the one that speaks reads, and says that it has
                self._unheard = self._not_heard()
            gone = self.store.add(f"{self._meeting}/done", 1)
            if self.speaks:
                elsewhere = self._ends_of_others(LOST_SECONDS if LOST in failed else ENDS_SECONDS)
            # The store usually lives in the process of rank 0: when it exits, a rank that has not yet read the
            # decision finds no store, does not stop and dies in its next collective instead.
            deadline = time.monotonic() + PARTING_SECONDS
            while self.rank == 0 and self._decided and gone < self.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                gone = self.store.add(f"{self._meeting}/done", 0)
        except Exception as error:
            self._lose(error)
        return elsewhere._replace(unseen=self.broken)

    @property
    def unheard(self) -> str:
        """See the protocol."""
        if self.speaks or self._spoken:
            return ""
        return "the rendezvous store does not answer" if self._lost else self._unheard

    def _not_heard(self) -> str:
        """Why the rank that speaks does not read how this one ends, which is written; empty where it does."""
        if not self.store.check([f"{self._meeting}/folder"]):
            return "no rank speaks for all"
        gone = self.store.check([f"{self._meeting}/heard"])
        return "the rank that speaks for all had ended before" if gone else ""

    def _see_who_is_here(self) -> None:
        """At the end: the run may have been too short for a sync point of all ranks."""
        deadline = time.monotonic() + self.patience
        while not self._joined and not self.broken:
            self._meet(0)
            if not self._joined and time.monotonic() > deadline:
                self._name_missing()
                return
            time.sleep(0.01)

    def _ends_of_others(self, seconds: float) -> Elsewhere:
        """What failed on other ranks, which end at about the same time; of those that go on nothing is known."""
        deadline = time.monotonic() + seconds
        here = self.world_size if self._joined else self.store.add(f"{self._meeting}/here", 0)
        while self.store.add(f"{self._meeting}/done", 0) < here and time.monotonic() < deadline:
            time.sleep(0.01)
        # Before they are read: who writes its end and does not see this is among them.
        self.store.set(f"{self._meeting}/heard", "")
        failed, warned, silent = [], [], []
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            if self.store.check([f"{self._meeting}/end/{rank}"]):
                texts = json.loads(self.store.get(f"{self._meeting}/end/{rank}"))
                failed += [f"rank {rank}: {text}" for text in texts[:1] if text]
                warned += [f"rank {rank}: {text}" for text in texts[1:] if text]
            elif self.store.check([f"{self._meeting}/rank/{rank}"]):
                silent.append(str(rank))
        failed.sort(key=lambda text: LOST in text)  # who failed by itself comes first
        if silent:
            why = f"rank {shorten(silent, 8)} {'goes' if len(silent) == 1 else 'go'} on, or died"
            self.broken = f"{self.broken}; {why}" if self.broken else why
        return Elsewhere(shorten(failed, 3), shorten(warned, 3))

    def leave(self, *, failing: bool, hurried: Callable[[], bool]) -> None:
        """The report is written and the process exits next.

        A launcher ends all ranks as soon as one has failed. An alert of ours makes an exit status, but it must
        not cost the other ranks what they are still writing: their last checkpoint, or the report of rank 0.

        :param failing: whether the status says failure, and the script did not fail by itself.
        :param hurried: whether somebody has asked this process to end.
        """
        if not self._meeting or self._lost:
            return
        with contextlib.suppress(Exception):  # without a store there is nobody to wait for
            gone = self.store.add(f"{self._meeting}/left", 1)
            deadline = time.monotonic() + LEAVING_SECONDS
            while failing and not self.broken and gone < self.world_size and time.monotonic() < deadline:
                if hurried():
                    return
                time.sleep(0.05)
                gone = self.store.add(f"{self._meeting}/left", 0)

    # -- inside -----------------------------------------------------------------------

    def _meet(self, step: int) -> None:
        """Announce this rank, and see whether all have. Nobody waits: who comes later is seen at a later sync point."""
        if not self._meeting:
            self._meeting = self._seat()
            self.store.set(f"{self._meeting}/config/{self.rank}", self.config)
            self.store.set(f"{self._meeting}/rank/{self.rank}", str(step))
            if self.speaks:
                self.store.set(f"{self._meeting}/folder", self.folder)
            self._met_at = time.monotonic()
            self.store.add(f"{self._meeting}/here", 1)
        if self.store.add(f"{self._meeting}/here", 0) >= self.world_size:
            self._joined = True
            # Ranks in step read this at their next sync point at the latest.
            since = int(self._first(f"{self._meeting}/since", lambda: str(step)))
            self._together = since + self.sync_every, self._together[1]
            self._name_strangers()
            return
        self._polls += 1
        if self._polls > POLLS and time.monotonic() - self._met_at > MISSING_SECONDS:
            self._name_missing(step)

    def _seat(self) -> str:
        """Where the ranks of this training meet: the first meeting that this rank has not been to.

        A job may train several models, one after the other or at once, and what one of them decided says nothing of the
        next. All ranks come to them in the same order; a training that one rank had for itself is over for the others.
        """
        for number in itertools.count():
            meeting = f"{PREFIX}/{number}"
            if self.store.add(f"{meeting}/seat/{self.rank}", 1) == 1 and not self.store.check([f"{meeting}/over"]):
                return meeting
        raise AssertionError

    def _name_missing(self, step: int = 0) -> None:
        missing = [str(r) for r in range(self.world_size) if not self.store.check([f"{self._meeting}/rank/{r}"])]
        if missing:
            self._give_up(f"rank {', '.join(missing[:8])} {'is' if len(missing) == 1 else 'are'} not watched", step)

    def _name_strangers(self) -> None:
        """Ranks that judge by other rules: a stop of theirs is none of ours, and a node with an old file looks healthy."""
        if not self.speaks:
            return
        theirs = [self.store.get(f"{self._meeting}/config/{rank}").decode() for rank in range(self.world_size)]
        others = [str(rank) for rank, config in enumerate(theirs) if config != self.config]
        if others:
            named = f"rank {', '.join(others[:8])}" + (f" and {len(others) - 8} more" if len(others) > 8 else "")
            self.note(
                f"{named} {'runs' if len(others) == 1 else 'run'} under other rules than rank {self.rank}: "
                "compare healthcheck.yaml and HEALTHCHECK_* there, and the rules.yaml of their records"
            )

    def _sync(self, step: int) -> list[Mapping[str, Any]]:
        """Say where this rank is and what it asks for, hear the others, and decide where that is due."""
        self.store.set(f"{self._meeting}/rank/{self.rank}", str(step))
        if not self._decided:
            self._say_what_is_new()
        count = self.store.add(f"{self._meeting}/messages", 0)
        while self._read < count and not self.broken:
            self._read += 1
            self._hear(self._read, json.loads(self._written(f"{self._meeting}/message/{self._read}")))
        decided: list[Mapping[str, Any]] = []
        while not self.broken and not self._decided and (self._target is not None or self._wanted()):
            answer = self._try(step)
            if answer is None:
                break
            decided += answer
        return decided

    def _say_what_is_new(self) -> None:
        for name, proposal in self._proposals.items():
            if name not in self._said:
                self._said.add(name)
                self._message({**proposal, "rank": self.rank})
        for name in self._said - self._proposals.keys():
            self._said.discard(name)
            self._message({"withdrawn": name, "rank": self.rank})

    def _message(self, content: Mapping[str, Any]) -> None:
        text = json.dumps(content)  # what cannot be written must not take a number: the others wait for its content
        number = self.store.add(f"{self._meeting}/messages", 1)
        self.store.set(f"{self._meeting}/message/{number}", text)

    def _hear(self, number: int, message: Mapping[str, Any]) -> None:
        if "question" in message:
            if self.talk is not None:
                self.talk.hear(message)
        elif "gave_up" in message:
            self._together = self._together[0], min(self._together[1], float(message["until"]))
            self._only_report(str(message["gave_up"]))
        elif "withdrawn" in message:
            self._asked.pop((message["withdrawn"], int(message["rank"])), None)
            self._failed = self._failed if self._asked else 0
        else:
            self._asked[_name(message), int(message["rank"])] = number, message

    def _wanted(self) -> list[Mapping[str, Any]]:
        """What may be decided: all that is asked for, less what not every rank asks for that must."""
        asked = [message for _, message in self._asked.values()]
        ranks_of = Counter(map(_name, asked))
        return [m for m in asked if not m.get("unanimous") or ranks_of[_name(m)] == self.world_size]

    def _try(self, step: int) -> list[Mapping[str, Any]] | None:
        """Go on with the round under way. None: its step is still to come; empty: it came to nothing."""
        key = f"{self._meeting}/round/{self._round}"
        if self._target is None:
            target = int(self._first(f"{key}/target", lambda: str(self._next_target())))
            if step > target:
                return self._concluded(self._first(f"{key}/answer", lambda: "no"), step)
            self._target = target
        if step < self._target:
            return None
        # Not enough that a rank means to come: where ranks make different numbers of steps between two collectives it may
        # be waiting in one for us, and would be left alone there.
        if step == self._target:
            self.store.add(f"{key}/there", 1)
        deadline = time.monotonic() + (PACE_SECONDS if self._only_pace() else self.patience)
        while not self.store.check([f"{key}/answer"]):
            gone = self.store.add(f"{self._meeting}/done", 0)
            if self.store.add(f"{key}/there", 0) + gone >= self.world_size:
                wanted = functools.partial(self._all_that_is_wanted, everyone=not gone)
                return self._concluded(self._first(f"{key}/answer", wanted), step)
            if step > self._target or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return self._concluded(self._first(f"{key}/answer", lambda: "no"), step)

    def _next_target(self) -> int:
        """A sync point that no rank has passed, as far as they have said; further away after each failure."""
        steps = [int(self.store.get(f"{self._meeting}/rank/{rank}")) for rank in range(self.world_size)]
        ahead = int(4 ** max(0, self._failed - 1))
        return (max(steps) // self.sync_every + ahead) * self.sync_every

    def _first(self, key: str, value: Callable[[], str]) -> str:
        """The value of a key that is written once: by whoever asks first, and read by all others."""
        if self.store.add(f"{key}/asked", 1) == 1:
            try:
                text = value()
            except Exception:
                self.store.set(key, "")  # nothing that can be read: the others fail as well, and wait no longer
                raise
            self.store.set(key, text)
        return self._written(key)

    def _written(self, key: str) -> str:
        """The value of a key that a rank is about to write."""
        self.store.wait([key], timedelta(seconds=WRITTEN_SECONDS))
        return str(self.store.get(key).decode())

    def _all_that_is_wanted(self, everyone: bool) -> str:
        return json.dumps({"wanted": self._wanted(), "heard": self._read, "everyone": everyone})

    def _concluded(self, answer: str, step: int) -> list[Mapping[str, Any]]:
        """The round is over, with the same answer on all ranks."""
        self._round += 1
        self._target = None
        if answer == "no":
            self._failed += 1
            if self._failed >= PACE_ROUNDS and PACE in self._proposals:
                self._paces = False
                self.withdraw(PACE)
            if self._failed >= ROUNDS and not self._only_pace():
                self._give_up("the ranks were at no step together", step)
            return []
        self._failed = 0
        decided = json.loads(answer)
        wanted: list[Mapping[str, Any]] = decided["wanted"]
        common = self._for_all_once(wanted, decided["heard"])
        for one in common:
            if one["rule"] == PACE:  # sync points are among the steps that are watched
                self.sync_every = math.lcm(self._least_every, int(one["every"]))
        stops = [p for p in wanted if p["rule"] not in _DONE_ONCE]
        if not stops:
            return common
        self._decided = True
        self._spoken = decided["everyone"]
        first = min(stops, key=lambda p: (-int(p.get("severity", 0)), int(p.get("order", 0)), int(p["rank"])))
        same = [p for p in stops if p["rule"] == first["rule"]]
        # The most severe rule decides; of its causes the most certain one over all ranks speaks.
        speaks = min(same, key=lambda p: (int(p.get("order", 0)), int(p["rank"])))
        said = {key: speaks[key] for key in ("cause", "reason", "step") if key in speaks}
        return [*common, {**first, **said, "ranks": sorted({int(p["rank"]) for p in same})}]

    def _for_all_once(self, wanted: list[Mapping[str, Any]], heard: int) -> list[Mapping[str, Any]]:
        """What is asked for by a person or an action and done once, whoever asked: the first rank's word counts."""
        done: dict[str, Mapping[str, Any]] = {}
        for one in sorted(wanted, key=lambda p: int(p["rank"])):
            if one["rule"] in _DONE_ONCE:
                done.setdefault(_name(one), one)
        # Done just now. What was asked for later is a thing of its own.
        for (name, rank), (number, _) in list(self._asked.items()):
            if name in done and number <= heard:
                del self._asked[name, rank]
        for name in done:
            self._proposals.pop(name, None)
            self._said.discard(name)
        if CHECKPOINT in done:
            done[CHECKPOINT] = {**done[CHECKPOINT], "folder": self.store.get(f"{self._meeting}/folder").decode()}
        return list(done.values())

    def _only_pace(self) -> bool:
        """Whether nothing is asked for that must be decided."""
        return all(message["rule"] == PACE for message in self._wanted())

    def _give_up(self, why: str, step: int) -> None:
        """No rank decides anything any more; all of them hear of it at their next sync point."""
        message = {"gave_up": why, "until": step + self.sync_every}
        with contextlib.suppress(Exception):
            self._message(message)
        self._hear(0, message)

    def _only_report(self, why: str) -> None:
        if not self.broken and (self.speaks or self._proposals):
            self.note(f"ranks do not agree on stops: {why}; each rank only reports")
        self.broken = self.broken or why


def _name(request: Mapping[str, Any]) -> str:
    """``rule.cause`` of a proposal, or its rule."""
    return f"{request['rule']}.{request['cause']}" if request.get("cause") else str(request["rule"])


def store_of_ranks() -> Any:
    """The rendezvous store of this job's process group; None before there is one, or without other ranks.

    Raises what torch raises where a group has no store.
    """
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()


def agreement_of(session: Any) -> StoreAgreement | None:
    """The agreement of this job's ranks, once ``torch.distributed`` is initialised.

    None for a single process, without a process group, or with ``agree: off`` (``HEALTHCHECK_AGREE``).
    """
    settings = session.settings
    if session.info.world_size < 2 or settings.get("agree", "auto") == "off":
        return None
    try:
        store = store_of_ranks()
    except Exception as error:
        session.note(f"ranks cannot agree on stops: no rendezvous store ({describe(error)})")
        return None
    if store is None:
        return None
    import torch.distributed as dist

    on_cpu = "nccl" not in str(dist.get_backend())
    every = settings.get("sync_every") or (1 if on_cpu else 10)
    return StoreAgreement(
        store,
        dist.get_rank(),
        dist.get_world_size(),
        sync_every=int(every),
        note=session.note,
        speaks=session.info.speaks,
        folder=str(session.info.run_dir or ""),
        config=_digest(session),
    )


def _digest(session: Any) -> str:
    """Of the rules in force and the settings that ranks must share."""
    shared = [session.settings.get(key) for key in ("mode", "max_steps", "max_time", "sync_every")]
    return sha256(json.dumps([session.rules.text, shared], default=str).encode()).hexdigest()[:16]
