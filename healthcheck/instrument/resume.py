"""Runs that go on from a checkpoint: detectors go on with them, in a script as in a framework, on one rank or several."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.instrument.agreement import store_of_ranks
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.patching import AfterImport, Patches
from healthcheck.instrument.resume_check import ResumeCheck, normal_of
from healthcheck.instrument.saved_state import (
    restore,
    start_fresh,
)
from healthcheck.run.checkpoints import FileMark, Found, StateStore, mark_of

if TYPE_CHECKING:
    from healthcheck.run.session import Session


# --------------------------------------------------------------------------------------------------
# Several ranks of one plain script: rank 0 says where the run goes on, and when a checkpoint was written.
#
# All ranks must count alike, but in most scripts only rank 0 writes files, and in some only rank 0 loads
# them. What is said goes through the rendezvous store: no collective, so that a rank which is not
# watched makes nobody hang.


PREFIX = "healthcheck/resume"
PATIENCE_SECONDS = 20.0
"""How long a rank that has loaded a checkpoint waits for rank 0, which is about to make its first step as well."""

Place = tuple[str, int]
"""A run and the step after which it goes on."""


class RankResume:
    """What one rank says to, or hears from, rank 0."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._heard = 0
        self._store: Any = None

    def loaded(self, found: Place) -> None:
        """This rank has loaded a checkpoint. Rank 0 says so at once: others may get its weights, and start, before it."""
        if self._session.info.rank == 0:
            with self._losing():
                self._store = store_of_ranks()
                if self._store is not None:
                    self._store.set(f"{PREFIX}/from", json.dumps(found))

    def agreed(self, found: Place | None) -> Place | None:
        """Where all ranks go on from; None to begin at step 1. Before the first step.

        :param found: where this rank would; only that of rank 0 counts. A rank that has loaded nothing does not
            wait: in a pipeline rank 0 may need its gradients first.
        """
        session = self._session
        try:
            store = self._store = store_of_ranks()
            if store is None:
                if found is not None:
                    session.note(f"{found[0]} is not continued: the ranks have no process group yet to agree through")
                return None
            if session.info.rank == 0:
                store.set(f"{PREFIX}/from", json.dumps(found))
                return found
            if found is not None:
                store.wait([f"{PREFIX}/from"], timedelta(seconds=PATIENCE_SECONDS))
            said = json.loads(store.get(f"{PREFIX}/from")) if store.check([f"{PREFIX}/from"]) else None
        except Exception as error:  # whatever the store of a group raises when a rank has gone
            session.note(
                f"the ranks cannot agree where to continue ({type(error).__name__}): rules start fresh, at step 1"
            )
            return None
        return None if said is None else (str(said[0]), int(said[1]))

    def tell_saved(self, step: int) -> None:
        """Rank 0 has written a checkpoint after this step."""
        if self._store is not None and self._session.info.rank == 0:
            with self._losing():
                number = self._store.add(f"{PREFIX}/saves", 0) + 1
                self._store.set(f"{PREFIX}/saved/{number}", str(step))
                self._store.add(f"{PREFIX}/saves", 1)

    def saved(self) -> int | None:
        """The step of a checkpoint that rank 0 has written since the last call."""
        if self._store is None:
            return None
        with self._losing():
            count = self._store.add(f"{PREFIX}/saves", 0)
            if count != self._heard:
                self._heard = count
                return int(self._store.get(f"{PREFIX}/saved/{count}"))
        return None

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """The store goes when its rank does. That is said where the ranks agree, once; here nothing more is asked of it."""
        try:
            yield
        except Exception:
            self._store = None


# --------------------------------------------------------------------------------------------------
# A script that loads a checkpoint of an earlier watched run goes on with that run's detectors.
#
# What the detectors knew lies in the record of the run that wrote a checkpoint, never beside the user's files.


FREE_SECONDS, SHARE = 2.0, 0.05
"""Keeping states may take so long, and beyond it this share of the run: for scripts that save at every step."""


