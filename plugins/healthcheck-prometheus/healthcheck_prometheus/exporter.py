"""The newest value of each series and the alerts that are open, for whoever scrapes, or as a text file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck import Alert, BackgroundSender, NotSent, Sample, Session

SUFFIX = {"bytes": "_bytes", "s": "_seconds", "fraction": "_ratio", "1/s": "_per_second", "/s": "_per_second"}
"""Base units in the name, as Prometheus asks for."""
PER_TENSOR = frozenset({"parameter", "module", "layer"})
MOST_SERIES = 500
"""Series of a process at most: labels are bounded whatever a run does."""
Key = tuple[str, tuple[tuple[str, str], ...]]


class Exporter:
    """Keeps values for Prometheus. Without a port and without a file it does nothing.

    Steps only write into a dictionary; the exporter's thread, or that of the file, reads it.
    """

    name = "prometheus.exporter"

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[str, dict[Key, float]]] = {}
        """Metric -> its name for Prometheus, and its newest values by phase and labels."""
        self._series = 0
        self._alerts: dict[tuple[str, str], list[int]] = {}
        """Rule and severity -> how many so far, and whether one is open."""
        self._facts: dict[str, float] = {"healthcheck_step": 0.0}
        self._usual: dict[str, str] = {}
        self._units: Mapping[str, str] = {}
        self._server: Any = None
        self._registry: Any = None
        self._writer: BackgroundSender[str] | None = None
        self._path = Path()
        self.samples: Callable[[int, Sequence[Sample]], None]

    def start(self, session: Session) -> None:
        settings = session.settings
        port, path = int(settings.get("prometheus.port") or 0), str(settings.get("prometheus.textfile") or "")
        if not port and not path:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        self._units = session.units
        self._usual = {"run": session.info.target, "rank": str(session.info.rank)}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.samples = self._take  # from now on: without it samples cost this report nothing
        if port:
            local = os.environ.get("LOCAL_RANK", "0")
            try:
                here = port + (int(local) if local.isdigit() else 0)
                self._server, _ = start_http_server(here, str(settings["prometheus.address"]), self._registry)
            except OSError as error:
                session.info.notes.append(f"prometheus: no exporter on port {here}: {error.strerror or error}")
        if path:
            target = Path(path) if not session.info.rank else Path(path).with_suffix(f".{session.info.rank}.prom")
            every = float(settings["prometheus.every"])
            self._path = target
            self._writer = BackgroundSender(
                lambda _: self._write(), name="healthcheck-prometheus", capacity=1, gap=every
            )

    def _take(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            known = self._gauges.get(sample.metric)
            if known is None:
                known = self._gauges[sample.metric] = (self._called(sample.metric), {})
            values, key = known[1], (sample.phase, sample.labels)
            if key not in values:
                if self._series >= MOST_SERIES or any(name in PER_TENSOR for name, _ in sample.labels):
                    continue
                self._series += 1
            values[key] = float(sample.value)
        self._facts["healthcheck_step"] = float(step)
        if self._writer is not None:
            self._writer.put("write")

    def _called(self, metric: str) -> str:
        plain = re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        suffix = SUFFIX.get(self._units.get(metric, ""), "")
        return f"healthcheck_{plain}" + ("" if plain.endswith(suffix) else suffix)

    # -- alerts and the end --------------------------------------------------------------

    def acted(self, alert: Alert) -> None:
        if alert.repeat or alert.muted or alert.accepted or alert.explained_by:
            return
        entry = self._alerts.setdefault((alert.rule, str(alert.severity)), [0, 0])
        entry[0] += 1
        entry[1] = 1

    def cleared(self, alert: Alert) -> None:
        for severity in ("info", "warning", "error"):
            entry = self._alerts.get((alert.rule, severity))
            if entry is not None:
                entry[1] = 0

    def finish(self, report: dict[str, Any]) -> None:
        self._facts["healthcheck_run_exit_code"] = float(report.get("exit_code") or 0)
        self._facts["healthcheck_run_over"] = 1.0
        if self._writer is not None:
            self._writer.put("write", important=True)
            self._writer.close(2.0)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    # -- what is read ----------------------------------------------------------------------

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        usual = list(self._usual)
        mine = list(self._usual.values())
        for metric, (called, known) in [*self._gauges.items()]:
            values = [*known.items()]
            if not values:
                continue
            # A name has one set of labels in Prometheus; who lacks one of them has it empty.
            names = sorted({name for (_, labels), _ in values for name, _ in labels} - {*usual, "phase"})
            family = GaugeMetricFamily(called, f"Newest value of {metric}.", labels=[*usual, "phase", *names])
            for (phase, labels), value in values:
                given = dict(labels)
                family.add_metric([*mine, phase, *(given.get(name, "") for name in names)], value)
            yield family
        counter = CounterMetricFamily("healthcheck_alerts", "Alerts so far.", labels=[*usual, "rule", "severity"])
        open_now = GaugeMetricFamily(
            "healthcheck_alert_open", "1 while a rule fires, else 0.", labels=[*usual, "rule", "severity"]
        )
        for (rule, severity), (count, is_open) in [*self._alerts.items()]:
            counter.add_metric([*mine, rule, severity], count)
            open_now.add_metric([*mine, rule, severity], is_open)
        yield counter
        yield open_now
        for name, value in [*self._facts.items()]:
            family = GaugeMetricFamily(name, FACTS[name], labels=usual)
            family.add_metric(mine, value)
            yield family

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(self._path), self._registry)  # under another name first: nobody reads half a file
        except OSError as error:
            raise NotSent(f"the text file cannot be written ({type(error).__name__})", again=False) from None


FACTS = {
    "healthcheck_step": "Newest step.",
    "healthcheck_run_exit_code": "Exit code of the run that is over.",
    "healthcheck_run_over": "1 once the run is over.",
}
