"""What healthcheck sees of healthcheck-prometheus: settings, and a report that keeps the newest values."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck import Report, Setting, hookimpl

from healthcheck_prometheus.exporter import Exporter

SETTINGS = (
    Setting(
        "prometheus.port",
        0,
        "Port of the exporter on the first local rank, one higher on each further one. 0: no exporter.",
        {"type": "integer", "minimum": 0, "maximum": 65000},
        int,
    ),
    Setting("prometheus.address", "127.0.0.1", "Address on which the exporter listens.", {"type": "string"}),
    Setting(
        "prometheus.textfile",
        "",
        "File for the textfile collector of node_exporter, such as /var/lib/node_exporter/training.prom.",
        {"type": "string", "pattern": r"^($|.*\.prom$)", "errorMessage": "expected a path that ends with .prom"},
    ),
    Setting(
        "prometheus.every",
        15.0,
        "Seconds between two writes of the text file.",
        {"type": "number", "minimum": 0.1, "maximum": 3600},
        float,
    ),
)


class Plugin:
    """One for each session."""

    def __init__(self) -> None:
        self.exporter = Exporter()

    @hookimpl
    def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
        """``settings: {prometheus.port: 9400}``."""
        for setting in SETTINGS:
            register(setting)

    @hookimpl
    def healthcheck_register_reports(self, register: Callable[[Report], None]) -> None:
        register(self.exporter)