class Continuation:
    """Keeps the detectors at every checkpoint of a script, and restores them where one is loaded."""

    def __init__(
        self, session: Session, machine: StepMachine, store: StateStore, patches: Patches, imports: AfterImport
    ) -> None:
        self._session = session
        self._machine = machine
        self._store = store
        self._patches = patches
        self._imports = imports
        self._loaded: list[Found] = []
        self._kept: tuple[int, Mapping[str, Any], Mapping[str, Any]] | None = None
        self._spent = 0.0
        self._pid = os.getpid()
        self._ranks = RankResume(session) if session.info.world_size > 1 else None

    def install(self, loaded: Sequence[str] = ()) -> None:
        """After the hooks that announce checkpoints: a state is kept once the rules have judged it.

        :param loaded: files that the script has loaded before it was watched.
        """
        self._machine.before_first = self._begin
        for where in loaded:
            guarded(self._session, self._file_loaded, where)
        self._imports.when("torch", lambda torch: self._patch(torch, "save", 1, "load"))
        self._imports.when("safetensors.torch", lambda module: self._patch(module, "save_file", 1, "load_file"))

    def _patch(self, module: ModuleType, save: str, place: int, load: str) -> None:
        self._patches.replace(module, save, self._calls(self._file_saved, place, ("f", "filename")))
        self._patches.replace(module, load, self._calls(self._file_loaded, 0, ("f", "filename")))

    def _calls(
        self, tell: Callable[[Any], None], place: int, names: tuple[str, ...]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if self._patches.active and os.getpid() == self._pid:
                    given = [args[place]] if len(args) > place else [kwargs[n] for n in names if n in kwargs]
                    for where in given[:1]:
                        guarded(self._session, tell, where)
                return result

            return call

        return make

    # -- keeping ----------------------------------------------------------------------

    def _file_saved(self, where: Any) -> None:
        machine = self._machine
        if not machine.started or machine.events.saves_announced:
            return  # a framework keeps its state beside its own checkpoints
        mark = mark_of(where)
        if mark is None:
            return
        if not isinstance(where, (str, os.PathLike)):
            machine.checkpoint_saved(mark.path)  # an open file is announced by nobody else
        self._keep(mark, machine.last_attempt)

    def _keep(self, mark: FileMark | None, step: int) -> None:
        session = self._session
        if self._spent > FREE_SECONDS + SHARE * (session.clock.monotonic() - session.active.started):
            return
        began = perf_counter()
        if self._kept is None or self._kept[0] != step:
            self._kept = (step, session.state_dict(), normal_of(session, self._machine.view.optimizers()))
            if self._ranks is not None:
                self._ranks.tell_saved(step)
        self._store.keep(mark, *self._kept)
        self._spent += perf_counter() - began

    def _other_rank_saved(self, event: Any) -> None:
        """Most scripts write on rank 0 alone: the others keep theirs when they hear of it, a step later."""
        step = self._ranks.saved() if self._ranks is not None else None
        if step is not None and (self._kept is None or self._kept[0] < step):
            self._keep(None, step)

    # -- going on -----------------------------------------------------------------------

    def _file_loaded(self, where: Any) -> None:
        if self._machine.before_first is None:
            return  # training has begun: this is a look back, no resume
        mark = mark_of(where)
        found = None if mark is None else self._store.find(mark)
        if found is not None:
            self._loaded.append(found)
            newest = self._newest()
            if self._ranks is not None and newest is not None:
                self._ranks.loaded((newest.run, newest.step))

    def _newest(self) -> Found | None:
        return max((each for each in self._loaded if not each.changed), key=lambda each: each.step, default=None)

    def _begin(self) -> None:
        """Training begins. Of several checkpoints that were loaded the one of the latest step is continued."""
        session, machine = self._session, self._machine
        if machine.events.saves_announced or session.info.resumed_from is not None:
            return
        found = self._newest()
        if found is None:
            for each in self._loaded:
                session.note(each.changed)
        if self._ranks is not None:
            agreed = self._ranks.agreed(None if found is None else (found.run, found.step))
            found = None if agreed is None else self._store.kept(*agreed)
            if session.info.rank:
                session.on("step_end", self._other_rank_saved)
        if found is None:
            return
        session.info.resumed_from = session.step = found.step
        if session.info.speaks:
            session.note(f"continues {found.run} ({found.ended}; attempt {self._store.continues(found)})")
        session.note(f"  rules: {self._restore(found)}")
        if session.engine.step > found.step:
            session.engine.rewind(found.step)  # kept a step later, when this rank had heard of the checkpoint
        session.step = found.step
        machine.start_at(found.step)
        ResumeCheck(session, found.step, found.normal, found.stop).listen()

    def _restore(self, found: Found) -> str:
        session = self._session
        if found.state is None:
            start_fresh(session, found.step)
            return f"all start fresh after step {found.step:,}: {found.run} has no readable state of it"
        fresh, why = restore(session, found.step, found.state)
        if why:
            return f"all start fresh after step {found.step:,}: the saved state cannot be used ({why})"
        count = len(session.engine.states) - len(fresh)
        verb = "goes" if count == 1 else "go"
        rest = f", {len(fresh)} not ({'; '.join(fresh)})" if fresh else ""
        return f"{count} {verb} on after step {found.step:,} with their windows{rest}; the stop is not carried over"
