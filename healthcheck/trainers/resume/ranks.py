"""Several ranks of one plain script: rank 0 says where the run goes on, and when a checkpoint was written.

All ranks must count alike, but in most scripts only rank 0 writes files, and in some only rank 0 loads
them. What is said goes through the rendezvous store: no collective, so that a rank which is not
watched makes nobody hang.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.agreement import store_of_ranks

if TYPE_CHECKING:
    from healthcheck.session import Session

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
                f"the ranks cannot agree where to go on ({type(error).__name__}): rules start fresh, at step 1"
            )
            return None
        return None if said is None else (str(said[0]), int(said[1]))

    def tell_saved(self, step: int) -> None:
        """Rank 0 has written a checkpoint after this step."""
        if self._store is not None and self._session.info.rank == 0:
            number = self._store.add(f"{PREFIX}/saves", 0) + 1
            self._store.set(f"{PREFIX}/saved/{number}", str(step))
            self._store.add(f"{PREFIX}/saves", 1)

    def saved(self) -> int | None:
        """The step of a checkpoint that rank 0 has written since the last call."""
        if self._store is None:
            return None
        count = self._store.add(f"{PREFIX}/saves", 0)
        if count == self._heard:
            return None
        self._heard = count
        return int(self._store.get(f"{PREFIX}/saved/{count}"))
