"""What the single callbacks for Lightning share: one session for all, rules and metrics of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from healthcheck.samples import Sample
from healthcheck.trainers.lightning.callback import HealthCheckCallback


class MonitorCallback(HealthCheckCallback):
    """What the six share: rules and metrics of their own, one session for all in a Trainer."""

    collects: tuple[str, ...] = ()
    """Metrics that it needs beside those of its rules."""

    def __init__(self, log_interval: int = 100, **options: Any) -> None:
        super().__init__(None, **options)
        if log_interval < 1:
            raise ValueError(f"log_interval is {log_interval}; it must be at least 1")
        self.log_interval = log_interval
        self._reported = 0
        self._unlisten: Callable[[], None] | None = None

    def rules(self) -> dict[str, Any]:
        """Rules of this concern, by id."""
        return {}

    def take(self, sample: Sample) -> None:
        """One measured value, on the host."""

    def values(self) -> Mapping[str, float]:
        """What to log now, without the prefix ``train/``."""
        return {}

    def begin(self, trainer: Any, pl_module: Any) -> None:
        team = [c for c in trainer.callbacks if isinstance(c, MonitorCallback)]
        if team and team[0] is self:
            rules: dict[str, Any] = {}
            for member in team:
                rules.update(member.rules())
            self.watch.options.rules = {"version": 1, "rules": rules}
            self.watch.options.metrics = tuple(dict.fromkeys(key for member in team for key in member.collects))
        super().begin(trainer, pl_module)
        self._reported = 0
        if self._unlisten is not None:
            self._unlisten()
        self._unlisten = self.session.on("samples", self._take_all) if self.session is not None else None

    def _take_all(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if not sample.labels and sample.phase == "train":
                self.take(sample)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.watch.guard(self._log_values, pl_module)

    def _log_values(self, pl_module: Any) -> None:
        session = self.session
        if session is None or session.step < self._reported + self.log_interval:
            return
        self._reported = session.step
        for name, value in self.values().items():
            pl_module.log(f"train/{name}", float(value))

    def show_dashboard(self, trainer: Any) -> None:
        """Draw the table every ``log_interval`` steps, where there is a terminal."""
        dashboard: Any = self.session.host.registry.reports.get("dashboard") if self.session is not None else None
        if dashboard is not None and trainer.is_global_zero:
            dashboard.show(self.log_interval, lambda: dict(trainer.logged_metrics))

    def _log_measured(self, trainer: Any) -> None:
        """Only what the callbacks are documented to log."""

    @property
    def state_key(self) -> str:
        return type(self).__qualname__


def spike_rule(metric: str, threshold: float, window: int, least: int, message: str, hint: str) -> dict[str, Any]:
    return {
        "metric": metric,
        "when": {"zscore": {"above": threshold, "window": window}},
        "min_samples": least,
        "severity": "warning",
        "then": ["warn"],
        "message": message,
        "hint": hint,
    }
