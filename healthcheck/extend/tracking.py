"""What plugins for experiment trackers have in common: samples under a prefix, alerts as alerts, evidence as files.

A plugin for another tracker is a class with a few methods that are called in a thread of its own::

    class Plugin(healthcheck.Tracker):
        name = "mytracker"

        def open(self, session):  # once, at the first step; what it returns says where things go
            import sys

            self.run = getattr(sys.modules.get("mytracker"), "run", None)
            return "the script's run" if self.run is not None else ""

        def log(self, rows):
            for step, values in rows:
                self.run.log(values, step=step)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from healthcheck.core.alerts import Alert
from healthcheck.core.events import Event
from healthcheck.core.protocols import Session
from healthcheck.core.samples import Sample
from healthcheck.core.setting import Setting
from healthcheck.extend.background import BackgroundSender
from healthcheck.extend.hookspecs import hookimpl

ROWS, SECONDS = 64, 2.0
"""Steps, and seconds, after which samples are handed to the thread."""
LAST_SECONDS = 4.0
"""What the end of a run waits at most."""
PER_TENSOR = frozenset({"parameter", "module", "layer"})
"""Labels of families with a series for each tensor: trackers do not get them."""

Rows = Sequence[tuple[int, Mapping[str, float]]]
"""``(step, {name: value})`` in the order of the steps."""


class TrackedAlert(NamedTuple):
    """An alert as trackers are given it: plain values that do not change any more."""

    number: int
    rule: str
    cause: str
    severity: str
    """``info``, ``warning``, ``error``."""
    step: int
    title: str
    """``loss-not-finite at step 12``."""
    text: str
    """Message, place and hint, a line each."""
    evidence: str
    """Folder with what was kept for it; empty where nothing was."""


class Tracker:
    """Base of a plugin that sends samples and alerts to an experiment tracker, on the rank that speaks for the job.

    ``open`` runs in the training's thread at the first step. ``log``, ``alert``, ``artifact`` and ``end`` run in another one,
    which no step waits for, and may take their time; at the end of the run they have four seconds. What was not delivered is
    named in ``report.json`` under the plugin's name. Settings: ``NAME.use`` (auto, off) and ``NAME.prefix``.
    """

    name: str = ""
    """That of the plugin, which its settings and its section in the report have, too."""

    def __init__(self) -> None:
        self.prefix = "healthcheck/"
        self.where = ""
        """What :meth:`open` returned."""
        self._sender: BackgroundSender[tuple[str, Any]] | None = None
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._since = 0.0
        self._names: dict[Any, str] = {}

    # -- what a plugin writes ------------------------------------------------------------

    def settings(self) -> Iterator[Setting]:
        """Settings beside ``use`` and ``prefix``."""
        return iter(())

    def open(self, session: Session) -> str:
        """Find the run that the script has open, or begin one. Returns where things go, in words; empty: nowhere."""
        raise NotImplementedError

    def log(self, rows: Rows) -> None:
        """Send samples."""
        raise NotImplementedError

    def alert(self, alert: TrackedAlert) -> None:
        """Send an alert, in the way of this tracker."""

    def artifact(self, alert: TrackedAlert, folder: Path) -> None:
        """Keep the evidence of an alert."""

    def end(self, report: Mapping[str, Any]) -> None:
        """The run is over: its verdict, its files. A run that the script has open is left open."""

    # -- what healthcheck calls ------------------------------------------------------------

    @hookimpl
    def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
        help = "auto: samples and alerts go to the run that the script has open, or that other settings ask for. off: nothing."
        register(
            Setting(f"{self.name}.use", "auto", help, {"enum": ["auto", "off", False]}, lambda value: value or "off")
        )
        schema = {"type": "string", "maxLength": 100}
        register(Setting(f"{self.name}.prefix", self.prefix, "Put before the names of all that is sent.", schema))
        for setting in self.settings():
            register(setting)

    @hookimpl
    def healthcheck_train_start(self, session: Session, event: Event) -> None:
        settings = session.settings
        if settings.get(f"{self.name}.use") == "off" or not session.info.speaks or self._sender is not None:
            return
        self.prefix = str(settings.get(f"{self.name}.prefix", self.prefix))
        self.where = self.open(session)
        if self.where:
            self._sender = BackgroundSender(self._send, name=f"healthcheck-{self.name}", capacity=2000)

    @hookimpl
    def healthcheck_samples(self, session: Session, step: int, samples: Sequence[Sample]) -> None:
        if self._sender is None:
            return
        row: dict[str, float] = {}
        for sample in samples:
            key = (sample.metric, sample.labels, sample.phase)
            name = self._names.get(key)
            if name is None:
                name = self._names[key] = self._named(sample)
            if name:
                row[name] = float(sample.value)
        if not row:
            return
        now = time.monotonic()
        if self._rows and self._rows[-1][0] == step:
            self._rows[-1][1].update(row)
        else:
            self._since = self._since if self._rows else now
            self._rows.append((step, row))
        if len(self._rows) >= ROWS or now - self._since >= SECONDS:
            self._hand_over()

    @hookimpl
    def healthcheck_alert(self, session: Session, alert: Alert) -> None:
        if self._sender is not None and not (alert.repeat or alert.muted or alert.accepted or alert.explained_by):
            self._hand_over()
            self._sender.put(("alert", _tracked(alert)), important=True)

    @hookimpl
    def healthcheck_train_end(self, session: Session, event: Event) -> None:
        if self._sender is not None:
            self._hand_over()
            self._sender.begin_closing(LAST_SECONDS)

    @hookimpl
    def healthcheck_report_section(self, session: Session, report: dict[str, Any]) -> None:
        sender = self._sender
        if sender is None:
            return
        self._hand_over()
        sender.put(("end", {key: value for key, value in report.items() if key != self.name}), important=True)
        lost = sender.close(LAST_SECONDS)
        named = [item.title for (kind, item), _ in lost if kind == "alert"]
        reasons = list(dict.fromkeys(one.reason for one in lost))
        report[self.name] = {
            "where": self.where,
            "undelivered": named,
            "steps_lost": sum(len(item) for (kind, item), _ in lost if kind == "rows"),
            "problem": "; ".join(reasons),
            "dropped": sender.dropped,
        }
        if lost:
            what = ", ".join(named) or "some samples, or the verdict"
            session.note(f"{self.name}: not delivered: {what} ({'; '.join(reasons)})")

    # -- the thread ------------------------------------------------------------------------

    def _hand_over(self) -> None:
        if self._rows and self._sender is not None:
            self._sender.put(("rows", self._rows))
            self._rows = []

    def _send(self, items: Sequence[tuple[str, Any]]) -> None:
        for kind, item in items:
            if kind == "rows":
                self.log(item)
            elif kind == "end":
                self.end(item)
            else:
                self.alert(item)
                if item.evidence and Path(item.evidence).is_dir():
                    self.artifact(item, Path(item.evidence))

    def _named(self, sample: Sample) -> str:
        """``healthcheck/loss``, ``healthcheck/loss/optimizer_1``: characters that all trackers take. Empty: left out."""
        if any(name in PER_TENSOR for name, _ in sample.labels):
            return ""
        parts = [sample.metric, *(f"{name}_{value}" for name, value in sample.labels)]
        if sample.phase in ("eval", "test") and not sample.metric.startswith(("eval.", "val.", "test.")):
            parts.append(sample.phase)
        return self.prefix + "/".join("".join(c if c.isalnum() or c in "._-" else "_" for c in part) for part in parts)


def _tracked(alert: Alert) -> TrackedAlert:
    name = f"{alert.rule}: {alert.cause}" if alert.cause else alert.rule
    lines = [alert.message, f"at {alert.where}" if alert.where else "", f"try: {alert.hint}" if alert.hint else ""]
    folder = next((str(o.data.get("path", "")) for o in alert.actions if o.done and o.action == "evidence"), "")
    return TrackedAlert(
        number=alert.number,
        rule=alert.rule,
        cause=alert.cause,
        severity=str(alert.severity),
        step=alert.fired_step,
        title=f"{name} at step {alert.fired_step}",
        text="\n".join(line for line in lines if line),
        evidence=folder,
    )
