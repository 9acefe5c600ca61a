"""Megatron Bridge 0.3.1 and later: a callback for ``pretrain`` and for ``CallbackManager``.

::

    from healthcheck.trainers.megatron_bridge.callback import HealthCheckCallback

    with HealthCheckCallback() as health:
        pretrain(config, forward_step, callbacks=[health])

Nothing of Megatron is imported: the callback is recognised by its methods. Without the ``with`` a
run that ends by an exception or by Megatron's own ``sys.exit`` (signal, duration, rerun state
machine) is closed when the process ends; there is no event for either.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from healthcheck.errors import UsageError
from healthcheck.events import EventKind
from healthcheck.outcome import Ending
from healthcheck.protocols import Capabilities
from healthcheck.trainers.adapting import Forwarded, NativeControls, joined, scale_schedules
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.megatron_bridge.grads import MainGradView, show_gradients
from healthcheck.trainers.megatron_bridge.state import (
    batch_size,
    checkpoint_folder,
    clip_limit,
    last_evaluations,
    learning_rate,
    main_loss,
    newest_checkpoint,
    part_of,
    results,
    steps_done,
)
from healthcheck.trainers.native import AnnouncedWatch, WatchedResults, read_state, write_state
from healthcheck.trainers.opening import SessionOptions, rank_of_process
from healthcheck.trainers.stopping import ending_of

if TYPE_CHECKING:
    from healthcheck.session import Session

LOG_PREFIX = "healthcheck/"

_AFTER = "Megatron Bridge's callbacks run after the update"
_UNSEEN = f"it needs a look just before or after an update; {_AFTER}"
_NO_BATCH = "Megatron Bridge's callbacks are not given the batch"
_NO_EPOCHS = "Megatron Bridge counts iterations, it has no epochs"

_NOT_MEASURED = (
    *("params.no_gradient", "params.not_in_optimizer", "params.optimizer_orphans", "params.unmoved"),
    *("update_ratio", "updates.lost", "lr.jump", "optimizer.replaced", "grads.leftover"),
)

CAPABILITIES = Capabilities(
    trainer="megatron_bridge",
    events=frozenset(EventKind)
    - {
        EventKind.EPOCH_START,
        EventKind.EPOCH_END,
        EventKind.BATCH_READY,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
    },
    controls=frozenset({"stop", "checkpoint", "scale_lr", "log"}),
    gaps={
        "epoch_start": _NO_EPOCHS,
        "epoch_end": _NO_EPOCHS,
        "batch_ready": _NO_BATCH,
        **dict.fromkeys(_NOT_MEASURED, _UNSEEN),
        **dict.fromkeys(("batch.targets", "batch.nonfinite", "batch.hash_repeat", "time.data"), _NO_BATCH),
        "loss_before_update": _AFTER,
        "before_update": _AFTER,
        "after_update": _AFTER,
        "skip_update": f"{_AFTER}; HealthCheckCallback.skip_iteration leaves out a coming one",
        "checkpoint_path": "Megatron Bridge writes checkpoints under checkpoint.save; it takes no other path",
    },
)

_ABSENT = object()


class MegatronControls(NativeControls):
    """Ends the loop by ``train_iters`` and saves by ``save_interval``; both are given back afterwards."""

    def __init__(self, base: TorchControls, owner: HealthCheckCallback) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner
        self._changed: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def end_loop(self, reason: str) -> None:
        """The loop ends when the iteration under way (or the last one) is counted.

        It then saves a last checkpoint, if it saves any, and ends as if it had been planned so.
        """
        state = self._owner.state
        if state is not None:
            last = max(self._owner.last_iteration, steps_done(state))
            self._set(state.cfg.train, "train_iters", min(last, int(state.cfg.train.train_iters)))

    def save(self, path: Path | None) -> str:
        state, session = self._owner.state, self._owner.watch.session
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        if state is None or session is None:
            raise UsageError("training has not begun")
        root = part_of(state, "checkpoint", "save")
        if not root:
            raise UsageError("checkpoint.save is not set, so Megatron Bridge saves nothing")
        self._set(state.cfg.checkpoint, "save_interval", 1)
        counted = steps_done(state)
        return checkpoint_folder(root, max(self._owner.last_iteration, counted))

    def scale_lr(self, factor: float) -> list[float]:
        optimizer, scheduler = self._owner.optimizer, self._owner.scheduler
        rates = []
        for group in getattr(optimizer, "param_groups", None) or ():
            group["lr"] = group["lr"] * factor
            rates.append(float(group["lr"]))
        scale_schedules([scheduler] if scheduler is not None else [], factor)
        return rates

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        state = self._owner.state
        board = getattr(state, "tensorboard_logger", None)
        if board is not None:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)
        wandb = getattr(state, "wandb_logger", None)
        if wandb is not None:
            wandb.log(dict(metrics), step)

    def _set(self, section: Any, name: str, value: Any) -> None:
        before = getattr(section, name, _ABSENT)
        self._changed.setdefault((id(section), name), (section, name, before))
        setattr(section, name, value)

    def give_back(self, *names: str) -> None:
        """Undo what was changed in the configuration."""
        for key, (section, name, before) in list(self._changed.items()):
            if name in names:
                del self._changed[key]
                if before is _ABSENT:
                    delattr(section, name)
                else:
                    setattr(section, name, before)


_training: weakref.WeakSet[HealthCheckCallback] = weakref.WeakSet()


class HealthCheckCallback(WatchedResults):
    """Watches one ``pretrain`` at a time, on every rank.

    :param rules: path, pack name, dict of rules, or a list of these; None finds the nearest
        ``healthcheck.yaml``, else the recommended pack.
    :param profile: profile of the rule file.
    :param session: a session that is open already; by default the one that watches this process,
        else one of its own for each training.
    :param options: as for :func:`healthcheck.watch`: ``observe``, ``fail_on``, ``console``, ...

    All plugins of the session and all of Megatron's callbacks share ``context.user_state``.
    """

    def __init__(
        self, rules: Any = None, profile: str | None = None, *, session: Session | None = None, **options: Any
    ) -> None:
        self.watch: AnnouncedWatch = AnnouncedWatch(
            SessionOptions(rules=rules, profile=profile, **options), CAPABILITIES, session, hooked=False
        )
        self.state: Any = None
        """Megatron's ``GlobalState``, from the beginning of training to its end."""
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.last_iteration = 0
        """Number, from 1, of the iteration that was begun last."""
        self._lr: Any = None
        self._controls: MegatronControls | None = None
        self._model: Any = None
        self._view: MainGradView | None = None
        self._forwarded = Forwarded()
        self._saved = 0
        self._awaited: set[str] = set()
        """Evaluations that Megatron makes after ``on_train_end``."""
        self._trained = False

    # -- ends -------------------------------------------------------------------------

    def close(self, ending: Ending | None = None) -> None:
        """End the watch and write the report. Safe to call twice."""
        if self._controls is not None:
            self._controls.give_back("train_iters", "save_interval")
        self.watch.end(ending)
        _training.discard(self)
        self.state = self.optimizer = self.scheduler = self._model = self._view = None

    def __enter__(self) -> HealthCheckCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(ending_of(error))

    @property
    def session(self) -> Session | None:
        """Looked at from outside after training: an evaluation that has not come is not waited for any more."""
        if self._trained and self.watch.active:
            self.close(Ending())
        return self.watch.session

    def skip_iteration(self, number: int) -> None:
        """Leave out a coming iteration, counted from 1: its data is drawn, nothing is computed.

        Raises ``UsageError`` before training has begun, or for an iteration that has begun.
        """
        if self.state is None:
            raise UsageError("training has not begun")
        if number <= self.last_iteration:
            raise UsageError(f"iteration {number:,} has begun already; the next one is {self.last_iteration + 1:,}")
        self.state.cfg.train.iterations_to_skip.append(number)

    # -- training ---------------------------------------------------------------------

    def on_train_start(self, context: Any) -> None:
        self.watch.guard(self._begin, context)

    def on_train_step_start(self, context: Any) -> None:
        self.watch.guard(self._step_begins, context)

    def on_train_step_end(self, context: Any) -> None:
        self.watch.guard(self._step_ends, context)

    def on_train_end(self, context: Any) -> None:
        self.watch.guard(self._train_ends, context)

    def on_checkpoint_save(self, context: Any) -> None:
        """From version 0.6.2 on; before that a checkpoint is found at the next iteration."""
        self.watch.guard(self._checkpoint, context.state)

    # -- evaluation and test ----------------------------------------------------------

    def on_eval_start(self, context: Any) -> None:
        self.watch.guard(self.watch.evaluation_begins)

    def on_eval_step_end(self, context: Any) -> None:
        self.watch.guard(self.watch.emit, EventKind.EVAL_STEP, phase="eval")

    def on_eval_end(self, context: Any) -> None:
        self.watch.guard(self._evaluated, context, "eval")

    def on_test_start(self, context: Any) -> None:
        self.watch.guard(self.watch.evaluation_begins, EventKind.TEST_START)

    def on_test_step_end(self, context: Any) -> None:
        self.watch.guard(self.watch.emit, EventKind.TEST_STEP, phase="test")

    def on_test_end(self, context: Any) -> None:
        self.watch.guard(self._evaluated, context, "test")

    # -- inside -----------------------------------------------------------------------

    def _begin(self, context: Any) -> None:
        state = context.state
        for other in list(_training):  # a training that ended by an exception says so to nobody
            if other.state is not state:
                other.close(Ending())
        self.state, self.optimizer, self.scheduler = state, context.optimizer, context.scheduler
        done = self.last_iteration = self._saved = steps_done(state)
        self._model = joined(context.model or (), "chunk")
        self._awaited, self._trained = set(), False
        rank = rank_of_process()
        kept = None
        load = part_of(state, "checkpoint", "load") or part_of(state, "checkpoint", "save")
        if done and load:
            kept = read_state(checkpoint_folder(load, done), rank[0] if rank else 0)
        most = part_of(state, "train", "train_iters")
        begun = self.watch.begin(
            self._make_controls,
            model=self._model,
            optimizers=[],
            step=done,
            max_steps=int(most) if most else None,
            state=kept,
            ranks=rank,
        )
        if not begun or self.watch.session is None or self.watch.machine is None:
            return
        _training.add(self)
        self._view = MainGradView(self.watch.machine.view)
        self._forwarded = Forwarded(self.watch.session.alerts)
        context.user_state.update(self.watch.session.user_state)
        self.watch.session.user_state = context.user_state

    def _make_controls(self, base: Any) -> MegatronControls:
        self._controls = MegatronControls(base, self)
        return self._controls

    def _step_begins(self, context: Any) -> None:
        source = self.watch.source
        if not self.watch.active or source is None:
            return
        done = steps_done(context.state)
        if self.watch.evaluating:  # Megatron's time limit ended it without a word
            self.watch.evaluation_ends()
        self._find_checkpoint(context.state, done)
        if self._controls is not None:
            self._controls.give_back("save_interval")
        self.last_iteration = done + 1
        self._lr = learning_rate(context.optimizer)
        source.begins(self.last_iteration)

    def _step_ends(self, context: Any) -> None:
        source = self.watch.source
        if not self.watch.active or source is None:
            return
        step = self.last_iteration = steps_done(context.state) + 1
        skipped = bool(context.skipped_iter)
        source.begins(step)
        norm = None if skipped else context.grad_norm
        limit = clip_limit(context.state)
        if not skipped and self._view is not None and self.watch.session is not None:
            show_gradients(self.watch.session, self._view, step, norm, limit)
        samples, tokens = batch_size(context.state)
        source.ends(
            step,
            loss=main_loss(context.loss_dict),
            losses=context.loss_dict or None,
            grad_norm=norm,
            max_norm=limit,
            lr=self._lr if self._lr is not None else learning_rate(context.optimizer),
            tokens=tokens,
            samples=samples,
            skipped=skipped,
        )
        self._tell_loggers(context.state, step)

    def _tell_loggers(self, state: Any, step: int) -> None:
        if self.watch.session is None or self._controls is None or not self.watch.forwards:
            return
        values = self._forwarded.news(self.watch.session.alerts)
        every = part_of(state, "logger", "log_interval")
        if isinstance(every, int) and every > 0 and step % every == 0:
            values = {**self.watch.metrics_to_log(), **values}
        if values:
            prefix = str(self.watch.session.settings.get("log_prefix") or LOG_PREFIX)
            self._controls.log({f"{prefix}{name}": value for name, value in values.items()}, step)

    def _train_ends(self, context: Any) -> None:
        if not self.watch.active:
            return self.close(Ending())
        self._find_checkpoint(context.state, steps_done(context.state))
        if self._controls is not None:
            self._controls.give_back("train_iters", "save_interval")
        self._trained = True
        self._awaited = last_evaluations(context.state)
        self.watch.step_aside() if self._awaited else self.close(Ending())

    def _evaluated(self, context: Any, phase: str) -> None:
        kind = EventKind.EVAL_END if phase == "eval" else EventKind.TEST_END
        self.watch.evaluation_ends(kind, metrics=results(context.total_loss_dict))
        if self._trained:
            self._awaited.discard(phase)
            if not self._awaited:
                self.close(Ending())

    # -- checkpoints ------------------------------------------------------------------

    def _find_checkpoint(self, state: Any, done: int) -> None:
        """Version 0.3.1 does not announce what it saves."""
        root = part_of(state, "checkpoint", "save")
        if root and done > self._saved and os.path.isdir(checkpoint_folder(root, done)):
            self._checkpoint(state)

    def _checkpoint(self, state: Any) -> None:
        root = part_of(state, "checkpoint", "save")
        if not self.watch.active or not root:
            return
        self._saved = steps_done(state)
        folder = newest_checkpoint(root, self._saved)
        self.watch.emit(EventKind.CHECKPOINT_SAVED, path=folder)
        kept = self.watch.state()
        if kept is not None and os.path.isdir(folder):
            write_state(folder, kept, self.watch.session.info.rank if self.watch.session is not None else 0)


def attach(manager: Any, session: Session | None = None, **options: Any) -> HealthCheckCallback:
    """Add the callback to a ``CallbackManager``, for ``pretrain(..., callbacks=manager)``; returns the callback."""
    for function in manager.list_callbacks("on_train_start"):
        known = getattr(function, "__self__", None)
        if isinstance(known, HealthCheckCallback):
            return known
    callback = HealthCheckCallback(session=session, **options)
    manager.add(callback)
    return callback
