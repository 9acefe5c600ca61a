"""A trainer without torch: every event of a real run, in the real order, with controls that do what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.run.ending import Ending

if TYPE_CHECKING:
    from healthcheck.run.session import Session


@dataclass
class FakeModel:
    """Implements :class:`healthcheck.core.events.ModelView` over whatever objects are given."""

    parameters: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    optimizer_list: list[Any] = field(default_factory=list)

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        return list(self.parameters.items())

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        return list(self.modules.items())

    def optimizers(self) -> Sequence[Any]:
        return list(self.optimizer_list)


class FakeDevice:
    """A device whose memory is two numbers."""

    kind = "fake"

    def __init__(self) -> None:
        self.allocated = 0
        self.cached = 0

    def capacity_bytes(self) -> int:
        return 2**30

    def allocated_bytes(self) -> int:
        return self.allocated

    def reserved_bytes(self) -> int:
        return self.allocated + self.cached

    def release_cached(self) -> None:
        self.cached = 0


class FakeControls:
    """What an action may do to a :class:`FakeTrainer`. It happens, and :attr:`asked` remembers it."""

    def __init__(self, trainer: FakeTrainer, unable: Mapping[str, str]) -> None:
        able = {"stop", "skip_update", "checkpoint", "scale_lr", "log"} - set(unable)
        self.capabilities = Capabilities("fake", frozenset(EventKind), frozenset(able), dict(unable))
        self.device = FakeDevice()
        self.asked: list[str] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self._trainer = trainer

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        self.asked.append(f"stop by {rule or 'user'} at {step}")

    def skip_update(self) -> bool:
        if not self._trainer.before_update:
            return False
        self.asked.append("skip_update")
        self._trainer.skipping = True
        return True

    def request_checkpoint(self, path: Path | None = None) -> str:
        self.asked.append("checkpoint")
        if path is None:
            raise UsageError("the fake trainer saves only to a path that it is given")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"step {self._trainer.step}\n", encoding="utf-8")
        self._trainer.emit(EventKind.CHECKPOINT_SAVED, path=str(path))
        return str(path)

    def scale_lr(self, factor: float) -> list[float]:
        self.asked.append(f"scale_lr by {factor:g}")
        for group in self._trainer.optimizer.param_groups:
            group["lr"] *= factor
        return [group["lr"] for group in self._trainer.optimizer.param_groups]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((step, dict(metrics)))


class FakeTrainer:
    """Plays steps through a session; probes, rules, actions and plugins of that session are the real ones.

    :param model: what ``event.model`` shows.
    :param unable: controls that this trainer lacks -> why, to test what an action says then.
    """

    def __init__(
        self, session: Session, *, model: FakeModel | None = None, unable: Mapping[str, str] | None = None
    ) -> None:
        self.session = session
        self.model = model if model is not None else FakeModel()
        self.optimizer: Any = SimpleNamespace(param_groups=[{"lr": 1e-3, "params": []}])
        self.step = session.step
        self.updates = 0
        """Updates that were applied: a skipped one is not."""
        self.skipping = False
        self.before_update = False
        self._began = False
        self.controls = FakeControls(self, unable or {})
        session.bind(self.controls)

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop."""
        return self.session.stop.request is not None

    def emit(self, kind: EventKind, **facts: Any) -> None:
        """One event of the step that is under way."""
        self.session.emit(Event(kind, max(1, self.step), model=self.model, **facts))

    def train_step(
        self,
        loss: Any = None,
        *,
        micro_batches: int = 1,
        batch: Any = None,
        metrics: Mapping[str, Any] | None = None,
        log: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> bool:
        """One step with all its events; False once a stop was asked for.

        :param loss: None for a step without a loss.
        :param log: metrics as the script would give to ``healthcheck.log``; a name may carry labels
            (``grad_norm[encoder.weight]``, ``lr[group=1]``), as if a probe had given the sample.
        :param facts: further fields of :class:`healthcheck.core.events.Event`, for all events of the update.
        """
        if self.stopped:
            return False
        if not self._began:
            self._began = True
            self.step += 1
            self.emit(EventKind.TRAIN_START)
            self.emit(EventKind.EPOCH_START, epoch=0.0)
        else:
            self.step += 1
        self.emit(EventKind.STEP_START)
        update = {"optimizer": self.optimizer, "batch": batch, **facts}
        for _ in range(micro_batches):
            self.emit(EventKind.BATCH_READY, batch=batch)
            if loss is not None:
                self.emit(EventKind.LOSS, loss=loss, batch=batch)
        if log:
            log_series(self.session, log, self.step)
        self.emit(EventKind.BACKWARD_END, **update)
        self.skipping, self.before_update = False, True
        try:
            self.emit(EventKind.BEFORE_UPDATE, **update)
        finally:
            self.before_update = False
        if not self.skipping:
            self.updates += 1
            self.emit(EventKind.AFTER_UPDATE, **update)
        self.emit(EventKind.STEP_END, loss=loss, metrics=metrics, skipped=self.skipping or None, **update)
        return not self.stopped

    def evaluate(self, *, batches: int = 1, dataset: str = "", test: bool = False, **metrics: Any) -> None:
        """An evaluation (or a test run) with its events; ``evaluate(loss=2.1)`` gives ``eval.loss``."""
        word = "test" if test else "eval"
        start, step, end = (EventKind(f"{word}_{part}") for part in ("start", "step", "end"))
        self.emit(start, phase=word, dataset=dataset)
        for _ in range(batches):
            self.emit(step, phase=word, dataset=dataset)
        self.emit(
            end, phase=word, dataset=dataset, metrics={f"{word}.{name}": v for name, v in metrics.items()} or None
        )

    def save(self, path: str) -> None:
        """Announce a checkpoint; writes nothing."""
        self.emit(EventKind.CHECKPOINT_SAVED, path=path)

    def end_epoch(self, epoch: float = 0.0) -> None:
        self.emit(EventKind.EPOCH_END, epoch=epoch)
        self.emit(EventKind.EPOCH_START, epoch=epoch + 1)

    def run(self, steps: int, loss: Callable[[int], Any] | float = 1.0, **facts: Any) -> int:
        """So many steps, or fewer if a rule stops; returns how many were made."""
        made = 0
        for _ in range(steps):
            made += 1
            if not self.train_step(loss(self.step + 1) if callable(loss) else loss, **facts):
                break
        return made

    def finish(self, exception: BaseException | None = None) -> dict[str, Any]:
        """End of the run; returns the content of ``report.json``."""
        if self._began and not self.stopped:
            self.emit(EventKind.EPOCH_END, epoch=0.0)
        return self.session.finish(Ending(exception=exception))


@lru_cache(maxsize=1024)
def series_of(name: str) -> tuple[str, Mapping[str, str]]:
    """``lr[group=1]`` as metric and labels. Raises ``ValueError`` for a name that is no single series."""
    from healthcheck.ruletests.play import series_of as read

    metric, labels = read(name)
    if not metric or "[" in metric or "]" in metric or any(value in ("", "*") for _, value in labels):
        raise ValueError(f"series {name}: labels are written as in grad_norm[encoder.weight] or lr[group=1]")
    return metric, dict(labels)


def log_series(session: Session, values: Mapping[str, Any], step: int) -> None:
    """Samples of one step, by the names of their series."""
    for name, value in values.items():
        metric, labels = series_of(name)
        session.log({metric: value}, step=step, labels=labels)
