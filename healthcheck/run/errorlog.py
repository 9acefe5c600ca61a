"""Errors of those who watch, ours and of plugins: kept with step and epoch, said once, never the end of a training.

One that looks like memory (CUDA out of memory, the allocator) has the memory cleaned up, once a run:
what is left of the error's own garbage is then no reason for the training to fail as well.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.core.redact import redact_text
from healthcheck.extend.dispatch import ListenerError
from healthcheck.extend.guard import describe
from healthcheck.extend.host import PluginFailure

_MEMORY = re.compile(r"memory|allocat|\bcuda\b", re.IGNORECASE)


def looks_like_memory(error: BaseException) -> bool:
    """Whether an error is about memory, by its type or its words."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return isinstance(error, (RuntimeError, OSError)) and _MEMORY.search(describe(error)) is not None


class ErrorLog:
    """What went wrong in the watching of one run.

    :param say: prints one line.
    :param cleanup: frees memory and returns a sentence about it; None while there is nothing to do it with.
    """

    def __init__(self, say: Callable[[str], None], cleanup: Callable[[], str | None]) -> None:
        self.internal: list[dict[str, Any]] = []
        """Our own faults, as they stand in the report."""
        self._plugins: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._say = say
        self._cleanup = cleanup
        self._cleaned = False

    def ours(self, error: BaseException, method: str, step: int, epoch: float | None) -> None:
        """A fault of ours in ``method``: keep it, say it once, let training go on."""
        text = describe(error)
        for known in self.internal:
            if known["error"] == text and known.get("method", "") == method:
                known["count"] += 1
                return
        entry: dict[str, Any] = {"error": text, "step": step, "count": 1}
        if method:
            entry["method"] = method
        if epoch is not None:
            entry["epoch"] = epoch
        entry["traceback"] = redact_text("".join(traceback.format_exception(error)))
        entry |= self._cleaned_up(error)
        self.internal.append(entry)
        self._say(f"healthcheck: internal error at step {step}, training goes on: {text}")

    def plugin(self, owner: str, hook: str, error: BaseException, epoch: float | None) -> None:
        """An error of a plugin, which :class:`~healthcheck.extend.dispatch.Dispatch` keeps: add what that cannot know."""
        facts = self._cleaned_up(error)
        if epoch is not None:
            facts["epoch"] = epoch
        known = self._plugins.setdefault((owner, hook, describe(error)), facts)
        known.update({name: value for name, value in facts.items() if name not in known})

    def say_plugin(self, known: ListenerError) -> None:
        """One line about it."""
        where = f"in {known.hook} at step {known.step:,}"
        text = f'healthcheck: "{known.owner}" raised {where}: {known.error} ({known.place})'
        if not known.raised:
            text = f'healthcheck: "{known.owner}" {known.error} {where}: the run is not what it is without it'
        if known.quarantined:
            text += "; it is switched off for the rest of this run"
        self._say(text)

    def plugin_entries(self, known: Iterable[ListenerError], unloaded: Iterable[PluginFailure]) -> list[dict[str, Any]]:
        """Errors of plugins for the report, with those that kept some from being loaded."""
        entries = [{**one.to_json(), **self._plugins.get((one.owner, one.hook, one.error), {})} for one in known]
        return entries + [{"plugin": f.name, "hook": f.hook, "error": f.reason, "count": 1} for f in unloaded]

    def _cleaned_up(self, error: BaseException) -> dict[str, Any]:
        if self._cleaned or not looks_like_memory(error):
            return {}
        # Once a run: it stalls the device, and if it did not help the first time, it will not the second.
        self._cleaned = True
        try:
            done = self._cleanup()
        except Exception as again:
            done = f"cleanup failed: {describe(again)}"
        return {} if done is None else {"cleanup": done}
