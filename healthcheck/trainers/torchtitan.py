"""torchtitan 0.3.0: a mixin for its ``Trainer``.

::

    from healthcheck.trainers.torchtitan import HealthCheckTrainer


    class WatchedTrainer(HealthCheckTrainer, Trainer):
        healthcheck = {"rules": "team.yaml"}

        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

torchtitan raises by itself on a loss that is not finite, on logging steps, after the update. Where a
rule has kept that update from happening and asked for the end, the end is ours: orderly, with a
checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from healthcheck.core.errors import UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import TorchControls, ending_of
from healthcheck.instrument.patching import Patches
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions, rank_of_process
from healthcheck.trainers.native import (
    AnnouncedWatch,
    Forwarded,
    NativeControls,
    WatchedResults,
    joined,
    listed,
    mix_in,
    read_state,
    write_state,
)

if TYPE_CHECKING:
    from healthcheck.run.session import Session

LOG_PREFIX = "healthcheck/"


_NO_EPOCHS = "torchtitan counts steps, it has no epochs"
_NO_TESTS = "torchtitan validates, it has no test"

CAPABILITIES = Capabilities(
    trainer="torchtitan",
    events=frozenset(EventKind)
    - {
        EventKind.EPOCH_START,
        EventKind.EPOCH_END,
        EventKind.EVAL_STEP,
        EventKind.TEST_START,
        EventKind.TEST_STEP,
        EventKind.TEST_END,
    },
    controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"}),
    gaps={
        **dict.fromkeys(("epoch_start", "epoch_end"), _NO_EPOCHS),
        **dict.fromkeys(("test_start", "test_step", "test_end"), _NO_TESTS),
        "eval_step": "torchtitan does not announce the batches of a validation",
        "checkpoint_path": "torchtitan writes checkpoints under checkpoint.folder; it takes no other path",
    },
)


class TorchTitanControls(NativeControls):
    """Ends the loop through ``should_continue_training`` and saves through ``checkpointer.save``."""

    def __init__(self, base: TorchControls, owner: TrainerWatch) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner

    def end_loop(self, reason: str) -> None:
        """The mixin's ``should_continue_training`` asks."""

    def save(self, path: Path | None) -> str:
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        return self._owner.save_after_step()

    def schedulers(self) -> Iterable[Any]:
        container = getattr(self._owner.trainer, "lr_schedulers", None)
        return listed(getattr(container, "schedulers", None))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger = getattr(getattr(self._owner.trainer, "metrics_processor", None), "logger", None)
        if logger is not None:
            logger.log(self._owner.named(metrics), step)


def inner_optimizers(container: Any) -> list[Any]:
    """The optimizers that do the work. The container is a torch optimizer too, whose step calls theirs."""
    try:
        return list(container)
    except TypeError:
        return listed(container)


def data_ranks(trainer: Any) -> int:
    """Over how many ranks the tokens of a batch are spread."""
    dims = getattr(trainer, "parallel_dims", None)
    ranks = 1
    for name in ("dp_replicate", "dp_shard", "cp"):
        degree = getattr(dims, name, 1)
        ranks *= degree if isinstance(degree, int) and degree > 0 else 1
    return ranks


