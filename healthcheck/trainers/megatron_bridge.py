"""Megatron Bridge 0.3.1 and later: a callback for ``pretrain`` and for ``CallbackManager``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.events import Event, EventKind, ModelView
from healthcheck.core.names import canonical_metric
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import TorchControls, ending_of
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions, rank_of_process
from healthcheck.trainers.native import (
    AnnouncedWatch,
    Forwarded,
    NativeControls,
    WatchedResults,
    joined,
    read_state,
    scale_schedules,
    write_state,
)

if TYPE_CHECKING:
    from healthcheck.run.session import Session


class _WithMainGrad:
    """A parameter as probes see it, with its buffer as its gradient (often of a wider type than its own)."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Any:
        buffer = getattr(self._parameter, "main_grad", None)
        return buffer if buffer is not None else self._parameter.grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)


class MainGradView:
    """Implements :class:`healthcheck.core.events.ModelView` over another one, with gradients from ``main_grad``.

    Read after the update, where clipping has been applied in place; on one rank, the buffer of a
    distributed optimizer holds reduced values for this rank's own part only.
    """

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._known: dict[int, _WithMainGrad] = {}

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        named = self._view.named_parameters()
        if len(self._known) > len(named):
            self._known.clear()
        return [(name, self._known.setdefault(id(p), _WithMainGrad(p))) for name, p in named]

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        return self._view.named_modules()

    def optimizers(self) -> Sequence[Any]:
        return ()

    @property
    def has_gradients(self) -> bool:
        return any(p.requires_grad and p.grad is not None for _, p in self.named_parameters())


def show_gradients(session: Session, view: MainGradView, step: int, norm: Any, limit: float | None) -> None:
    """Gradients are still in their buffers after the update: one late look at them."""
    if session.wants(EventKind.BACKWARD_END) and view.has_gradients:
        session.emit(Event(EventKind.BACKWARD_END, step, model=view, grad_norm=norm, max_norm=limit))


# --------------------------------------------------------------------------------------------------
# Reading Megatron Bridge's ``GlobalState``: steps, rates, results, and where checkpoints are.


MAIN_LOSS = "lm loss"


def steps_done(state: Any) -> int:
    """Iterations that are behind us. At ``on_train_step_end`` the one just made is not counted yet."""
    return int(state.train_state.step)


def part_of(state: Any, section: str, name: str, default: Any = None) -> Any:
    """``cfg.<section>.<name>``, or ``default`` where this version or this recipe has none."""
    return getattr(getattr(getattr(state, "cfg", None), section, None), name, default)


def learning_rate(optimizer: Any) -> Any:
    """The largest rate of all groups: ``MegatronOptimizer`` and ``ChainedOptimizer`` show all of them."""
    rates = [group["lr"] for group in getattr(optimizer, "param_groups", None) or () if group.get("lr") is not None]
    return max(rates) if rates else None


def main_loss(losses: Mapping[str, Any] | None) -> Any:
    """The loss that is trained on; None on all but the last pipeline stage, where there are no losses."""
    if not losses:
        return None
    if MAIN_LOSS in losses:
        return losses[MAIN_LOSS]
    named = [name for name in losses if "loss" in name.lower()]
    return losses[named[0] if named else next(iter(losses))]


def results(total: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Evaluation results: the main loss as ``loss``, others under their own names."""
    if not total:
        return None
    main = MAIN_LOSS if MAIN_LOSS in total else next((n for n in total if "loss" in n.lower()), "")
    return {("loss" if name == main else canonical_metric(name.replace(" ", "_"))): v for name, v in total.items()}


def last_evaluations(state: Any) -> set[str]:
    """What ``pretrain`` does after training: ``eval``, ``test``, both, or nothing."""
    flags = (("eval", "do_valid"), ("test", "do_test"))
    return {name for name, flag in flags if getattr(state.train_state, flag, False) is True}


def batch_size(state: Any) -> tuple[int | None, int | None]:
    """``(samples, tokens)`` of one iteration; None where it is ramped up or the length is not fixed."""
    samples = part_of(state, "train", "global_batch_size")
    if not isinstance(samples, int) or part_of(state, "train", "rampup_batch_size"):
        return None, None
    length = part_of(state, "model", "seq_length")
    return samples, samples * length if isinstance(length, int) else None


def checkpoint_folder(root: Any, step: int) -> str:
    """Where Megatron writes the checkpoint after ``step`` iterations."""
    return os.path.join(os.fspath(root), f"iter_{step:07d}")


def newest_checkpoint(root: Any, step: int) -> str:
    """The folder of ``step``, or the newest one there: an asynchronous save is announced when it is done."""
    folder = checkpoint_folder(root, step)
    if os.path.isdir(folder):
        return folder
    try:
        there = sorted(name for name in os.listdir(root) if name.startswith("iter_") and name[5:].isdigit())
    except OSError:
        there = []
    return os.path.join(os.fspath(root), there[-1]) if there else folder


def clip_limit(state: Any) -> float | None:
    """The norm that gradients are clipped to; None where they are not."""
    limit = part_of(state, "optimizer", "clip_grad")
    return float(limit) if isinstance(limit, (int, float)) and limit > 0 else None


# --------------------------------------------------------------------------------------------------
# Megatron Bridge 0.3.1 and later: a callback for ``pretrain`` and for ``CallbackManager``.
#
# ::
#
#     from healthcheck.trainers.megatron_bridge import HealthCheckCallback
#
#     with HealthCheckCallback() as health:
#         pretrain(config, forward_step, callbacks=[health])
#
# Nothing of Megatron is imported: the callback is recognised by its methods. Without the ``with`` a
# run that ends by an exception or by Megatron's own ``sys.exit`` (signal, duration, rerun state
# machine) is closed when the process ends; there is no event for either.


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


# --------------------------------------------------------------------------------------------------
# Megatron Bridge 0.3.1 and later: a callback for ``pretrain`` and for ``CallbackManager``.


__all__ = ["CAPABILITIES", "HealthCheckCallback", "attach"]
