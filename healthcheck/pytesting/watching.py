"""One watched test: what it asks for, its session, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from healthcheck.core.errors import HealthCheckError, HealthCheckFailed, StopTraining
from healthcheck.core.samples import Sample, series_name
from healthcheck.core.text import one_line, suggest, visible
from healthcheck.pytesting.failure import block, complaint, failure_of, longrepr, shown
from healthcheck.pytesting.reference import Measures, compare
from healthcheck.run.ending import Ending

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import pytest

    from healthcheck.core.alerts import Alert
    from healthcheck.run.session import Session

MARKER = "healthcheck"


@dataclass(slots=True)
class Wanted:
    """Arguments of ``@pytest.mark.healthcheck``; unset ones come from the command line, then the ini file."""

    rules: Any = None
    """Path (from the test's folder, else the root folder), pack, dict, YAML text, or a list of these."""
    profile: str | None = None
    fail_on: str | None = None
    max_steps: int | None = None
    """Training ends after so many steps."""
    observe: bool = False
    off: Sequence[str] = ()
    only: Sequence[str] = ()
    set: Sequence[str] = ()
    mute: Sequence[str] = ()
    plugins: Sequence[str] = ()
    metrics: Sequence[str] = ()
    """Metrics to collect for ``healthcheck.series`` beside those that rules ask for."""
    settings: dict[str, Any] = field(default_factory=dict)
    reference: Any = None
    """Measures to compare with the reference file; see :mod:`healthcheck.pytesting.reference`."""


def wanted_by(item: pytest.Item) -> Wanted:
    """The options of one test. Raises ``HealthCheckFailed`` for a marker that cannot be read."""
    given: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARKER))):  # the closest wins
        if mark.args:
            raise HealthCheckFailed(
                f"@pytest.mark.healthcheck takes keywords only, not {mark.args[0]!r}; write rules={mark.args[0]!r}"
            )
        given |= mark.kwargs
    known = Wanted.__dataclass_fields__
    for name in given:
        if name not in known:
            hint = suggest(name, known)
            raise HealthCheckFailed(
                f'@pytest.mark.healthcheck has no argument "{name}"; {hint + " " if hint else ""}there are: {", ".join(known)}'
            )
    wanted = Wanted(**given)
    config = item.config
    if wanted.rules is not None:
        wanted.rules = _near(wanted.rules, [item.path.parent, config.rootpath])
    elif config.getoption("healthcheck_rules"):
        wanted.rules = _near(config.getoption("healthcheck_rules"), [config.invocation_params.dir])
    elif config.getini("healthcheck_rules"):
        wanted.rules = _near(config.getini("healthcheck_rules"), [config.rootpath])
    for name in ("profile", "fail_on"):
        if getattr(wanted, name) is None:
            setattr(
                wanted, name, config.getoption(f"healthcheck_{name}") or config.getini(f"healthcheck_{name}") or None
            )
    wanted.plugins = [*config.getoption("healthcheck_plugin"), *_listed(wanted.plugins)]
    for name in ("off", "only", "set", "mute", "metrics"):
        setattr(wanted, name, _listed(getattr(wanted, name)))
    return wanted


def runs_setting(config: pytest.Config) -> dict[str, Any]:
    """Where records of tests go: ``HEALTHCHECK_RUNS``, else pytest's cache folder, which git ignores already."""
    cache = getattr(config, "cache", None)
    if os.environ.get("HEALTHCHECK_RUNS") or cache is None:
        return {}
    return {"runs": str(cache.mkdir("healthcheck")), "keep": 100}


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _near(rules: Any, folders: Sequence[Path]) -> Any:
    """Relative paths as those files that exist beside the test, else below the root."""
    if isinstance(rules, (list, tuple)):
        return [_near(entry, folders) for entry in rules]
    if isinstance(rules, Path) or (isinstance(rules, str) and rules.endswith((".yaml", ".yml")) and "\n" not in rules):
        for folder in folders:
            if (folder / rules).is_file():
                return str(folder / rules)
    return str(rules) if isinstance(rules, Path) else rules


