"""The Trainer of Lightning, under both of its package names: the callback."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.names import canonical_metric, is_evaluation
from healthcheck.instrument.controls import ending_of
from healthcheck.instrument.patching import Patches
from healthcheck.instrument.saved_state import new_checkpoint, parse_state
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions
from healthcheck.trainers.lightning.controls import CAPABILITIES, LightningControls
from healthcheck.trainers.native import Forwarded, NativeWatch, WatchedResults

if TYPE_CHECKING:
    from healthcheck.run.session import Session

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOADER = "/dataloader_idx_"


def callback_class() -> Any:
    """``Callback`` of the package that the script uses; where it uses both, see :func:`_of_both`."""
    loaded = [name for name in _PACKAGES if name in sys.modules]
    error: ImportError | None = None
    for name in (*loaded, *_PACKAGES):
        try:
            return importlib.import_module(name).Callback
        except ImportError as failed:
            error = failed
    raise ImportError("healthcheck.trainers.lightning needs the package lightning or pytorch-lightning") from error


_BOTH: dict[tuple[type, ...], type] = {}


def _of_both(cls: type, *others: type) -> type:
    """``cls`` that is a ``Callback`` of the other package as well: before 2.5 a Trainer refuses any that is not its own."""
    bases = (cls, *others)
    if bases not in _BOTH:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_named": cls}
        _BOTH[bases] = type(cls.__name__, bases, names)
    return _BOTH[bases]


def evaluation_results(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of an evaluation by data set, out of all that was logged so far.

    ``{"val_loss/dataloader_idx_1": 2.0, "train_loss": 1.0}`` -> ``{"1": {"eval.loss": 2.0}}``.
    """
    found: dict[str, dict[str, Any]] = {}
    for given, value in metrics.items():
        name, _, loader = given.partition(_LOADER)
        canonical = canonical_metric(name)
        if is_evaluation(canonical):
            found.setdefault(loader, {})[canonical] = value
    return found


def planned_steps(trainer: Any) -> int | None:
    if trainer.max_steps and trainer.max_steps > 0:
        return int(trainer.max_steps)
    try:
        planned = float(trainer.estimated_stepping_batches)
    except Exception:  # loaders without a length, and whatever a module's own may raise
        return None
    return int(planned) if planned < float("inf") else None


# --------------------------------------------------------------------------------------------------
# The Trainer of Lightning, under both of its package names.
#
# ::
#
#     from healthcheck.trainers.lightning.callback import HealthCheckCallback
#
#     trainer = Trainer(max_steps=1000, callbacks=[HealthCheckCallback()])
#
# Automatic and manual optimization, several optimizers and closures are all seen through torch's own
# hooks; the Trainer's sanity check is no evaluation.


LOG_PREFIX = "train/"
"""Before names in the Trainer's loggers, unless the setting ``log_prefix`` says otherwise."""


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """A hook of the Trainer: what goes wrong in it must not end the training."""

    @functools.wraps(method)
    def hook(self: HealthCheckCallback, trainer: Any, *given: Any, **named: Any) -> None:
        if self._trainer is None or self._trainer() is not trainer:
            self.adopt(trainer)
        try:
            method(self, trainer, *given, **named)
        except Exception as error:
            self.watch.failed(error, method.__name__)

    return hook


