"""Six callbacks for Lightning, each one concern, each a few rules and names over the ordinary callback."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from healthcheck.core.samples import Sample
from healthcheck.core.text import time_left
from healthcheck.trainers.lightning.callback import HealthCheckCallback

if TYPE_CHECKING:
    from healthcheck.run.opening import SessionOptions
    from healthcheck.run.session import Session


class MonitorCallback(HealthCheckCallback):
    """What the six share: rules and metrics of their own, one session for all in a Trainer."""

    collects: tuple[str, ...] = ()
    """Metrics that it needs beside those of its rules."""
    covered: tuple[str, ...] = ()
    """Those of its rules that the packs have under the same id, at least as strict: beside them they are not needed."""

    def __init__(self, log_interval: int = 100, **options: Any) -> None:
        super().__init__(None, **options)
        if log_interval < 1:
            raise ValueError(f"log_interval is {log_interval}; it must be at least 1")
        self.log_interval = log_interval
        self.watch.only_its_own = True
        self.watch.rules_beside = self._rules_beside
        self._reported = 0
        self._unlisten: Callable[[], None] | None = None

    def rules(self) -> dict[str, Any]:
        """Rules of this concern, by id."""
        return {}

    def _rules_beside(self, session: Session) -> SessionOptions:
        """Its rules, without those that the session has already: a rule that stops does not become one that warns."""
        known = {rule.id for rule in session.rules.rules}
        rules = {rule: body for rule, body in self.rules().items() if rule not in self.covered or rule not in known}
        return self._options(rules)

    def _options(self, rules: Mapping[str, Any]) -> SessionOptions:
        options = self.watch.options
        options.rules, options.metrics = {"version": 1, "rules": rules}, self.collects
        return options

    def take(self, sample: Sample) -> None:
        """One measured value, on the host."""

    def values(self) -> Mapping[str, float]:
        """What to log now, without the prefix ``train/``."""
        return {}

    def begin(self, trainer: Any, pl_module: Any) -> None:
        for member in trainer.callbacks:
            if isinstance(member, MonitorCallback):
                member._options(member.rules())
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
        """Draw the live view once a second, where there is a terminal."""
        dashboard: Any = self.session.host.registry.reports.get("dashboard") if self.session is not None else None
        if dashboard is not None and trainer.is_global_zero:
            dashboard.show(lambda: dict(trainer.logged_metrics))

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


# --------------------------------------------------------------------------------------------------
# Six callbacks for Lightning, each one concern, each a few rules and names over the ordinary callback.
#
# For people who compose their monitoring from callbacks instead of writing a rule file. Those of one
# Trainer make one session together: the first of them opens it with the rules of all::
#
#     Trainer(max_steps=1000, callbacks=[GradientMonitorCallback(), LossMonitorCallback(), AnomalyDetectorCallback()])
#
# Metrics go through ``pl_module.log`` as ``train/...``, so that every logger has them and
# ``trainer.logged_metrics`` too.


_MIB = 1024**2


class GradientMonitorCallback(MonitorCallback):
    """Gradient norm, clipping, and an alert when the norm is ``mean + threshold * std`` or more.

    :param log_interval: steps between two logged values.
    :param gradient_norm_history_size: norms that mean and standard deviation are made of.
    :param grad_explosion_threshold: standard deviations above the mean.
    :param min_grad_history_for_detection: norms before the first judgement.
    """

    collects = ("grad_norm", "clip.applied", "clip.ratio")

    def __init__(
        self,
        log_interval: int = 100,
        gradient_norm_history_size: int = 100,
        grad_explosion_threshold: float = 3.0,
        min_grad_history_for_detection: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(log_interval, **options)
        self.grad_explosion_threshold = grad_explosion_threshold
        self.min_grad_history_for_detection = min_grad_history_for_detection
        self.gradient_norm_history: deque[float] = deque(maxlen=gradient_norm_history_size)
        self.steps = 0
        self.total_clip_events = 0
        self._ratios: deque[float] = deque(maxlen=gradient_norm_history_size)

    def rules(self) -> dict[str, Any]:
        return {
            "gradient-explosion": spike_rule(
                "grad_norm",
                self.grad_explosion_threshold,
                self.gradient_norm_history.maxlen or 100,
                self.min_grad_history_for_detection,
                "gradient norm {value:.4g} is {score:.1f} standard deviations above its mean {normal:.4g}",
                "lower the learning rate or clip gradients",
            )
        }

    def take(self, sample: Sample) -> None:
        if sample.metric == "grad_norm":
            self.gradient_norm_history.append(sample.value)
            self.steps += 1
        elif sample.metric == "clip.applied":
            self.total_clip_events += int(sample.value)
        elif sample.metric == "clip.ratio" and sample.value < 1.0:
            self._ratios.append(sample.value)

    def values(self) -> Mapping[str, float]:
        norms = self.gradient_norm_history
        if not norms:
            return {}
        values = {"grad_norm": norms[-1], "grad_norm_avg": fmean(norms)}
        values["clip_rate"] = 100.0 * self.total_clip_events / max(1, self.steps)
        values["total_clip_events"] = float(self.total_clip_events)
        if self._ratios:
            values["avg_clip_ratio"] = fmean(self._ratios)
        return values


class MemoryMonitorCallback(MonitorCallback):
    """Memory of the accelerator, or of the process where there is none, in MB.

    :param log_interval: steps between two logged values.
    """

    collects = ("memory.allocated", "memory.peak")

    def __init__(self, log_interval: int = 100, **options: Any) -> None:
        super().__init__(log_interval, **options)
        self._seen: dict[str, float] = {}

    def take(self, sample: Sample) -> None:
        if sample.metric in self.collects:
            self._seen[sample.metric] = sample.value / _MIB

    def values(self) -> Mapping[str, float]:
        names = {"memory.allocated": "memory_current_mb", "memory.peak": "memory_peak_mb"}
        return {names[name]: value for name, value in self._seen.items()}


class ThroughputMonitorCallback(MonitorCallback):
    """Step time, tokens per second, progress, and the time that is left.

    :param log_interval: steps between two logged values.
    :param step_time_history_size: step times that the average is made of.
    :param warmup_steps: steps before the first estimate of the time that is left.
    """

    collects = ("time.step", "tokens_per_sec", "progress")

    def __init__(
        self, log_interval: int = 100, step_time_history_size: int = 20, warmup_steps: int = 10, **options: Any
    ) -> None:
        super().__init__(log_interval, **options)
        self.warmup_steps = warmup_steps
        self.step_times: deque[float] = deque(maxlen=step_time_history_size)
        self._seen: dict[str, float] = {}
        self._timed = 0

    def take(self, sample: Sample) -> None:
        if sample.metric == "time.step":
            self.step_times.append(sample.value)
            self._timed += 1
        elif sample.metric in self.collects:
            self._seen[sample.metric] = sample.value

    @property
    def eta_seconds(self) -> float | None:
        """Seconds that are left; None before the warm-up is over or where the length is not known."""
        progress = self._seen.get("progress")
        session = self.session
        if session is None or not progress or self._timed < self.warmup_steps or not self.step_times:
            return None
        return fmean(self.step_times) * (session.step / progress - session.step)

    @property
    def eta(self) -> str:
        """The same in words: ``2h 34m``; empty while it is not known."""
        seconds = self.eta_seconds
        return "" if seconds is None else time_left(seconds)

    def values(self) -> Mapping[str, float]:
        values: dict[str, float] = {}
        if self.step_times:
            values["step_time"] = fmean(self.step_times)
        if "tokens_per_sec" in self._seen:
            values["tokens_per_sec"] = self._seen["tokens_per_sec"]
        if "progress" in self._seen:
            values["progress_pct"] = 100.0 * self._seen["progress"]
        seconds = self.eta_seconds
        if seconds is not None:
            values["eta"] = seconds
        return values


class LossMonitorCallback(MonitorCallback):
    """Average loss, and an alert when the loss is ``mean + threshold * std`` or more.

    :param log_interval: steps between two logged values.
    :param loss_history_size: losses that mean and standard deviation are made of.
    :param loss_spike_threshold: standard deviations above the mean.
    :param min_loss_history_for_detection: losses before the first judgement.
    """

    collects = ("loss",)

    def __init__(
        self,
        log_interval: int = 100,
        loss_history_size: int = 100,
        loss_spike_threshold: float = 3.0,
        min_loss_history_for_detection: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(log_interval, **options)
        self.loss_spike_threshold = loss_spike_threshold
        self.min_loss_history_for_detection = min_loss_history_for_detection
        self.loss_history: deque[float] = deque(maxlen=loss_history_size)

    def rules(self) -> dict[str, Any]:
        return {
            "loss-spike": spike_rule(
                "loss",
                self.loss_spike_threshold,
                self.loss_history.maxlen or 100,
                self.min_loss_history_for_detection,
                "loss {value:.4g} is {score:.1f} standard deviations above its mean {normal:.4g}",
                "look at the batch of this step; lower the learning rate if it comes again",
            )
        }

    def take(self, sample: Sample) -> None:
        if sample.metric == "loss":
            self.loss_history.append(sample.value)

    def values(self) -> Mapping[str, float]:
        """The mean; not a number where the newest loss is none, and no longer than that."""
        losses = self.loss_history
        if not losses or not isfinite(losses[-1]):
            return {"loss_avg": losses[-1]} if losses else {}
        return {"loss_avg": fmean(filter(isfinite, losses))}


class AnomalyDetectorCallback(MonitorCallback):
    """NaN and infinity in the loss and in the gradients, with advice. Nothing to configure."""

    covered = ("loss-not-finite", "grads-not-finite")

    def rules(self) -> dict[str, Any]:
        rules: dict[str, Any] = {}
        for rule, metric, what in (
            ("loss-not-finite", "loss", "loss"),
            ("grads-not-finite", "grad_norm", "gradient norm"),
        ):
            rules[rule] = {
                "metric": metric,
                "when": "nonfinite",
                "severity": "error",
                "then": ["warn"],
                "message": f"{what} is {{value}}",
                "hint": "lower the learning rate, check the data of this step, clip gradients, or use bf16 instead of fp16",
            }
        rules["loss-not-finite"]["explains"] = ["grads-not-finite"]
        return rules


class TrainingDashboardCallback(MonitorCallback):
    """A live table on the terminal: step, loss, learning rate, gradients, memory, speed, time left.

    Shows what others log (``trainer.logged_metrics``) beside what is measured. Without a terminal it
    does nothing.

    :param refresh_rate: steps between two refreshes.
    :param enable_dashboard: False switches it off.
    """

    collects = ("loss", "lr", "grad_norm", "memory.allocated", "time.step", "progress", "eta")

    def __init__(self, refresh_rate: int = 100, enable_dashboard: bool = True, **options: Any) -> None:
        super().__init__(refresh_rate, **options)
        self.refresh_rate = refresh_rate
        self.enable_dashboard = enable_dashboard

    def begin(self, trainer: Any, pl_module: Any) -> None:
        super().begin(trainer, pl_module)
        if self.enable_dashboard:
            self.show_dashboard(trainer)


class TrainingHealthCallback(MonitorCallback):
    """All six concerns in one object: what there was before the six. Deprecated; it works and says so."""

    covered = AnomalyDetectorCallback.covered

    def __init__(
        self,
        log_interval: int = 100,
        gradient_norm_history_size: int = 100,
        enable_dashboard: bool = True,
        *,
        loss_history_size: int = 100,
        grad_explosion_threshold: float = 3.0,
        loss_spike_threshold: float = 3.0,
        step_time_history_size: int = 20,
        warmup_steps: int = 10,
        **options: Any,
    ) -> None:
        warnings.warn(
            "TrainingHealthCallback is deprecated: use HealthCheckCallback (rules in YAML) or the single callbacks "
            "of healthcheck.trainers.lightning.single",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(log_interval, **options)
        self.parts: list[MonitorCallback] = [
            GradientMonitorCallback(log_interval, gradient_norm_history_size, grad_explosion_threshold),
            MemoryMonitorCallback(log_interval),
            ThroughputMonitorCallback(log_interval, step_time_history_size, warmup_steps),
            LossMonitorCallback(log_interval, loss_history_size, loss_spike_threshold),
            AnomalyDetectorCallback(log_interval),
        ]
        self.enable_dashboard = enable_dashboard
        self.collects = tuple(dict.fromkeys(key for part in self.parts for key in part.collects))

    def rules(self) -> dict[str, Any]:
        return {rule: body for part in self.parts for rule, body in part.rules().items()}

    def take(self, sample: Sample) -> None:
        for part in self.parts:
            part.take(sample)

    def values(self) -> Mapping[str, float]:
        return {name: value for part in self.parts for name, value in part.values().items()}

    def begin(self, trainer: Any, pl_module: Any) -> None:
        super().begin(trainer, pl_module)
        for part in self.parts:
            part.watch.session = self.session
        if self.enable_dashboard:
            self.show_dashboard(trainer)