class TrainerWatch(WatchedResults):
    """Watches one Trainer; ``trainer.health``."""

    def __init__(self, trainer: Any, session: Session | None = None, **options: Any) -> None:
        self.trainer = trainer
        self.watch: AnnouncedWatch = AnnouncedWatch(SessionOptions(**options), CAPABILITIES, session)
        self._patches = Patches()
        self._forwarded = Forwarded()
        self._model: Any = None
        self._save_wanted = False
        self._begun = False

    # -- the run ----------------------------------------------------------------------

    def begin(self) -> None:
        """At the first step: by then a checkpoint has been loaded, and the step counted already."""
        if self._begun:
            return
        self._begun = True
        trainer = self.trainer
        done = int(trainer.step) - 1
        rank, _ = rank_of_process() or (0, 1)
        self._model = joined(trainer.model_parts, "part")
        begun = self.watch.begin(
            lambda base: TorchTitanControls(base, self),
            model=self._model,
            optimizers=inner_optimizers(trainer.optimizers),
            step=done,
            max_steps=int(trainer.config.training.steps),
            state=read_state(self._folder(done), rank) if done else None,
        )
        if not begun or self.session is None:
            return
        # Micro-batch losses are divided by the tokens of all ranks: each is its rank's share.
        self.watch.losses_weigh(float(data_ranks(trainer)))
        self._forwarded = Forwarded(self.session.alerts)
        self._patches = Patches()
        for owner, name, make in (
            (trainer.metrics_processor, "log", self._log),
            (trainer.metrics_processor, "log_validation", self._log_validation),
            (getattr(trainer, "validator", None), "validate", self._validate),
            (trainer.checkpointer, "save", self._save),
        ):
            if owner is not None:
                self._patches.replace(owner, name, make)

    def end(self, ending: Ending) -> None:
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        self._patches.restore()
        self.watch.end(ending)
        self._model, self._begun = None, False

    def step_begins(self) -> None:
        self.begin()
        if self.watch.active and self.watch.source is not None:
            self.watch.source.begins(int(self.trainer.step))

    def step_ended(self) -> None:
        if self.watch.active and self.watch.source is not None and self.watch.source.under_way:
            self.watch.source.ends(int(self.trainer.step))

    def ends_in_order(self, error: BaseException) -> bool:
        """Whether the trainer raised about the very thing that a rule has stopped the run for already."""
        if not self.watch.active or not self.watch.stop_pending or not isinstance(error, RuntimeError):
            return False
        if "finite" not in str(error) or self.session is None:
            return False
        self.session.note(f"torchtitan's own check would have raised as well: {error}")
        return True

    # -- checkpoints ------------------------------------------------------------------

    def save_after_step(self) -> str:
        """Have the step's own ``checkpointer.save`` write one; returns where."""
        checkpointer = self.trainer.checkpointer
        if not getattr(checkpointer, "enable", True):
            raise UsageError("checkpoint.enable is off, so torchtitan saves nothing")
        self._save_wanted = True
        return self._folder(int(self.trainer.step)) or "the trainer's checkpoint folder"

    def save_last(self) -> None:
        """After a stop: what the last step of a planned end would have saved."""
        checkpointer = self.trainer.checkpointer
        if getattr(checkpointer, "enable", True):
            checkpointer.save(self.trainer.step, last_step=True)

    def _folder(self, step: int) -> str | None:
        name = getattr(self.trainer.checkpointer, "_create_checkpoint_id", None)
        return None if name is None else str(name(step))

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(curr_step: int, last_step: bool = False, *args: Any, **kwargs: Any) -> Any:
            checkpointer = self.trainer.checkpointer
            wanted, self._save_wanted = self._save_wanted, False
            interval = getattr(checkpointer, "interval", None)
            if wanted and interval is not None:
                checkpointer.interval = 1
            try:
                due = getattr(checkpointer, "_should_save", lambda *_: True)(curr_step, last_step)
                result = original(curr_step, last_step, *args, **kwargs)
            finally:
                if wanted and interval is not None:
                    checkpointer.interval = interval
            if result if isinstance(result, bool) else due:
                self.watch.guard(self._saved, curr_step)
            return result

        return save

    def _saved(self, step: int) -> None:
        folder = self._folder(step)
        self.watch.emit(EventKind.CHECKPOINT_SAVED, path=folder)
        kept = self.watch.state()
        if kept is not None and folder is not None and Path(folder).is_dir():
            write_state(folder, kept, self.session.info.rank if self.session is not None else 0)

    # -- metrics and validation -------------------------------------------------------

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Under the prefix of ours in the trainer's loggers."""
        prefix = str((self.session.settings.get("log_prefix") if self.session is not None else "") or LOG_PREFIX)
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    def _to_log(self) -> dict[str, float]:
        if not self.watch.forwards:
            return {}
        news = self._forwarded.news(self.session.alerts) if self.session is not None else {}
        return self.named({**self.watch.metrics_to_log(leave_out=("loss", "grad_norm")), **news})

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(*args: Any, extra_metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
            ours = self.watch.guard(self._to_log) or {}
            return original(*args, extra_metrics={**ours, **(extra_metrics or {})}, **kwargs)

        return log

    def _log_validation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log_validation(*args: Any, **kwargs: Any) -> Any:
            loss = kwargs.get("loss", args[0] if args else None)
            self.watch.guard(functools.partial(self.watch.evaluation_ends, metrics={"loss": loss}))
            return original(*args, **kwargs)

        return log_validation

    def _validate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def validate(*args: Any, **kwargs: Any) -> Any:
            self.watch.guard(self.watch.evaluation_begins)
            result = original(*args, **kwargs)
            if self.watch.evaluating:  # nothing was logged
                self.watch.guard(self.watch.evaluation_ends)
            return result

        return validate


class HealthCheckTrainer:
    """Watches a Trainer: ``class Mine(HealthCheckTrainer, Trainer)``.

    Options as for :func:`healthcheck.watch` stand in the class attribute ``healthcheck``. WatchedResults are
    on ``trainer.health``.
    """

    healthcheck: ClassVar[Mapping[str, Any]] = {}
    _watch: TrainerWatch | None = None

    @property
    def health(self) -> TrainerWatch:
        """What watches this trainer."""
        if self._watch is None:
            self._watch = TrainerWatch(self, **type(self).healthcheck)
        return self._watch

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self.health.end(ending_of(error))
            raise
        self.health.end(Ending())
        return result

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        health = self.health
        health.watch.guard(health.step_begins)
        try:
            result = super().train_step(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            if not health.ends_in_order(error):
                raise
            result = None
        health.watch.guard(health.step_ended)
        return result

    def should_continue_training(self, *args: Any, **kwargs: Any) -> bool:
        goes_on = bool(super().should_continue_training(*args, **kwargs))  # type: ignore[misc]
        if goes_on and self.health.watch.active and self.health.watch.stop_pending:
            self.health.save_last()
            return False
        return goes_on


def attach(trainer: Any, session: Session | None = None, **options: Any) -> TrainerWatch:
    """Watch a Trainer that exists already, before its ``train()``; returns ``trainer.health``."""
    if trainer.__dict__.get("_watch") is None and not isinstance(trainer, HealthCheckTrainer):
        mix_in(HealthCheckTrainer, trainer)
        trainer._watch = TrainerWatch(trainer, session, **options)
    found: TrainerWatch = trainer.health
    return found


# --------------------------------------------------------------------------------------------------
# torchtitan 0.3.0: a mixin for its ``Trainer``.


__all__ = ["CAPABILITIES", "LOG_PREFIX", "HealthCheckTrainer", "TorchTitanControls", "TrainerWatch", "attach"]