class HealthCheckCallback(WatchedResults, callback_class()):  # type: ignore[misc]
    """Watches ``fit()`` of one Trainer. Give it to ``Trainer(callbacks=[...])``.

    :param rules: path, pack name, dict of rules, or a list of these; None finds the nearest
        ``healthcheck.yaml``, else the recommended pack.
    :param profile: profile of the rule file.
    :param session: a session that is open already; by default the one that watches this process
        (``healthcheck run``, ``healthcheck.watch``), else one of its own for each ``fit()``.
    :param options: as for :func:`healthcheck.watch`: ``observe``, ``fail_on``, ``console``, ...

    After ``fit()`` look at ``alerts``, ``report`` and ``exit_code``.
    """

    def __new__(cls, *args: Any, **options: Any) -> HealthCheckCallback:
        bases = [vars(sys.modules[name]).get("Callback") for name in _PACKAGES if name in sys.modules]
        others = [base for base in bases if isinstance(base, type) and not issubclass(cls, base)]
        made: HealthCheckCallback = super().__new__(_of_both(cls, *others) if others else cls)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and sent by the class that has a name."""
        how, given, *more = super().__reduce_ex__(protocol)
        return how, (getattr(self, "_named", type(self)), *given[1:]), *more

    def __init__(
        self, rules: Any = None, profile: str | None = None, *, session: Session | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.watch = NativeWatch(SessionOptions(rules=rules, profile=profile, **options), CAPABILITIES, session)
        self.watch.name = type(self).__name__
        self._trainer: weakref.ref[Any] | None = None
        self._patches = Patches()
        self._forwarded = Forwarded()
        self._saved_state: dict[str, Any] | None = None
        self._save_to: Path | None = None
        self._logged_step = 0

    capabilities = CAPABILITIES

    # -- the trainer ------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        return self._trainer() if self._trainer is not None else None

    def adopt(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def heed(self) -> None:
        """End the loop after this batch. A rule's stop does not wait for ``min_steps`` or ``min_epochs``."""
        trainer = self.trainer
        if trainer is None:
            return
        trainer.should_stop = True
        loop = trainer.fit_loop
        if not loop._can_stop_early:
            loop.min_epochs = loop.epoch_loop.min_steps = None
            if self.session is not None:
                self.session.note("the stop does not wait for the Trainer's min_steps and min_epochs")

    def save_at_batch_end(self, path: Path | None) -> str:
        """Have the Trainer save once the batch is over; returns where."""
        trainer, session, machine = self.trainer, self.session, self.watch.machine
        if trainer is None or session is None or machine is None:
            raise UsageError("training has not begun")
        self._save_to = new_checkpoint(session, path, f"step-{machine.step}.ckpt", Path(trainer.default_root_dir))
        return str(self._save_to)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics to the Trainer's loggers, at a step of their own."""
        trainer, session = self.trainer, self.session
        if trainer is None or session is None or not trainer.loggers or not metrics or not self.watch.forwards:
            return
        prefix = str(session.settings.get("log_prefix") or LOG_PREFIX)
        named = {f"{prefix}{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=step)

    # -- begin and end ----------------------------------------------------------------

    @_contained
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(trainer, pl_module)

    def begin(self, trainer: Any, pl_module: Any) -> None:
        """Watch from here on."""
        state, self._saved_state = self._saved_state, None
        optimizers = list(trainer.optimizers)
        # Lightning counts the steps of all optimizers together; a checkpoint of ours knows better.
        step = int(state["step"]) if state else int(trainer.global_step) // max(1, len(optimizers))
        self._save_to, self._logged_step = None, step
        self.watch.begin(
            lambda base: LightningControls(base, self),
            model=pl_module,
            optimizers=optimizers,
            step=step,
            epoch=float(trainer.current_epoch),
            max_steps=planned_steps(trainer),
            state=state,
            ranks=(int(trainer.global_rank), int(trainer.world_size)),
            peers=[c.watch for c in trainer.callbacks if isinstance(c, HealthCheckCallback)],
        )
        self._forwarded = Forwarded(self.watch.alerts)
        self._patches.restore()
        self._patches = Patches()
        if self.watch.active:
            self._patches.replace(trainer, "save_checkpoint", self._save_checkpoint)
        if self.watch.stop_pending:
            self.heed()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.guard(self._flush, trainer)
        self._end(Ending())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(ending_of(exception))

    def _end(self, ending: Ending) -> None:
        self._patches.restore()
        self.watch.end(ending)

    # -- the loop ---------------------------------------------------------------------

    @_contained
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.watch.in_epoch(float(trainer.current_epoch))
        self.watch.emit(EventKind.EPOCH_START)

    @_contained
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.watch.step_begins()
        self.watch.trains_on(batch)

    @_contained
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.watch.active:
            return
        self._flush(trainer)
        machine = self.watch.machine
        every = int(trainer.log_every_n_steps or 0)
        if machine is not None and every and machine.last_attempt >= self._logged_step + every:
            self._logged_step = machine.last_attempt
            self._log_measured(trainer)
        if self.watch.stop_pending:
            trainer.should_stop = True

    @_contained
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.emit(EventKind.EPOCH_END)
        self._flush(trainer)

    def _flush(self, trainer: Any) -> None:
        """What had to wait for the end of the batch: a checkpoint, alerts for the loggers."""
        path, self._save_to = self._save_to, None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(str(path))
        session = self.watch.session
        if self.watch.active and session is not None and len(session.alerts) != self._forwarded.count:
            news = self._forwarded.news(session.alerts)
            if news and trainer.is_global_zero:
                self.log_metrics(news, self.watch.machine.last_attempt if self.watch.machine is not None else 0)

    def _log_measured(self, trainer: Any) -> None:
        """The newest values, each at the step that it belongs to; not those that the module logs itself."""
        session = self.session
        if session is None or not trainer.is_global_zero or not trainer.loggers:
            return
        theirs = {canonical_metric(name) for name in trainer.logged_metrics}
        by_step: dict[int, dict[str, float]] = {}
        for name in session.history.series():
            if "[" not in name and name not in theirs and not is_evaluation(name):
                ((step, value),) = session.history(name, 1)
                by_step.setdefault(step, {})[name] = value
        for step in sorted(by_step):
            self.log_metrics(by_step[step], step)

    # -- evaluation -------------------------------------------------------------------

    @_contained
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.watch.evaluation_begins()

    @_contained
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self.watch.emit(EventKind.EVAL_STEP, phase="eval")

    @_contained
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        results = evaluation_results(trainer.callback_metrics)
        for dataset, metrics in (results or {"": {}}).items():
            self.watch.evaluation_begins(dataset=dataset)
            self.watch.evaluation_ends(metrics=metrics or None, dataset=dataset)
        self._flush(trainer)

    # -- checkpoints ------------------------------------------------------------------

    def _save_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``on_save_checkpoint`` comes before the file is there."""

        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(filepath, *args, **kwargs)
            self.watch.guard(self.watch.emit, EventKind.CHECKPOINT_SAVED, path=os.fspath(filepath))
            return result

        return save_checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Detector state for the checkpoint: one text, which every way of loading accepts."""
        state = self.watch.guard(self.watch.state)
        return {"healthcheck": json.dumps(state)} if state is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        text = state_dict.get("healthcheck")
        self._saved_state = parse_state(text)


def attach(trainer: Any, session: Session | None = None, **options: Any) -> HealthCheckCallback:
    """Watch a Trainer that exists already; returns its callback. A second call returns the first one's."""
    for known in trainer.callbacks:
        if isinstance(known, HealthCheckCallback):
            return known
    callback = HealthCheckCallback(session=session, **options)
    trainer.callbacks.insert(0, callback)
    callback.adopt(trainer)
    return callback
