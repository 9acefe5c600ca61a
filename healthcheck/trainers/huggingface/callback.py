"""The Trainer of transformers, and those of TRL that inherit from it: the callback."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from healthcheck.core.events import EventKind
from healthcheck.instrument.controls import ending_of
from healthcheck.instrument.patching import Patches
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions
from healthcheck.trainers.huggingface.controls import CAPABILITIES, HuggingFaceControls
from healthcheck.trainers.native import Forwarded, NativeWatch, WatchedResults, read_state, write_state

if TYPE_CHECKING:
    from healthcheck.run.session import Session

_BOOKKEEPING = ("epoch", "step", "total_flos", "num_input_tokens_seen")
_SPEED = ("_runtime", "_per_second", "_compilation_time")
_DEPTH = 40


def evaluation_results(metrics: Mapping[str, Any], prefix: str) -> tuple[str, dict[str, Any]]:
    """``(data set, results)`` of the Trainer's metrics.

    ``{"eval_news_loss": 1.0, "eval_news_runtime": 2.0}`` -> ``("news", {"loss": 1.0})``. The runtime,
    which is always there, separates the data set's name from the metric's.
    """
    head = next((name[: -len("_runtime")] for name in metrics if name.endswith("_runtime")), prefix)
    dataset = head[len(prefix) + 1 :] if head.startswith(f"{prefix}_") else ""
    results = {}
    for name, value in metrics.items():
        if name not in _BOOKKEEPING and not name.endswith(_SPEED):
            results[name.removeprefix(f"{head}_")] = value
    return dataset, results


def epoch_of(state: Any) -> float:
    return float(getattr(state, "epoch", 0.0) or 0.0)


def is_metric(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return not (name in _BOOKKEEPING or name.endswith(_SPEED) or name.startswith(("eval_", "test_", "train_")))


def is_measured(name: str, session: Session) -> bool:
    """Whether we measure it ourselves, unfiltered and at every step."""
    return name == "learning_rate" or name in session.host.registry.metrics


def trainer_on_stack() -> tuple[Any, str | None]:
    """``(trainer, checkpoint it resumes from)`` of the Trainer that is calling; it hands itself to no callback."""
    frame: Any = sys._getframe(1)
    trainer, checkpoint = None, None
    for _ in range(_DEPTH):
        if frame is None:
            break
        name = frame.f_code.co_name
        if name in ("__init__", "_inner_training_loop", "train"):
            found = frame.f_locals.get("self")
            if hasattr(found, "callback_handler") and hasattr(found, "training_step"):
                trainer = trainer or found
                given = frame.f_locals.get("resume_from_checkpoint")
                if isinstance(given, (str, os.PathLike)) and checkpoint is None:
                    checkpoint = os.fspath(given)
                if name == "__init__":
                    break
        frame = frame.f_back
    return trainer, checkpoint


# --------------------------------------------------------------------------------------------------
# The Trainer of transformers, and those of TRL that inherit from it.
#
# ::
#
#     from healthcheck.trainers.huggingface.callback import HealthCheckCallback
#
#     trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HealthCheckCallback()])
#
# Losses are those that were differentiated, not those of the Trainer's log: with
# ``logging_nan_inf_filter`` (its default) the log puts a running average in place of a NaN.


LOG_PREFIX = "healthcheck/"
"""Before names in the Trainer's log, unless the setting ``log_prefix`` says otherwise."""


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """An event of the Trainer: what goes wrong in it must not end the training."""

    @functools.wraps(method)
    def event(self: HealthCheckCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.control = control
        try:
            method(self, args, state, control, **kwargs)
        except Exception as error:
            self.watch.failed(error, method.__name__)

    return event


class HealthCheckCallback(WatchedResults, TrainerCallback):  # type: ignore[misc]
    """Watches one Trainer. Give it to ``Trainer(callbacks=[...])``; :func:`attach` does so afterwards.

    :param rules: path, pack name, dict of rules, or a list of these; None finds the nearest
        ``healthcheck.yaml``, else the recommended pack.
    :param profile: profile of the rule file.
    :param session: a session that is open already; by default the one that watches this process
        (``healthcheck run``, ``healthcheck.watch``), else one of its own for each ``train()``.
    :param options: as for :func:`healthcheck.watch`: ``observe``, ``fail_on``, ``console``, ...

    After ``train()`` look at ``alerts``, ``report`` and ``exit_code``.
    """

    def __init__(
        self, rules: Any = None, profile: str | None = None, *, session: Session | None = None, **options: Any
    ) -> None:
        self.watch = NativeWatch(SessionOptions(rules=rules, profile=profile, **options), CAPABILITIES, session)
        self.watch.name = type(self).__name__
        self.control: Any = None
        self.lr_scheduler: Any = None
        self._trainer: weakref.ref[Any] | None = None
        self._patches = Patches()
        self._forwarded = Forwarded()
        self._save_wanted = False
        self._output_dir = ""
        self._logging = False
        self._eval_loss: Any = None
        """Sum of the losses of an evaluation's batches, on their device."""

    capabilities = CAPABILITIES

    # -- the trainer ------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """The Trainer, or None where it was not found."""
        return self._trainer() if self._trainer is not None else None

    def adopt(self, trainer: Any) -> None:
        """Get to know the Trainer; callbacks are not given it. First in its list, we reach its log before the loggers."""
        if self.trainer is trainer:
            return
        self._trainer = weakref.ref(trainer)
        handler = trainer.callback_handler
        # A new list: the handler may be walking the old one.
        handler.callbacks = [self, *(c for c in handler.callbacks if c is not self)]
        self._patches.restore()
        self._patches = Patches()
        self._patches.replace(trainer, "train", self._training)

    def _training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``train()`` left by an exception calls no callback."""

        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._end(ending_of(error))
                raise

        return train

    def save_at_step_end(self) -> str:
        """Let the Trainer save once the step is over; returns the folder it will write."""
        self._save_wanted = True
        step = self.watch.machine.step if self.watch.machine is not None else 0
        return os.path.join(self._output_dir, f"checkpoint-{step}")

    # -- begin and end ----------------------------------------------------------------

    @_contained
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, _ = trainer_on_stack()
        if trainer is not None:
            self.adopt(trainer)

    @_contained
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, checkpoint = trainer_on_stack()
        if trainer is not None:
            self.adopt(trainer)
        self.lr_scheduler = kwargs.get("lr_scheduler")
        self._output_dir = trainer._get_output_dir(None) if trainer is not None else getattr(args, "output_dir", "")
        self._save_wanted = False
        step = int(getattr(state, "global_step", 0))
        where = checkpoint or os.path.join(self._output_dir, f"checkpoint-{step}")
        self.watch.begin(
            lambda base: HuggingFaceControls(base, self),
            model=kwargs.get("model"),
            optimizers=[kwargs["optimizer"]] if kwargs.get("optimizer") is not None else [],
            step=step,
            epoch=epoch_of(state),
            max_steps=max(0, int(getattr(state, "max_steps", 0))) or None,
            state=read_state(where, int(getattr(args, "process_index", 0))) if step else None,
            peers=[] if trainer is None else [c.watch for c in callbacks_of(trainer)],
        )
        self._forwarded = Forwarded(self.watch.alerts)
        if self.watch.active and trainer is not None:
            self._patches.replace(trainer, "training_step", self._training_step)
            self._patches.replace(trainer, "prediction_step", self._prediction_step)
        self._heed(control)

    def _prediction_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The Trainer leaves losses that are not finite out of its mean (``logging_nan_inf_filter``): look at them here."""

        def prediction_step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.watch.guard(self._keep_loss, result)
            return result

        return prediction_step

    def _keep_loss(self, result: Any) -> None:
        loss = result[0] if isinstance(result, tuple) and result else None
        if loss is not None and hasattr(loss, "detach"):
            loss = loss.detach().float().mean()
            self._eval_loss = (
                loss if self._eval_loss is None else self._eval_loss + loss
            )  # not finite if one of them is not

    def _with_what_was_left_out(self, results: dict[str, Any]) -> str:
        """Put the loss in that the Trainer should have given; returns how it was found, where it differs."""
        total, self._eval_loss = self._eval_loss, None
        mean = results.get("loss")
        if total is None or not isinstance(mean, float) or mean - mean != 0.0:
            return ""
        total = float(total)  # an evaluation is over, whose results the Trainer has read as well
        if total - total == 0.0:
            return ""
        results["loss"] = total
        return "the losses of its batches; the Trainer leaves those that are not finite out of its mean"

    def _training_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Loaders draw ahead; this is the batch that is trained on now."""

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.watch.trains_on(inputs)
            return original(model, inputs, *args, **kwargs)

        return training_step

    @_contained
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end(Ending())

    def _end(self, ending: Ending) -> None:
        self.watch.end(ending)
        trainer = self.trainer
        if trainer is not None:
            self._patches.restore()
            self._patches = Patches()
            self._patches.replace(trainer, "train", self._training)

    # -- the loop ---------------------------------------------------------------------

    @_contained
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at(state)
        self.watch.emit(EventKind.EPOCH_START, epoch=float(round(epoch_of(state), 6)))
        self._heed(control)

    @_contained
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.step_begins()

    @_contained
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._heed(control)

    @_contained
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at(state)
        session = self.watch.session
        if session is not None and len(session.alerts) != self._forwarded.count:
            self._forward_alerts(state)
        self._heed(control, saves=True)

    @_contained
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at(state)
        self.watch.emit(EventKind.EPOCH_END, epoch=epoch_of(state))
        self._forward_alerts(state)
        self._heed(control, saves=True)

    # -- evaluation, checkpoints, log -------------------------------------------------

    @_contained
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.evaluation_begins()
        self.watch.emit(EventKind.EVAL_STEP, phase="eval")

    @_contained
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        dataset, results = evaluation_results(metrics or {}, "eval")
        said = self._with_what_was_left_out(results)
        self.watch.evaluation_begins(dataset=dataset)
        self.watch.evaluation_ends(metrics=results, dataset=dataset, inferred=said)
        self._forward_alerts(state)
        self._heed(control, saves=True)

    @_contained
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        dataset, results = evaluation_results(metrics or {}, "test")
        self._eval_loss = None
        self.watch.evaluation_begins()
        self.watch.evaluation_ends(metrics=None)
        self.watch.emit(EventKind.TEST_END, phase="test", metrics=results, dataset=dataset)

    @_contained
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = os.path.join(self._output_dir, f"checkpoint-{getattr(state, 'global_step', 0)}")
        self.watch.emit(EventKind.CHECKPOINT_SAVED, path=folder)
        kept = self.watch.state()
        if kept is not None and os.path.isdir(folder):
            write_state(folder, kept, int(getattr(args, "process_index", 0)))
        self._heed(control)

    @_contained
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or not self.watch.active or self._logging or self.session is None:
            return
        session = self.session
        own = {name: value for name, value in logs.items() if is_metric(name, value) and not is_measured(name, session)}
        if own:
            session.log(own)
        if "loss" in logs and state.is_world_process_zero and self.watch.forwards:
            prefix = str(session.settings.get("log_prefix") or LOG_PREFIX)
            values = self.watch.metrics_to_log(leave_out=own)
            logs.update({f"{prefix}{name}": value for name, value in values.items()})

    def _forward_alerts(self, state: Any) -> None:
        trainer, session = self.trainer, self.session
        if trainer is None or session is None or not self.watch.active or not self.watch.forwards:
            return
        news = self._forwarded.news(session.alerts)
        if news and state.is_world_process_zero:
            prefix = str(session.settings.get("log_prefix") or LOG_PREFIX)
            self._logging = True
            try:
                trainer.log({f"{prefix}{name}": value for name, value in news.items()})
            finally:
                self._logging = False

    def _at(self, state: Any) -> None:
        if self.watch.active:
            self.watch.in_epoch(epoch_of(state))

    def _heed(self, control: Any, *, saves: bool = False) -> None:
        """Hand on what was asked for; the control object may have been exchanged since.

        :param saves: the Trainer looks at ``should_save`` next.
        """
        if saves and self._save_wanted:
            self._save_wanted = False
            control.should_save = True
        if self.watch.active and self.watch.stop_pending:
            control.should_training_stop = True


def callbacks_of(trainer: Any) -> list[HealthCheckCallback]:
    """Those of a Trainer's callbacks that are ours."""
    return [known for known in trainer.callback_handler.callbacks if isinstance(known, HealthCheckCallback)]


def attach(trainer: Any, session: Session | None = None, **options: Any) -> HealthCheckCallback:
    """Watch a Trainer that exists already; returns its callback. A second call returns the first one's."""
    for known in callbacks_of(trainer):
        return known
    callback = HealthCheckCallback(session=session, **options)
    trainer.add_callback(callback)
    callback.adopt(trainer)
    return callback
