"""``HEALTHCHECK_TRACE=1``: which hook called whom at which step, and how long it took, on stderr."""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from healthcheck.extend.host import TRACE_VARIABLE
from healthcheck.reports.console import Stderr

if TYPE_CHECKING:
    from healthcheck.run.session import Session


def wanted() -> bool:
    return os.environ.get(TRACE_VARIABLE, "") not in ("", "0")


class HookTrace:
    """Writes a line for each call of a loop or judgement hook; pluggy itself traces the cold ones.

    Exists only while the variable is set: it stands in the path of every call.
    """

    name = "trace"

    def __init__(self) -> None:
        self.out = Stderr()

    def start(self, session: Session) -> None:
        dispatch, write = session.dispatch, self.out.write
        for info in session.host.infos:
            write([f"trace: plugin {info.name} ({info.source}): {', '.join(info.hooks) or 'no hooks'}"])

        def call(hook: str, step: int, *arguments: Any) -> None:
            for listener in dispatch.table.get(hook, ()):
                began = perf_counter_ns()
                raised: BaseException | None = None
                try:
                    listener.call(*arguments)
                except BaseException as error:
                    raised = error
                took = (perf_counter_ns() - began) / 1000
                how = f"RAISED {type(raised).__name__}" if raised is not None else f"{took:.0f} us"
                write([f"trace: step {step} {hook} -> {listener.owner} ({how})"])
                if raised is not None:
                    dispatch.failed(listener.owner, hook, step, raised)

        dispatch.call = call  # type: ignore[method-assign]