# --------------------------------------------------------------------------------------------------
# Watching one test: whatever trains in its body, unmodified, is judged; afterwards all is as before.


__all__ = ["REPORT", "WATCHED", "HealthCheckFailed", "Watched", "longrepr", "watch_call"]


WATCHED = pytest.StashKey["Watched"]()
REPORT = pytest.StashKey[dict[str, Any]]()
"""What travels with the test's report to the process that prints the summary."""
MOST_VALUES = 100_000
"""Values kept of one series."""


class Watched:
    """The fixture ``healthcheck``: what the watch of this test sees, while it sees it.

    A test that takes the fixture is watched, with or without the marker.
    """

    name = "pytest"

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.notes: list[str] = []
        self.reference_wanted: dict[str, Any] = {}
        self.measures = Measures()
        self._session: Session | None = None
        self._values: dict[str, list[tuple[int, float]]] = {}

    # -- for tests ----------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session that watches this test. Raises ``HealthCheckFailed`` outside the test's body."""
        if self._session is None:
            raise HealthCheckFailed(
                "nothing is watched yet: a test is watched from the start of its body (or HEALTHCHECK=off)"
            )
        return self._session

    @property
    def alerts(self) -> list[Alert]:
        """Alerts so far, oldest first."""
        return list(self.session.alerts)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.session.step

    def series(self, name: str) -> list[float]:
        """All values of a series: ``healthcheck.series("loss")``.

        Raises ``KeyError`` for one that nothing collects; the message says how to have it collected.
        """
        return [value for _, value in self.history(name)]

    def history(self, name: str) -> list[tuple[int, float]]:
        """The same with steps: ``[(1, 2.3), (2, 2.2), ...]``."""
        found = self._values.get(name)
        if found is None:
            near = suggest(name, self._values)
            raise KeyError(
                f'no sample of "{name}"; {near + " " if near else ""}collected: {one_line(", ".join(self._values), 200)}. '
                f'Only what rules ask for is collected: add it with @pytest.mark.healthcheck(metrics=["{name}"])'
            )
        return list(found)

    def log(self, **metrics: Any) -> None:
        """Feed metrics of your own to the watch."""
        self.session.log(metrics)

    def on(self, event: str, function: Callable[..., Any]) -> Callable[[], None]:
        """Call a function at every such event; returns its remover."""
        return self.session.on(event, function)

    def muted(self, rule: str, *, reason: str) -> AbstractContextManager[None]:
        """Inside this block a rule (or glob) is judged, but does not fail the test."""
        return self.session.muted(rule, reason=reason)

    @contextlib.contextmanager
    def limit(self, steps: int) -> Iterator[None]:
        """Training inside this block ends after so many steps, and the test goes on after the block."""
        session = self.session
        session.stop.most_steps = session.step + steps
        try:
            yield
        except StopTraining as stop:
            if stop.rule:
                raise

    def reference(self, **tolerances: Any) -> None:
        """Compare ``final_loss``, ``throughput`` or ``peak_memory`` with the reference file after the test.

        :param tolerances: for each measure how much worse it may be, such as ``final_loss="5%"``;
            None takes the tolerance of the file, else the usual one.
        """
        self.reference_wanted |= tolerances

    # -- as a report of the session -------------------------------------------------------

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            name = sample.metric if not sample.labels else series_name(sample.metric, sample.labels)
            kept = self._values.setdefault(name, [])
            if len(kept) < MOST_VALUES:
                kept.append((sample.step, sample.value))

    def note(self, text: str) -> None:
        self.notes.append(text)

    # -- for the plugin -------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        self._session = session
        self.notes += session.info.notes
        session.add_report(self)
        self.measures.start(session)

    def losses(self) -> list[float]:
        return [value for _, value in self._values.get("loss", [])]


