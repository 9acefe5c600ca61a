"""What healthcheck sees of healthcheck-otel: settings, and hooks that hear of samples, alerts and the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from healthcheck import Alert, Event, Sample, Session, Setting, hookimpl

from healthcheck_otel.providers import Providers, endpoint_is_set, of_the_script
from healthcheck_otel.telemetry import Telemetry

SETTINGS = (
    Setting(
        "otel.export",
        "auto",
        "auto: through the script's own providers, else over OTLP/HTTP where OTEL_EXPORTER_OTLP_ENDPOINT is set."
        " otlp: over OTLP/HTTP where the script has no providers. off: nothing.",
        {"enum": ["auto", "otlp", "off", False]},
        lambda value: value or "off",
    ),
    Setting(
        "otel.every",
        15.0,
        "Seconds between two exports of metrics over OTLP/HTTP.",
        {"type": "number", "minimum": 0.1, "maximum": 3600},
        float,
    ),
)
LAST_SECONDS = 4.0
"""What the end of a run waits at most."""


class Plugin:
    """One for each session. Metrics of every rank, each with its ``rank``; alerts and the run's span of the rank that speaks."""

    def __init__(self) -> None:
        self.telemetry: Telemetry | None = None

    @hookimpl
    def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
        """``settings: {otel.export: otlp}``."""
        for setting in SETTINGS:
            register(setting)

    @hookimpl
    def healthcheck_train_start(self, session: Session, event: Event) -> None:
        """Here the script has set its own providers, if it has any."""
        export = session.settings.get("otel.export", "auto")
        if export == "off" or self.telemetry is not None:
            return
        theirs = of_the_script()
        if not any(theirs) and export == "auto" and not endpoint_is_set():
            return
        providers = Providers.beside(theirs, float(session.settings.get("otel.every", 15.0)), session.info.target)
        self.telemetry = Telemetry(session, providers)

    @hookimpl
    def healthcheck_samples(self, session: Session, step: int, samples: Sequence[Sample]) -> None:
        if self.telemetry is not None:
            self.telemetry.take(step, samples)

    @hookimpl
    def healthcheck_alert(self, session: Session, alert: Alert) -> None:
        held = alert.repeat or alert.muted or alert.accepted or alert.explained_by
        if self.telemetry is not None and not held:
            self.telemetry.alert(alert)

    @hookimpl
    def healthcheck_train_end(self, session: Session, event: Event) -> None:
        if self.telemetry is not None:
            self.telemetry.begin_closing(LAST_SECONDS)

    @hookimpl
    def healthcheck_report_section(self, session: Session, report: dict[str, Any]) -> None:
        """``otel``: alerts that the collector did not confirm."""
        if self.telemetry is None:
            return
        lost, why = self.telemetry.close(report)
        report["otel"] = {"undelivered": lost, "problem": why}
        if lost:
            named = ", ".join(f"{one['rule']} at step {one['step']}" for one in lost[:5])
            session.note(f"otel: not delivered: {named} ({why})")
