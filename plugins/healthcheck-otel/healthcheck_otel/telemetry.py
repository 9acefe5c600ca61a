"""Samples as gauges, alerts as events, a run as a span."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck import Alert, Sample, Session, __version__

from healthcheck_otel.providers import Providers

UCUM = {"bytes": "By", "s": "s", "fraction": "1", "1/s": "1/s", "/s": "1/s"}
"""Our units in the Unified Code for Units of Measure, which OpenTelemetry asks for; others have none."""
LEFT_OUT = frozenset({"parameter", "name", "module", "layer"})
"""Labels that would make a series for each tensor of a model: families with them are not exported."""
MOST_SERIES = 500
Key = tuple[tuple[str, str], ...]


class Telemetry:
    """What one session sends. ``take`` and ``alert`` only note; the SDK's threads export."""

    def __init__(self, session: Session, providers: Providers) -> None:
        self._session = session
        self._providers = providers
        self._meter = providers.meter.get_meter("healthcheck", __version__)
        self._latest: dict[str, dict[Key, float]] = {}
        self._series = 0
        self._pending: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._deadline: float | None = None
        self._flushes: list[threading.Thread] = []
        self._rank = str(session.info.rank)
        self._alerts = self._meter.create_counter("healthcheck.alerts", "{alert}", "Alerts by rule and severity.")
        self._speaks = session.info.speaks
        self._span: Any = None
        if self._speaks:
            self._logger = providers.logger.get_logger("healthcheck", __version__)
            tracer = providers.tracer.get_tracer("healthcheck", __version__)
            self._span = tracer.start_span("healthcheck.run", attributes={"healthcheck.run.name": session.info.target})

    def take(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep the newest value of each series; the exporter's thread reads them at its own pace."""
        for sample in samples:
            known = self._latest.get(sample.metric)
            if known is None:
                known = self._new(sample.metric)
            key = (*sample.labels, ("phase", sample.phase))
            if key not in known:
                if self._series >= MOST_SERIES or any(name in LEFT_OUT for name, _ in sample.labels):
                    continue
                self._series += 1
            known[key] = sample.value
        self._latest.setdefault("step", {})[()] = step

    def _new(self, metric: str) -> dict[Key, float]:
        values: dict[Key, float] = {}
        self._latest[metric] = values
        unit = UCUM.get(self._session.units.get(metric, ""), "")
        self._meter.create_observable_gauge(f"healthcheck.{metric}", [self._reader(values)], unit)
        return values

    def _reader(self, values: Mapping[Key, float]) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation

        def read(options: Any) -> Iterable[Any]:
            if self._closed:  # the script's own provider lives on; these values do not
                return []
            return [Observation(value, {**dict(key), "rank": self._rank}) for key, value in [*values.items()]]

        return read

    def alert(self, alert: Alert) -> None:
        """A log record with a name, which is what OpenTelemetry calls an event, and the same on the run's span."""
        severity = str(alert.severity)
        self._alerts.add(1, {"rule": alert.rule, "severity": severity, "rank": self._rank})
        if not self._speaks:
            return
        from opentelemetry._logs import LogRecord, SeverityNumber

        numbers = {"info": SeverityNumber.INFO, "warning": SeverityNumber.WARN, "error": SeverityNumber.ERROR}
        attributes = {
            "healthcheck.alert.number": alert.number,
            "healthcheck.run.name": self._session.info.target,
            "healthcheck.rule": alert.rule,
            "healthcheck.cause": alert.cause,
            "healthcheck.step": alert.fired_step,
            "healthcheck.rank": alert.rank,
            "healthcheck.hint": alert.hint,
            "healthcheck.where": alert.where,
        }
        self._pending[alert.number] = {"rule": alert.rule, "cause": alert.cause, "step": alert.fired_step}
        now = time.time_ns()
        self._logger.emit(
            LogRecord(
                timestamp=now,
                observed_timestamp=now,
                severity_text=severity.upper(),
                severity_number=numbers[severity],
                body=alert.message,
                attributes=attributes,
                event_name="healthcheck.alert",
            )
        )
        self._span.add_event("healthcheck.alert", {**attributes, "healthcheck.message": alert.message})

    def begin_closing(self, within: float) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + within
            self._flush(lambda provider: provider.force_flush(int(within * 1000)))

    def close(self, report: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Ends the span and waits for the collector, but not beyond the end that was set; alerts that it did not take, and why."""
        self.begin_closing(4.0)
        assert self._deadline is not None
        self._end_span(report)
        self._flush(lambda provider: (provider.force_flush(4000), provider.shutdown()))
        least = time.monotonic() + 0.5  # the span has only just ended
        for thread in self._flushes:
            thread.join(max(0.0, max(self._deadline, least) - time.monotonic()))
        self._closed = True
        if not self._providers.asks_collector:  # the script's own exporter, of which nothing is known here
            return [], ""
        lost = [what for number, what in self._pending.items() if number not in self._providers.confirmed]
        failures = self._providers.last_failure
        return lost, (failures[-1] if failures else "no answer before the end of the run") if lost else ""

    def _end_span(self, report: Mapping[str, Any]) -> None:
        if self._span is None:
            return
        for name in ("verdict", "exit_code", "steps"):
            if report.get(name) is not None:
                self._span.set_attribute(f"healthcheck.run.{name}", report[name])
        if report.get("verdict") == "failed":
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, str(report.get("exit_words") or "")))
        self._span.end()

    def _flush(self, how: Callable[[Any], Any]) -> None:
        """In daemon threads: a collector that hangs is not waited for."""

        def work(provider: Any) -> None:
            try:
                how(provider)
            except Exception:
                self._providers.last_failure[:] = ["the SDK could not flush"]

        for provider in self._providers.own:
            thread = threading.Thread(target=work, args=(provider,), name="healthcheck-otel-flush", daemon=True)
            thread.start()
            self._flushes.append(thread)
