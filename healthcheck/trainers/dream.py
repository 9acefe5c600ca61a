"""Dream Trainer 0.3.0: a callback for its ``CallbackCollection``."""

from __future__ import annotations

import importlib
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.names import canonical_metric
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import TorchControls, ending_of
from healthcheck.instrument.patching import Patches
from healthcheck.instrument.saved_state import parse_state
from healthcheck.instrument.sources import AnnouncedSource
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions
from healthcheck.trainers.native import (
    AnnouncedWatch,
    Forwarded,
    NativeControls,
    WatchedResults,
    inner_optimizer,
    joined,
)

if TYPE_CHECKING:
    from healthcheck.run.session import Session

HOOKS = (
    "pre_launch",
    "pre_configure",
    "post_configure",
    "pre_setup",
    "post_setup",
    "post_load_state_dict",
    "pre_fit",
    "post_fit",
    "pre_epoch",
    "post_epoch",
    "pre_train_epoch",
    "post_train_epoch",
    "pre_train_step",
    "post_train_step",
    "pre_optimizer_step",
    "post_optimizer_step",
    "pre_optimizer_zero_grad",
    "post_optimizer_zero_grad",
    "pre_validation_epoch",
    "post_validation_epoch",
    "pre_validation_step",
    "post_validation_step",
    "on_interrupt",
    "train_context",
    "validation_context",
)
"""Hooks of version 0.3.0."""


class Callback:
    """Stands in for ``dream_trainer.callbacks.Callback``: every hook is there, none is overridden."""

    _dependency: Any = object
    """What the trainer must be an instance of."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return

    def pop_self(self) -> None:
        """Take this callback out of its trainer's collection."""
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        trainer.callbacks.pop(type(self).__name__)


def _unused(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is not overridden and must not be called")

    hook.__name__, hook.__qualname__ = name, f"Callback.{name}"
    return hook


for _name in HOOKS:
    setattr(Callback, _name, _unused(_name))


def callback_class() -> Any:
    """The package's ``Callback`` if it imports here, else :class:`Callback`."""
    try:
        return importlib.import_module("dream_trainer.callbacks").Callback
    except Exception:  # not installed, or without what it imports
        return Callback


# --------------------------------------------------------------------------------------------------
# Dream Trainer 0.3.0: a callback for its ``CallbackCollection``.
#
# ::
#
#     from healthcheck.trainers.dream import HealthCheckCallback
#
#     callbacks = CallbackCollection([HealthCheckCallback(), ...])
#
# Its step hooks come once per micro-batch; a step here is one update. There is no way to stop in its
# interface: the run is made to end by having no more batches.


_NO_TESTS = "Dream Trainer validates, it has no test"

CAPABILITIES = Capabilities(
    trainer="dream",
    events=frozenset(EventKind)
    - {EventKind.TEST_START, EventKind.TEST_STEP, EventKind.TEST_END, EventKind.CHECKPOINT_SAVED},
    controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"}),
    gaps={
        **dict.fromkeys(("test_start", "test_step", "test_end"), _NO_TESTS),
        "checkpoint_saved": "Dream Trainer does not announce its checkpoints",
    },
)

LOG_PREFIX = "healthcheck/"


class DreamControls(NativeControls):
    """Ends the run by leaving it without batches; saves modules and optimizers as a plain script would."""

    def __init__(self, base: TorchControls, owner: HealthCheckCallback) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        if self._owner.endless:
            # Without batches such a run would spin for ever: the stop has to be raised.
            self.base.request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)
        else:
            super().request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)

    def end_loop(self, reason: str) -> None:
        """The callback's hooks see to it, between two updates."""

    @property
    def ranks_cannot_save(self) -> str:
        return self.base.ranks_cannot_save

    def save(self, path: Path | None) -> str:
        return self.base.request_checkpoint(path)

    def schedulers(self) -> Iterable[Any]:
        find = getattr(self._owner.trainer, "named_schedulers", None)
        return list((find() or {}).values()) if find is not None else ()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._owner.log_metrics(metrics)


def named(models: Mapping[str, Any]) -> Any:
    """The trainer's models under its own names; a single one without."""
    import torch

    return torch.nn.ModuleDict(models) if len(models) > 1 else joined(models.values(), "model")


