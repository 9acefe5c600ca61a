"""Memory of a Hugging Face run at every event: ``MemoryMonitoringCallback`` for those who know it by that name.

It is the ordinary callback with memory rules and metrics. Its events may also be called by hand, one
by one, with whatever a test has: nothing is raised.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from healthcheck.probes.memory import EPOCH_METRICS
from healthcheck.probes.memory_readings import TorchDevice
from healthcheck.run.errorlog import looks_like_memory
from healthcheck.trainers.huggingface.callback import HealthCheckCallback

if TYPE_CHECKING:
    from healthcheck.run.opening import SessionOptions
    from healthcheck.run.session import Session

logger = logging.getLogger(__name__)

_GB = 1024**3
EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_predict",
    "on_prediction_step",
    "on_save",
    "on_epoch_end",
    "on_train_end",
)

RULES: dict[str, Any] = {
    "version": 1,
    "rules": {
        "memory-high": {
            "metric": "memory.fraction",
            "when": {"above": 0.95},
            "for": 3,
            "severity": "warning",
            "then": ["warn", {"cleanup": {}}],
            "message": "memory in use is {value:.0%} of what there is",
        },
        "memory-epoch-growth": {
            "metric": "memory.epoch_delta",
            "when": {"above": "512MiB"},
            "severity": "warning",
            "then": ["warn", {"cleanup": {"cooldown": 0}}],
            "message": "memory grew by {value} bytes within an epoch",
        },
        "memory-step-growth": {
            "metric": "memory.step_growth",
            "when": {"above": "64MiB"},
            "for": "5 of 10",
            "severity": "warning",
            "then": ["warn"],
            "message": "memory grows within steps: {value} bytes in this one",
        },
    },
}
"""What the callback judges unless it is given rules: high, growing by epochs, leaking by steps."""


@dataclass
class EpochMemoryMetrics:
    """Memory of one epoch, in GiB."""

    epoch: int
    start_memory_gb: float
    end_memory_gb: float
    peak_memory_gb: float
    memory_delta_gb: float
    cleanup_count: int
    timestamp_start: datetime
    timestamp_end: datetime


@dataclass
class CallbackMemoryEvent:
    """Memory at one event."""

    event_type: str
    step: int
    epoch: int
    memory_status: dict[str, float]
    """``allocated_gb``, and ``reserved_gb`` and ``peak_gb`` where the device knows them."""
    timestamp: datetime
    additional_data: dict[str, Any] = field(default_factory=dict)


class MemoryMonitoringCallback(HealthCheckCallback):
    """Memory at every event and per epoch, judged by rules; see :data:`RULES`.

    :param memory_optimizer: object with ``cleanup_gpu_memory()``, called instead of our own cleanup
        after an error that looks like memory.
    :param logging_system: object with ``warning(message, component, data)``, called with errors here.
    :param options: as for :class:`HealthCheckCallback`.
    """

    def __init__(self, memory_optimizer: Any = None, logging_system: Any = None, **options: Any) -> None:
        super().__init__(
            options.pop("rules", RULES), metrics=(*EPOCH_METRICS, "memory.at[]", "memory.step_growth"), **options
        )
        self.watch.on_error = self._handle_callback_error
        self.watch.only_its_own = self.watch.options.rules is RULES
        self.watch.rules_beside = self._rules_beside
        self.memory_optimizer = memory_optimizer
        self.logging_system = logging_system
        self.step_count = 0
        self.epoch_count = 0
        self.memory_history: list[CallbackMemoryEvent] = []
        """The last thousand events; the record has them all as ``memory.at[event=...]``."""
        self.epoch_memory_history: list[EpochMemoryMetrics] = []
        self.callback_errors: list[tuple[str, BaseException, datetime]] = []
        self.epoch_start_memory: float | None = None
        self.last_cleanup_step = -1
        self._device = TorchDevice()

    def _rules_beside(self, session: Session) -> SessionOptions:
        """Its rules under other ids than those that the session has: both are judged."""
        options = self.watch.options
        if options.rules is RULES and options is not session.layers.opened_with:
            known = {rule.id for rule in session.rules.rules}
            named = {f"{rule}-callback" if rule in known else rule: body for rule, body in RULES["rules"].items()}
            options.rules = {"version": 1, "rules": named} if known & RULES["rules"].keys() else RULES
        return options

    def _see(self, name: str, state: Any) -> None:
        """Note memory at an event."""
        self.step_count = int(_number(state, "global_step", self.step_count))
        self.epoch_count = int(_number(state, "epoch", self.epoch_count))
        status = {f"{k}_gb": v / _GB for k, v in self._device.statistics().items() if k != "retries"}
        self.memory_history.append(
            CallbackMemoryEvent(name.removeprefix("on_"), self.step_count, self.epoch_count, status, datetime.now())
        )
        del self.memory_history[:-1000]
        if name == "on_epoch_begin":
            self.epoch_start_memory = status.get("allocated_gb")
        if name == "on_epoch_end":
            self._keep_epoch()

    def _keep_epoch(self) -> None:
        """The epoch's metrics, as the run's record has them."""
        session = self.session
        if session is None:
            return
        values = {name: session.history.newest(name) for name in EPOCH_METRICS}
        newest = {name: value for name, value in values.items() if value is not None}
        if len(newest) < len(EPOCH_METRICS) or not self.watch.active:
            return
        self.epoch_memory_history.append(
            EpochMemoryMetrics(
                int(newest["memory.epoch"]),
                newest["memory.epoch_start"] / _GB,
                newest["memory.epoch_end"] / _GB,
                newest["memory.epoch_peak"] / _GB,
                newest["memory.epoch_delta"] / _GB,
                int(newest["memory.epoch_cleanups"]),
                datetime.fromtimestamp(newest["memory.epoch_began"]),
                datetime.fromtimestamp(newest["memory.epoch_ended"]),
            )
        )

    def _handle_callback_error(self, method_name: str, error: BaseException) -> None:
        """Keep an error, pass it to the logging system, clean up if it is about memory. Never raises."""
        self.callback_errors.append((method_name, error, datetime.now()))
        message = f"error in {method_name}: {error}"
        logger.warning(message)
        session = self.session
        if session is not None:
            session.monitor_error(error, method_name)
        if self.logging_system is not None:
            facts = {
                "method": method_name,
                "error_type": type(error).__name__,
                "step": self.step_count,
                "epoch": self.epoch_count,
            }
            with contextlib.suppress(Exception):
                self.logging_system.warning(message, "MEMORY_CALLBACK", facts)
        if looks_like_memory(error) and (self.memory_optimizer is not None or session is None):
            self.last_cleanup_step = self.step_count
            with contextlib.suppress(Exception):
                self._clean_up()

    def _clean_up(self) -> None:
        if self.memory_optimizer is not None:
            self.memory_optimizer.cleanup_gpu_memory()
            return
        self._device.release_cached()


def _number(state: Any, name: str, otherwise: float) -> float:
    value = getattr(state, name, None)
    return float(value) if isinstance(value, (int, float)) else otherwise


def _monitored(name: str) -> Callable[..., None]:
    base = getattr(HealthCheckCallback, name)

    def event(self: MemoryMonitoringCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            base(self, args, state, control, **kwargs)
            self._see(name, state)
        except Exception as error:
            self._handle_callback_error(name, error)

    event.__name__ = event.__qualname__ = name
    event.__doc__ = base.__doc__
    return event


for _name in EVENTS:
    setattr(MemoryMonitoringCallback, _name, _monitored(_name))
