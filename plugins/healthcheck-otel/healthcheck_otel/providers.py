"""Where telemetry goes: the script's own providers, which are never replaced or shut down, else our own over OTLP/HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


class Theirs(NamedTuple):
    """Providers that the script has set; None where it has not."""

    meter: Any = None
    tracer: Any = None
    logger: Any = None


def endpoint_is_set() -> bool:
    return any(os.environ.get(name) for name in ENDPOINTS)


def of_the_script() -> Theirs:
    """Asked without importing anything: a script that has set a provider has imported its module."""
    if "opentelemetry" not in sys.modules:
        return Theirs()
    return Theirs(
        _real("opentelemetry.metrics", "get_meter_provider"),
        _real("opentelemetry.trace", "get_tracer_provider"),
        _real("opentelemetry._logs", "get_logger_provider"),
    )


def _real(module: str, function: str) -> Any:
    loaded = sys.modules.get(module)
    provider = getattr(loaded, function)() if loaded is not None else None
    # What the API hands out before somebody has set one is a proxy, or does nothing.
    return None if provider is None or type(provider).__name__.lstrip("_").startswith(("Proxy", "NoOp")) else provider


@dataclass(slots=True)
class Providers:
    """One provider for each signal, and what of it is our own to flush and shut down."""

    meter: Any
    tracer: Any
    logger: Any
    own: list[Any] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)
    """Numbers of alerts that the collector has taken; only our own exporter knows."""
    asks_collector: bool = False
    """Whether :attr:`confirmed` is kept: alerts go through our own exporter."""
    last_failure: list[str] = field(default_factory=list)

    @classmethod
    def beside(cls, theirs: Theirs, every: float, run: str) -> Providers:
        """The script's providers, and our own for the signals that it has none for."""
        made = cls(*theirs)
        if all(theirs):
            return made
        from opentelemetry.sdk.resources import Resource

        name = os.environ.get("OTEL_SERVICE_NAME") or "healthcheck"
        resource = Resource.create({"service.name": name, "healthcheck.run.name": run})
        if made.meter is None:
            made.meter = _meter_provider(resource, every)
            made.own.append(made.meter)
        if made.tracer is None:
            made.tracer = _tracer_provider(resource)
            made.own.append(made.tracer)
        if made.logger is None:
            made.logger = _logger_provider(resource, made)
            made.own.append(made.logger)
            made.asks_collector = True
        return made


def _meter_provider(resource: Any, every: float) -> Any:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter(), export_interval_millis=every * 1000)
    # The SDK's own shutdown at exit waits half a minute for a collector that hangs; ours has a bound.
    return MeterProvider([reader], resource, shutdown_on_exit=False)


def _tracer_provider(resource: Any) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _logger_provider(resource: Any, made: Providers) -> Any:
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    exporter = OTLPLogExporter()
    exporter.export = _confirming(exporter.export, made)  # type: ignore[method-assign]
    provider = LoggerProvider(resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter, schedule_delay_millis=1000))
    return provider


def _confirming(export: Callable[..., Any], made: Providers) -> Callable[..., Any]:
    """An export that notes which alerts arrived."""

    def confirming(batch: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        result = export(batch, *args, **kwargs)
        if getattr(result, "name", "") == "SUCCESS":
            for record in batch:
                attributes = getattr(record.log_record, "attributes", None) or {}
                made.confirmed.add(int(attributes.get("healthcheck.alert.number", 0)))
        else:
            made.last_failure[:] = ["the collector did not take them"]
        return result

    return confirming
