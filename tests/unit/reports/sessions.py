"""Real sessions for tests of reports: real rules, engine, actions and reports; only the loop is made of numbers.

Also run as a script in a process of its own: ``python sessions.py SPEC.json``, so that streams are real.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.run.ending import Ending
from healthcheck.run.session import Session


class NumbersOnly:
    """Controls of a loop that has no model: it can stop and skip."""

    class device:
        kind = "cpu"

        @staticmethod
        def allocated_bytes() -> int:
            return 0

        reserved_bytes = allocated_bytes

        @staticmethod
        def release_cached() -> None:
            return None

    capabilities = Capabilities(
        "loop", frozenset(EventKind), frozenset({"stop", "skip_update"}), {"memory.fraction": "no GPU"}
    )

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str, exit_code: int) -> None:
        return None

    def skip_update(self) -> bool:
        return True

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        return None


RULES: dict[str, Any] = {
    "version": 1,
    "external": ["loss", "norm", "other"],
    "rules": {
        "loss-not-finite": {
            "metric": "loss",
            "when": "nonfinite",
            "severity": "error",
            "explains": ["norm-not-finite"],
            "then": ["stop"],
            "message": "loss is {value}",
            "hint": "look at the batch",
        },
        "norm-not-finite": {"metric": "norm", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "loss-spike": {
            "metric": "loss",
            "when": {"robust_z": {"above": 8, "window": 200}},
            "for": 2,
            "warmup": 10,
            "message": "loss jumps",
            "hint": "clip",
        },
        "other-missing": {"metric": "other", "when": {"above": 1}},
    },
}


def play(
    session: Session,
    series: Mapping[str, Sequence[float | None]],
    *,
    pause: float = 0.0,
    first: int = 1,
    until: str | None = None,
) -> None:
    """Feed columns of numbers, one step a row; stops where a rule stops. None: no sample.

    :param until: a file; the rows come again and again until there is one.
    """
    session.bind(NumbersOnly())  # type: ignore[arg-type]
    rows = max(map(len, series.values()))
    for step in itertools.count(first):
        row = step - first
        if (until is None and row == rows) or (until is not None and os.path.exists(until)):
            return
        row %= rows
        values = {name: column[row] for name, column in series.items() if row < len(column) and column[row] is not None}
        session.log(values, step=step)
        session.emit(Event(EventKind.BEFORE_UPDATE, step))
        session.emit(Event(EventKind.STEP_END, step))
        if session.stop.request is not None:
            return
        if pause:
            time.sleep(pause)


def run(
    series: Mapping[str, Sequence[Any]],
    *,
    rules: Any = None,
    pause: float = 0.0,
    until: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One whole session; returns its report."""
    columns = {name: [None if v is None else float(v) for v in column] for name, column in series.items()}
    session = open_session(target=options.pop("target", "train.py"), rules=rules or RULES, **options)
    play(session, columns, pause=pause, until=until)
    return session.finish(Ending())


def main() -> int:
    spec = json.loads(sys.argv[1])
    code = spec.pop("before", "")
    exec(code)
    report = run(**spec)
    return int(report["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