def watch_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Round the body of one test. Raises ``HealthCheckFailed`` where the rules say so."""
    from healthcheck.instrument.script import InProcess
    from healthcheck.run.opening import switched_off

    if switched_off():
        return (yield)
    watched = item.stash.setdefault(WATCHED, Watched(item.nodeid))
    wanted = wanted_by(item)
    _forget_former_models()
    try:
        session = _open(item, wanted)
        process = InProcess(session)
    except HealthCheckError as mistake:
        raise HealthCheckFailed(complaint(mistake)) from None
    error: BaseException | None = None
    result = None
    try:
        with process:
            watched.begin(session)
            try:
                result = yield
            except BaseException as raised:
                error = raised
    except HealthCheckError as refused:
        session.finish(Ending())
        raise HealthCheckFailed(complaint(refused)) from None
    ended_early = process.stopped_by(error)
    if ended_early:
        error = None
    report = session.finish(_ending(error))
    stop = report.get("stop") or {}
    if ended_early and not stop.get("rule"):
        watched.note(f"training was ended as asked ({stop.get('reason', '')}); code of the test after it did not run")
    failure = failure_of(session, report) if error is None else None
    _attach(item, watched, session, report, shown_already=failure is not None)
    if error is not None:
        raise error
    if failure is None and (wanted.reference or watched.reference_wanted):
        asked = (wanted.reference, watched.reference_wanted)
        values = watched.measures.values(watched.losses())
        failure = compare(item, asked, values, note=watched.note, left=item.stash[REPORT])
    if failure is not None:
        raise failure
    return result


def _open(item: pytest.Item, wanted: Wanted) -> Session:
    from healthcheck.assembly import open_session
    from healthcheck.run.opening import SessionOptions

    return open_session(
        SessionOptions(
            name=item.nodeid,
            rules=wanted.rules,
            profile=wanted.profile,
            off=wanted.off,
            only=wanted.only,
            set=wanted.set,
            mute=wanted.mute,
            plugins=wanted.plugins,
            observe=wanted.observe or None,
            fail_on=wanted.fail_on,
            max_steps=wanted.max_steps,
            settings={**runs_setting(item.config), **wanted.settings},
            metrics=["loss", *wanted.metrics],
            console=False,
        )
    )


def _ending(error: BaseException | None) -> Ending:
    if isinstance(error, KeyboardInterrupt):
        return Ending(interrupted=True)
    return Ending(exception=error) if isinstance(error, Exception) else Ending()  # skip and xfail are no errors


def _forget_former_models() -> None:
    """Models of a test that failed live on in its traceback; they are no part of this one."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest itself drops them a moment later
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()


def _attach(
    item: pytest.Item, watched: Watched, session: Session, report: dict[str, Any], *, shown_already: bool
) -> None:
    """The report section, the facts for JUnit, and what the summary at the end needs.

    :param shown_already: the failure itself shows the alerts already.
    """
    from healthcheck.reports.wording import closing_block, judged_line, verdict_word

    lines = list(watched.notes)
    for alert in session.alerts:
        if not alert.explained_by and not shown_already:
            lines += block(session, alert, report)
    record = shown(session.info.run_dir) if session.info.run_dir is not None else ""
    lines += closing_block(report, record, named=record)
    item.add_report_section("call", "healthcheck", "\n".join(map(visible, lines)))
    alerts = [f"{a.rule}@{a.fired_step}" for a in session.alerts]
    facts = {
        "verdict": verdict_word(report),
        "steps": report["steps"],
        "counts": judged_line(report["rules"]),
        "alerts": ", ".join(alerts) or "none",
    }
    item.user_properties += [(f"healthcheck_{name}", str(value)) for name, value in facts.items()]
    item.stash[REPORT] = {"nodeid": item.nodeid, "facts": facts, "report": report}
