"""What healthcheck sees of healthcheck-nvml: a probe, a setting and a rule pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from healthcheck import Probe, Session, Setting, hookimpl

from healthcheck_nvml.probe import NvmlProbe

PACK = Path(__file__).parent / "packs" / "cards.yaml"

EVERY = Setting(
    "nvml.every",
    1.0,
    "Seconds between two readings of the card, in a thread of its own.",
    {"type": "number", "minimum": 0.05, "maximum": 3600},
    float,
)


class Plugin:
    """One for each session: a class as entry point is called once for each."""

    def __init__(self) -> None:
        self.probe = NvmlProbe()

    @hookimpl
    def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
        """``settings: {nvml.every: 0.5}``."""
        register(EVERY)

    @hookimpl
    def healthcheck_register_probes(self, register: Callable[[Probe], None]) -> None:
        """Metrics ``nvml.*``."""
        register(self.probe)

    @hookimpl
    def healthcheck_register_rulepacks(self, register: Callable[[str, str], None]) -> None:
        """Pack ``extends: ["nvml:cards"]``."""
        register("cards", str(PACK))

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        self.probe.every = float(session.settings.get(EVERY.name, EVERY.default))
