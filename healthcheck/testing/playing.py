"""Numbers through rules: ``play("team.yaml", {"loss": "2.3 x10, nan"})``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.core.clock import VirtualClock
from healthcheck.core.events import EventKind
from healthcheck.testing.fake import FakeTrainer, log_series, series_of

if TYPE_CHECKING:
    from healthcheck.core.alerts import Alert
    from healthcheck.run.session import Session

Series = Mapping[str, "str | Sequence[float | None]"]


@dataclass(slots=True)
class Played:
    """What came of played numbers."""

    session: Session
    trainer: FakeTrainer | None
    steps: int
    """Steps that were played: fewer than the series have if a rule stopped."""
    report: dict[str, Any]
    """Content of ``report.json``; empty where the session goes on (played into a fixture or a live session)."""

    @property
    def alerts(self) -> list[Alert]:
        return list(self.session.alerts)

    @property
    def fired(self) -> dict[str, list[int]]:
        """Rule -> steps at which its episodes began; ``rule.cause`` -> steps at which that cause fired first in each."""
        found: dict[str, list[int]] = {}
        for alert in self.session.alerts:
            found.setdefault(alert.rule, []).append(alert.fired_step)
            for name, finding in zip(alert.names, alert.findings, strict=True):
                if finding.cause:
                    found.setdefault(name, []).append(finding.fired_step)
        return found

    @property
    def exit_code(self) -> int:
        return int(self.report["exit_code"])

    def verdict(self, rule: str) -> str:
        """How a rule, or a cause as ``rule.cause``, ended: ``failed``, ``warned``, ``ok``, ``partly judged``,
        ``not judged`` or ``does not apply``. Raises ``KeyError`` for an unknown one.
        """
        rule_id, _, cause = rule.partition(".")
        entry = self.report["rules"][rule_id]
        return str((entry["causes"][cause] if cause else entry)["verdict"])


def open_test_session(
    rules: Any = None, *, plugins: Sequence[object] = (), clock: Any = None, **options: Any
) -> Session:
    """A real session that prints nothing, writes nothing and whose clock is moved by the test.

    :param rules: path, pack, dict, YAML text, or a list of these; None: no rules at all.
    :param plugins: local plugins by path or module name, as ``-p`` takes them.
    :param options: of :func:`healthcheck.open_session`.

    Raises ``RuleFileError`` with all mistakes of the rules.
    """
    from healthcheck.assembly import open_session

    given = {"console": False, "record": False, "target": "test", **options}
    chosen = {"version": 1, "rules": {}} if rules is None else rules
    return open_session(rules=chosen, plugins=[str(p) for p in plugins], clock=clock or VirtualClock(), **given)


def play(target: Any, series: Series, *, step_time: float = 1.0, seed: str = "play", **options: Any) -> Played:
    """Play series step by step.

    :param target: rules (path, pack, dict, YAML text, list), which get a session of their own and a
        report; or something with a session (the fixture ``healthcheck``, a ``Loop``, a session), which goes on.
    :param series: name -> numbers, None for a step without a sample, or the notation of rule tests
        (``"2.0~0.05 x300, 9.0 x5, nan, _ x3"``). A name may carry labels, as messages and rule tests write them:
        ``grad_norm[encoder.weight]`` (a parameter), ``lr[group=1]``, ``loss[optimizer=1]``, ``time.step[rank=2]``.
    :param step_time: seconds of virtual time per step.
    :param seed: of the noise; the name of the series is added to it.
    :param options: of :func:`open_test_session`.

    Raises ``RuleFileError`` for mistakes in rules, ``ValueError`` for a series that cannot be read.
    """
    columns = {name: _numbers(name, given, seed) for name, given in series.items()}
    length = max((len(column) for column in columns.values()), default=0)
    session = _session_of(target)
    if session is not None:
        return Played(session, None, _feed(session, columns, length), {})
    clock = VirtualClock()
    session = open_test_session(target, clock=clock, **options)
    trainer = FakeTrainer(session)
    steps = 0
    for row in range(length):
        clock.advance(step_time)
        steps += 1
        values = _row(columns, row)
        # The plain loss comes the way that a loop shows it, everything else as if a probe or the script had given it.
        if not trainer.train_step(values.pop("loss", None), log=values):
            break
    return Played(session, trainer, steps, trainer.finish())


def _row(columns: Mapping[str, Sequence[float | None]], row: int) -> dict[str, float]:
    there = ((name, column[row]) for name, column in columns.items() if row < len(column))
    return {name: value for name, value in there if value is not None}


def _feed(session: Session, columns: Mapping[str, Sequence[float | None]], length: int) -> int:
    """Into a session that has its trainer already: samples and the two judging events of each step."""
    from healthcheck.core.events import Event

    for row in range(length):
        step = session.step + 1
        log_series(session, _row(columns, row), step)
        session.emit(Event(EventKind.BEFORE_UPDATE, step))
        session.emit(Event(EventKind.STEP_END, step))
        if session.stop.request is not None:
            return row + 1
    return length


def _session_of(target: Any) -> Session | None:
    from healthcheck.run.session import Session

    found = target if isinstance(target, Session) else getattr(target, "session", None)
    return found if isinstance(found, Session) else None


def _numbers(name: str, given: str | Sequence[float | None], seed: str) -> Sequence[float | None]:
    from healthcheck.ruletests.notation import NotationError, expand, parse_series

    series_of(name)  # raises for a name that cannot be read
    if not isinstance(given, str):
        return [None if value is None else float(value) for value in given]
    try:
        made = expand(parse_series(given), f"{seed}/{name}")
    except NotationError as error:
        hint = f"; {error.suggestion}" if error.suggestion else ""
        raise ValueError(f"series {name}: {error}{hint}") from None
    if made.gaps:
        raise ValueError(f"series {name}: time passes by step_time here; `gap` is for rule tests (*.hctest.yaml)")
    return made.values
