"""All ranks decide together: a stop is a proposal until every rank knows of it.

One rank that leaves a training loop alone makes the others hang in their next collective. So a rank
that wants to stop says so at a *sync point* (every ``sync_every`` steps) and all ranks, itself
included, act on it at the next one: a step fixed by arithmetic, never by arrival.

The ranks talk through the rendezvous store that ``torch.distributed`` has anyway. That needs no
process group of our own, so a rank that is not watched cannot be made to hang in a collective that
it does not know of; it is merely missing, and then nobody agrees on anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.run.actor import CHECKPOINT

PREFIX = "healthcheck/agree"
PATIENCE_SECONDS = 60.0
"""How long a rank waits at a sync point for the others, who are in the same step or the next one."""
PARTING_SECONDS = 20.0
"""How long rank 0 stays after an agreed stop, so that slower ranks can still read the decision."""
LEAVING_SECONDS = 300.0
"""How long a process that exits with a failure of ours waits for the others, who may be saving their last checkpoint."""
POLLS = 50
"""Sync points after which ranks that have not announced themselves count as not watched."""


class StoreAgreement:
    """Implements :class:`healthcheck.core.protocols.Agreement` over a ``torch.distributed`` store.

    :param store: has ``add``, ``set``, ``get``, ``check``; shared by all ranks.
    :param sync_every: steps between two sync points; the same on all ranks.
    :param note: says one line to the user.
    :param folder: record of this rank; that of rank 0 is where all save.
    :param config: digest of what this rank judges by; ranks under other rules than rank 0 are named.
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
        folder: str = "",
        config: str = "",
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.sync_every = max(1, sync_every)
        self.note = note
        self.patience = patience
        self.folder = folder
        self.config = config
        self.broken = ""
        """Why the ranks do not agree (any more); empty while they do or may yet."""
        self._meeting = ""
        """Under which this training's keys stand; empty until this rank has announced itself."""
        self._decided = False
        self._start: int | None = None
        self._polls = 0
        self._proposals: dict[str, Mapping[str, Any]] = {}
        """By rule and cause: what this rank asks for, until all have decided or the cause has recovered."""
        self._asked: int | None = None
        """Sync point whose answers are read at the next one."""

    @property
    def ready(self) -> bool:
        """Whether a proposal made now will be decided by all ranks."""
        return not self.broken

    def propose(self, request: Mapping[str, Any]) -> None:
        """Ask all ranks for something at the next sync point; the first proposal of a cause stands.

        With ``unanimous`` in the request it is decided only once every rank has asked for the same cause.
        """
        self._proposals.setdefault(_name(request), dict(request))

    def withdraw(self, name: str) -> None:
        """Ask no longer for what this cause (``rule.cause``) wanted."""
        self._proposals.pop(name, None)

    def exchange(self, step: int) -> list[Mapping[str, Any]]:
        """Call at the end of every step on every rank. Returns what all ranks do now: save, then stop."""
        if self.broken or step % self.sync_every:
            return []
        try:
            if self._start is None:
                self._meet(step)
                return []
            return self._sync(step) if step >= self._start else []
        except Exception as error:  # the store is gone: a rank has left or the network has
            self._give_up(f"the rendezvous store does not answer ({type(error).__name__})")
            return []

    def close(self) -> None:
        """This rank is done; the others must not wait for its answers."""
        if not self._meeting:
            return
        with contextlib.suppress(Exception):
            if self._start is None and not self.broken:
                self._name_missing()
            if self._start is None:
                self.store.set(f"{self._meeting}/over", "")
            gone = self.store.add(f"{self._meeting}/done", 1)
            # The store usually lives in the process of rank 0: when it exits, a rank that has not yet read the
            # decision finds no store, does not stop and dies in its next collective instead.
            deadline = time.monotonic() + PARTING_SECONDS
            while self.rank == 0 and self._decided and gone < self.world_size and time.monotonic() < deadline:
                time.sleep(0.01)
                gone = self.store.add(f"{self._meeting}/done", 0)

    def leave(self, *, failing: bool, hurried: Callable[[], bool]) -> None:
        """The report is written and the process exits next.

        A launcher ends all ranks as soon as one has failed. An alert of ours makes an exit status, but it must
        not cost the other ranks what they are still writing: their last checkpoint, or the report of rank 0.

        :param failing: whether the status says failure, and the script did not fail by itself.
        :param hurried: whether somebody has asked this process to end.
        """
        if not self._meeting:
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
        """Announce this rank; once all are there, fix the first sync point from what they announced."""
        if not self._meeting:
            self._meeting = self._seat()
            self.store.set(f"{self._meeting}/config/{self.rank}", self.config)
            self.store.set(f"{self._meeting}/rank/{self.rank}", str(step))
            if self.rank == 0:
                self.store.set(f"{self._meeting}/folder", self.folder)
            self.store.add(f"{self._meeting}/here", 1)
        if self.store.add(f"{self._meeting}/here", 0) >= self.world_size:
            self._name_strangers()
            steps = [int(self.store.get(f"{self._meeting}/rank/{rank}")) for rank in range(self.world_size)]
            self._start = (max(steps) // self.sync_every + 2) * self.sync_every
            if step > self._start:
                self._give_up("the ranks are too many steps apart")
            elif step == self._start:
                self._sync(step)
            return
        self._polls += 1
        if self._polls > POLLS:
            self._name_missing()

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

    def _name_missing(self) -> None:
        missing = [str(r) for r in range(self.world_size) if not self.store.check([f"{self._meeting}/rank/{r}"])]
        if missing:
            self._give_up(f"rank {', '.join(missing[:8])} {'is' if len(missing) == 1 else 'are'} not watched")

    def _name_strangers(self) -> None:
        """Ranks that judge by other rules: a stop of theirs is none of ours, and a node with an old file looks healthy."""
        if self.rank:
            return
        theirs = [self.store.get(f"{self._meeting}/config/{rank}").decode() for rank in range(self.world_size)]
        others = [str(rank) for rank, config in enumerate(theirs) if config != self.config]
        if others:
            named = f"rank {', '.join(others[:8])}" + (f" and {len(others) - 8} more" if len(others) > 8 else "")
            self.note(
                f"{named} {'runs' if len(others) == 1 else 'run'} under other rules than rank 0: "
                "compare healthcheck.yaml and HEALTHCHECK_* there, and the rules.yaml of their records"
            )

    def _sync(self, step: int) -> list[Mapping[str, Any]]:
        """Read the answers of the sync point before, then give our own for this one."""
        decided = self._read(self._asked) if self._asked is not None else []
        if decided:
            self._proposals.pop(CHECKPOINT, None)  # saved just now, whoever asked for it
        key = f"{self._meeting}/{step}"
        for proposal in self._proposals.values() if not self._decided else ():
            number = self.store.add(f"{key}/asked", 1)
            self.store.set(f"{key}/why/{number}", json.dumps({**proposal, "rank": self.rank}))
        self.store.add(f"{key}/n", 1)
        if self.rank == 0 and self._asked is not None:
            self._forget(self._asked - self.sync_every)
        self._asked = step
        return decided

    def _read(self, asked: int) -> list[Mapping[str, Any]]:
        key = f"{self._meeting}/{asked}"
        deadline = time.monotonic() + self.patience
        while self.store.add(f"{key}/n", 0) + self.store.add(f"{self._meeting}/done", 0) < self.world_size:
            if time.monotonic() > deadline:
                self._give_up(f"not all ranks reached step {asked:,} within {self.patience:g} s")
                return []
            time.sleep(0.001)
        count = self.store.add(f"{key}/asked", 0)
        if not count:
            return []
        most = max(64, 2 * self.world_size)
        asked_for = [json.loads(self.store.get(f"{key}/why/{n}")) for n in range(1, min(count, most) + 1)]
        ranks_of = Counter(map(_name, asked_for))
        asked_for = [p for p in asked_for if not p.get("unanimous") or ranks_of[_name(p)] == self.world_size]
        saves = sorted((p for p in asked_for if p["rule"] == CHECKPOINT), key=lambda p: int(p["rank"]))[:1]
        if saves:
            saves = [{**saves[0], "folder": self.store.get(f"{self._meeting}/folder").decode()}]
        stops = [p for p in asked_for if p["rule"] != CHECKPOINT]
        if not stops:
            return saves
        self._decided = True
        first = min(stops, key=lambda p: (-int(p.get("severity", 0)), int(p.get("order", 0)), int(p["rank"])))
        same = [p for p in stops if p["rule"] == first["rule"]]
        # The most severe rule decides; of its causes the most certain one over all ranks speaks.
        speaks = min(same, key=lambda p: (int(p.get("order", 0)), int(p["rank"])))
        said = {key: speaks[key] for key in ("cause", "reason", "step") if key in speaks}
        return [*saves, {**first, **said, "ranks": sorted({int(p["rank"]) for p in same})}]

    def _forget(self, asked: int) -> None:
        if asked > 0 and hasattr(self.store, "delete_key"):
            for name in ("n", "asked"):
                with contextlib.suppress(Exception):
                    self.store.delete_key(f"{self._meeting}/{asked}/{name}")

    def _give_up(self, why: str) -> None:
        self.broken = why
        if self.rank == 0 or self._proposals:
            self.note(f"ranks do not agree on stops: {why}; each rank only reports")


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
        session.note(f"ranks cannot agree on stops: no rendezvous store ({type(error).__name__}: {error})")
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
        folder=str(session.info.run_dir or ""),
        config=_digest(session),
    )


def _digest(session: Any) -> str:
    """Of the rules in force and the settings that ranks must share."""
    shared = [session.settings.get(key) for key in ("mode", "max_steps", "max_time", "sync_every")]
    return hashlib.sha256(json.dumps([session.rules.text, shared], default=str).encode()).hexdigest()[:16]