def scalars(values: Mapping[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Scalars of a result under canonical names; a device scalar stays where it is."""
    found = {}
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in leave_out and (number or getattr(value, "ndim", None) == 0):
            found[canonical_metric(name)] = value
    return found or None


def planned_steps(trainer: Any) -> int | None:
    epochs = getattr(getattr(trainer, "training_parameters", None), "n_epochs", None)
    batches = int(getattr(trainer, "_num_train_batches", 0) or 0)
    parts = int(getattr(trainer, "num_gradient_accumulation_steps", 1) or 1)
    return int(epochs) * (batches // parts) if epochs and batches else None


class WatchedStep:
    """Takes the place of ``trainer.step`` while a run is watched.

    Dream Trainer checks gradients there and raises before anybody has seen them. Our look comes first: a rule may keep the
    update from happening, and then the trainer's own check has nothing to raise about.
    """

    def __init__(self, watch: AnnouncedWatch) -> None:
        self._watch = watch
        self._inside: Any = None
        """The optimizer whose update is being made."""

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            source, inner = self._watch.source, inner_optimizer(optimizer)
            if not self._watch.active or source is None or not source.watches(inner):
                return original(optimizer, *args, **kwargs)
            if self._watch.guard(source.update_begins, inner) is False:
                return self._left_out(source, optimizer, inner)
            self._inside = inner
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._inside = None
                source.update_fails(inner)  # if nobody has said that it was made

        return step

    def updated(self, optimizer: Any) -> None:
        """``post_optimizer_step``: gradients are still there, the schedule has not moved on."""
        source, inner = self._watch.source, inner_optimizer(optimizer)
        if source is not None and inner is self._inside:
            source.update_ends(inner)

    def _left_out(self, source: AnnouncedSource, optimizer: Any, inner: Any) -> Any:
        """No update, no callbacks round it, no step of the schedule; gradients are cleared as always."""
        import torch

        self._watch.guard(source.update_ends, inner)
        optimizer.zero_grad()
        return torch.zeros(())


class HealthCheckCallback(WatchedResults, callback_class()):  # type: ignore[misc]
    """Watches one ``fit()`` on every rank.

    :param rules: path, pack name, dict of rules, or a list of these; None finds the nearest
        ``healthcheck.yaml``, else the recommended pack.
    :param session: a session that is open already; by default the one that watches this process,
        else one of its own for each ``fit()``.
    :param options: as for :func:`healthcheck.watch`.

    After ``fit()`` look at ``alerts``, ``report`` and ``exit_code``.
    """

    _dependency: Any = object

    def __init__(
        self, rules: Any = None, profile: str | None = None, *, session: Session | None = None, **options: Any
    ) -> None:
        given = SessionOptions(rules=rules, profile=profile, **options)
        self.watch: AnnouncedWatch = AnnouncedWatch(given, CAPABILITIES, session)
        self._step = WatchedStep(self.watch)
        self._trainer: weakref.ref[Any] | None = None
        self._patches = Patches()
        self._on_fit = Patches()
        self._forwarded = Forwarded()
        self._saved_state: dict[str, Any] | None = None
        self._models: Any = None
        self._batch_index = -1
        self._begun = False

    # -- the trainer ------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """Set by the collection when the trainer is made."""
        return self._trainer() if self._trainer is not None else None

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self._on_fit.restore()
        self._on_fit = Patches()
        self._on_fit.replace(trainer, "fit", self._fit)

    def _fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``on_interrupt`` has no exception, and none is called for a stop or a Ctrl+C."""

        def fit(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._end(ending_of(error))
                raise
            self._end(Ending())
            return result

        return fit

    @property
    def endless(self) -> bool:
        """Whether the run has no number of epochs."""
        return getattr(getattr(self.trainer, "training_parameters", None), "n_epochs", 1) is None

    # -- the run ----------------------------------------------------------------------

    def pre_epoch(self) -> None:
        self.watch.guard(self._epoch_begins)

    def post_epoch(self) -> None:
        self.watch.guard(self._epoch_ends)

    def post_fit(self) -> None:
        self._end(Ending())

    def on_interrupt(self) -> None:
        self._end(ending_of(sys.exc_info()[1]))

    def pre_train_step(self, batch: Any, batch_idx: int) -> None:
        self.watch.guard(self._micro_batch_begins, batch, batch_idx)

    def post_train_step(self, result: Any, batch_idx: int) -> None:
        self.watch.guard(self._micro_batch_ended, result)

    def post_optimizer_step(self, model: Any, optimizer: Any) -> None:
        self.watch.guard(self._step.updated, optimizer)

    def post_train_epoch(self, result: Any) -> None:
        self.watch.guard(self._heed, 0)

    # -- validation -------------------------------------------------------------------

    def pre_validation_epoch(self) -> None:
        if not getattr(self.trainer, "is_sanity_validation", False):
            self.watch.guard(self.watch.evaluation_begins)

    def post_validation_step(self, result: Any, batch_idx: int) -> None:
        if not getattr(self.trainer, "is_sanity_validation", False):
            self.watch.guard(self.watch.emit, EventKind.EVAL_STEP, phase="eval")

    def post_validation_epoch(self, result: Any) -> None:
        if not getattr(self.trainer, "is_sanity_validation", False):
            self.watch.guard(self._validated, result)

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Detector state for the trainer's checkpoint: always one text, so that its structure never differs."""
        state = self.watch.guard(self.watch.state)
        return {"healthcheck": "" if state is None else json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        text = state_dict.get("healthcheck")
        self._saved_state = parse_state(text)

    # -- inside -----------------------------------------------------------------------

    def _begin(self) -> None:
        """When the first epoch begins: by then a checkpoint has been loaded."""
        trainer, self._begun = self.trainer, True
        if trainer is None:
            raise UsageError("the callback has no trainer; give it to the trainer's CallbackCollection")
        self._models = named(trainer.named_models())
        state, self._saved_state = self._saved_state, None
        begun = self.watch.begin(
            lambda base: DreamControls(base, self),
            model=self._models,
            optimizers=list(trainer.named_optimizers().values()),
            step=int(trainer.global_step),
            epoch=float(trainer.current_epoch),
            max_steps=planned_steps(trainer),
            state=state,
        )
        if begun:
            self._forwarded = Forwarded(self.watch.alerts)
            self._patches = Patches()
            self._patches.replace(trainer, "step", self._step.wrap)

    def _end(self, ending: Ending) -> None:
        self._patches.restore()
        self.watch.end(ending)
        self._models, self._begun = None, False

    def _epoch_begins(self) -> None:
        if not self._begun:
            self._begin()
        if not self.watch.stop_pending:
            self.watch.in_epoch(float(self.trainer.current_epoch))
            self.watch.emit(EventKind.EPOCH_START)
        self._heed(0)

    def _epoch_ends(self) -> None:
        if not self.watch.stop_pending:
            self.watch.emit(EventKind.EPOCH_END)
        self._heed(0)

    def _micro_batch_begins(self, batch: Any, index: int) -> None:
        source = self.watch.source
        self._batch_index = index
        if self.watch.active and source is not None:
            source.begins(int(self.trainer.global_step) + 1)
            self.watch.trains_on(batch)

    def _micro_batch_ended(self, result: Any) -> None:
        source = self.watch.source
        if not self.watch.active or source is None or self.trainer.is_accumulating_gradients:
            return
        values = result if isinstance(result, Mapping) else {"loss": result}
        source.ends(
            int(self.trainer.global_step) + 1,
            loss=values.get("loss"),
            metrics=scalars(values, leave_out=("loss", "grad_norm", "lr")),
        )
        if self.session is not None:
            news = self._forwarded.news(self.session.alerts)
            if news:
                self.log_metrics(news)
        self._heed(self._batch_index + 1)

    def _validated(self, result: Any) -> None:
        values = result if isinstance(result, Mapping) else {}
        self.watch.evaluation_ends(metrics=scalars(values))
        self._heed(self._batch_index + 1)

    def _heed(self, batches: int) -> None:
        """After a stop was asked for: this epoch has so many batches, those that come have none."""
        if self.watch.active and self.watch.stop_pending and not self.endless:
            self.trainer._num_train_batches = batches

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Through the trainer's ``LoggerMixin``, if it has one."""
        log = getattr(self.trainer, "log_dict", None)
        if log is not None and self.session is not None and self.watch.forwards:
            prefix = str(self.session.settings.get("log_prefix") or LOG_PREFIX)
            log({f"{prefix}{name}": value for name, value in metrics.items()})


def attach(target: Any, session: Session | None = None, **options: Any) -> HealthCheckCallback:
    """Watch a trainer, or whatever trainer gets this ``CallbackCollection``; returns the callback."""
    collection = target if hasattr(type(target), "initialize") else target.callbacks
    for known in collection.values():
        if isinstance(known, HealthCheckCallback):
            return known
    callback = HealthCheckCallback(session=session, **options)
    collection.append(callback)
    return callback


# --------------------------------------------------------------------------------------------------
# Dream Trainer 0.3.0: a callback for its ``CallbackCollection``.


__all__ = ["CAPABILITIES", "HealthCheckCallback", "attach", "callback_class"]
