"""NeMo AutoModel: a mixin for its released recipes, and callback objects for them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable as Function
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from healthcheck.core.errors import UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.names import canonical_metric
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import TorchControls, ending_of
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions
from healthcheck.trainers.native import (
    AnnouncedWatch,
    Forwarded,
    NativeControls,
    WatchedResults,
    joined,
    listed,
    mix_in,
    read_state,
    scale_schedules,
    write_state,
)

if TYPE_CHECKING:
    from healthcheck.run.session import Session

F = TypeVar("F", bound=Function[..., Any])

EVENTS = (
    "on_train_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_save_checkpoint",
    "on_exception",
    "on_train_end",
)


class Callback:
    """Override what you need. All methods run on every rank; see :func:`rank_zero_only`."""

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        """After setup, before the first update."""

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        """After each update. ``train_log_data``: its ``step`` (from 0), ``epoch``, ``metrics``, ``timestamp``."""

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        """After all validation sets. ``val_results``: name of the set -> its metrics sample."""

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        """A checkpoint was written. ``checkpoint_info``: ``epoch``, ``step``, ``train_loss``, ``val_losses``,
        ``checkpoint_path``, ``best_metric_key``."""

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        """Training failed with ``exception``, which is raised again afterwards."""

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        """Training ended without an exception."""


def rank_zero_only(function: F) -> F:
    """Call a method of a callback on the main rank only, as ``recipe.dist_env.is_main`` says."""

    @functools.wraps(function)
    def on_main(self: Any, recipe: Any, *args: Any, **kwargs: Any) -> Any:
        main = getattr(getattr(recipe, "dist_env", None), "is_main", True)
        return function(self, recipe, *args, **kwargs) if main else None

    return cast("F", on_main)


def call_all(callbacks: Iterable[Any], event: str, recipe: Any, **kwargs: Any) -> None:
    """Call an event of each callback in order, those that do not have it excepted. Their errors are the caller's."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(recipe, **kwargs)


# --------------------------------------------------------------------------------------------------
# Callbacks for recipes of NeMo AutoModel that have none: a mixin that calls them in the documented places.


class CallbackRecipe:
    """Calls callbacks from a released recipe: ``class Mine(CallbackRecipe, TheRecipe)``.

    :param callbacks: objects with methods of :class:`Callback`; their errors end the training.
    """

    def __init__(self, cfg: Any, *args: Any, callbacks: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]
        # Recipes keep what is set on them in checkpoints; a tuple is left alone.
        self.callbacks = tuple(callbacks)
        self._validation_seen: dict[str, Any] = {}

    def run_train_validation_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._call("on_train_start")
            result = super().run_train_validation_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._call("on_exception", exception=error)
            raise
        self._call("on_train_end")
        return result

    def log_train_metrics(self, log_data: Any, *args: Any, **kwargs: Any) -> Any:
        self._train_metrics_ready(log_data)
        result = super().log_train_metrics(log_data, *args, **kwargs)  # type: ignore[misc]
        self._call("on_train_batch_end", train_log_data=log_data)
        return result

    def log_val_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """``(name, data, logger)``, or ``(data)`` in recipes that know one validation set only."""
        result = super().log_val_metrics(*args, **kwargs)  # type: ignore[misc]
        given = [*args, *(kwargs[k] for k in ("val_name", "log_data") if k in kwargs)]
        name, data = (given[0], given[1]) if isinstance(given[0], str) else ("validation", given[0])
        if data is not None:
            self._validation_seen[name] = data
        if self._validation_complete(name):
            results, self._validation_seen = self._validation_seen, {}
            self._call("on_validation_end", val_results=results)
        return result

    def save_checkpoint(
        self,
        epoch: int,
        step: int,
        train_loss: Any = None,
        val_loss: Any = None,
        best_metric_key: str = "default",
        **kwargs: Any,
    ) -> Any:
        given = (epoch, step, train_loss, val_loss)
        result = super().save_checkpoint(*given, best_metric_key=best_metric_key, **kwargs)  # type: ignore[misc]
        config = getattr(getattr(self, "checkpointer", None), "config", None)
        if getattr(config, "enabled", True):
            root = str(getattr(config, "checkpoint_dir", "") or "")
            info = {
                "epoch": epoch,
                "step": step,
                "train_loss": train_loss,
                "val_losses": val_loss or {},
                "checkpoint_path": os.path.join(root, f"epoch_{epoch}_step_{step}"),
                "best_metric_key": best_metric_key,
            }
            self._call("on_save_checkpoint", checkpoint_info=info)
        return result

    def _train_metrics_ready(self, log_data: Any) -> None:
        """Before the recipe logs the metrics of an update."""

    def _call(self, event: str, **kwargs: Any) -> None:
        call_all(self.callbacks, event, self, **kwargs)

    def _validation_complete(self, name: str) -> bool:
        """Whether the set that was just reported is the last one of this validation."""
        expected = list(getattr(self, "val_dataloaders", None) or ())
        if name in expected and getattr(self, "domain_mixture", None) is not None:
            return False  # the weighted sum of all sets comes last
        return set(expected) <= set(self._validation_seen)


# --------------------------------------------------------------------------------------------------
# NeMo AutoModel: a mixin for its released recipes, and callback objects for them.
#
# ::
#
#     from healthcheck.trainers.automodel import HealthCheckRecipe
#
#
#     class Recipe(HealthCheckRecipe, TrainFinetuneRecipeForNextTokenPrediction):
#         healthcheck = {"rules": "team.yaml"}
#
#
#     recipe = Recipe(cfg)
#     recipe.setup()
#     recipe.run_train_validation_loop()
#
# Recipes without methods for their metrics (the Eagle, DFlash, DSpark and diffusion ones of 0.7.0)
# report their steps to nobody; torch's own hooks do not see them either then.


LOG_PREFIX = "healthcheck/"

_NO_RESULTS = ("lr", "mem", "num_label_tokens", "num_tokens_per_step")
_MEASURED = ("loss", "grad_norm", "lr")


_NO_EPOCHS = "recipes announce no epochs; every event carries its epoch"
_NO_TESTS = "recipes validate, they have no test"

CAPABILITIES = Capabilities(
    trainer="automodel",
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
        "eval_step": "recipes do not announce the batches of a validation",
        "checkpoint_path": "recipes write checkpoints under checkpoint.checkpoint_dir; they take no other path",
    },
)


class AutoModelControls(NativeControls):
    """Ends the loop as SIGTERM would: no validation, a checkpoint if there are any, then the regular end."""

    def __init__(self, base: TorchControls, owner: HealthCheckCallback, recipe: Any) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner
        self._recipe = recipe
        self._save_wanted = False
        self._waiting: dict[str, float] = {}

    def end_loop(self, reason: str) -> None:
        self._recipe.step_scheduler.sigterm_flag = True
        session = self._owner.session
        if session is not None:
            session.note("the recipe ends as after SIGTERM: it saves a checkpoint, and MLflow marks its run KILLED")

    def save(self, path: Path | None) -> str:
        config = self._recipe.checkpointer.config
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        if not getattr(config, "enabled", True):
            raise UsageError("checkpoint.enabled is off, so the recipe saves nothing")
        self._save_wanted = True
        scheduler = self._recipe.step_scheduler
        return os.path.join(str(config.checkpoint_dir), f"epoch_{scheduler.epoch}_step_{scheduler.step}")

    def heed(self) -> None:
        """A step's results are there: save now if that was asked for and the recipe will not do so itself."""
        sample, scheduler = self._owner.sample, self._recipe.step_scheduler
        if not self._save_wanted or sample is None:
            return
        self._save_wanted = False
        if getattr(scheduler, "is_ckpt_step", False):
            return
        key = getattr(self._recipe, "best_metric_key", "default")
        loss = sample.metrics.get("loss")
        self._recipe.save_checkpoint(scheduler.epoch, scheduler.step, loss, {}, best_metric_key=key)

    def scale_lr(self, factor: float) -> list[float]:
        rates = super().scale_lr(factor)
        scale_schedules(listed(getattr(self._recipe, "lr_scheduler", None)), factor)
        return rates

    def schedulers(self) -> Iterable[Any]:
        return listed(getattr(self._recipe, "lr_scheduler", None))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """With the metrics of the next step, which is when the recipe logs."""
        self._waiting.update(metrics)

    def take_waiting(self) -> dict[str, float]:
        waiting, self._waiting = self._waiting, {}
        return waiting


class HealthCheckCallback(WatchedResults, Callback):
    """Watches one recipe. :class:`HealthCheckRecipe` makes and calls it; a recipe that calls callbacks may too.

    :param rules: path, pack name, dict of rules, or a list of these; None finds the nearest
        ``healthcheck.yaml``, else the recommended pack.
    :param session: a session that is open already; by default the one that watches this process,
        else one of its own for each training.
    :param options: as for :func:`healthcheck.watch`.
    """

    def __init__(
        self, rules: Any = None, profile: str | None = None, *, session: Session | None = None, **options: Any
    ) -> None:
        given = SessionOptions(rules=rules, profile=profile, **options)
        self.watch: AnnouncedWatch = AnnouncedWatch(given, CAPABILITIES, session)
        self.controls: AutoModelControls | None = None
        self.restored_from: str | None = None
        """Checkpoint that the recipe was restored from, where it is known."""
        self.sample: Any = None
        """Metrics sample of the update that has just been made."""
        self._model: Any = None
        self._forwarded = Forwarded()

    # -- the documented interface -----------------------------------------------------

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        self.watch.guard(self._begin, recipe)

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        self.watch.guard(self._batch_ended, recipe, kwargs["train_log_data"])

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        self.watch.guard(self._validated, recipe, kwargs["val_results"])

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        self.watch.guard(self._saved, kwargs["checkpoint_info"])

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        self._end(ending_of(kwargs["exception"]))

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        self._end(Ending())

    # -- what only the mixin knows ----------------------------------------------------

    def update_begins(self, recipe: Any) -> None:
        """A step's batches are there."""
        if self.watch.active and self.watch.source is not None:
            self.watch.in_epoch(float(recipe.step_scheduler.epoch))
            self.watch.source.begins(int(recipe.step_scheduler.step) + 1)

    def validation_begins(self) -> None:
        self.watch.evaluation_begins()

    def to_log(self) -> dict[str, float]:
        """Metrics and alerts for the recipe's own loggers."""
        if not self.watch.active or self.session is None or not self.watch.forwards:
            return {}
        waiting = {} if self.controls is None else self.controls.take_waiting()
        measured = self.watch.metrics_to_log(leave_out=_MEASURED)
        values = {**measured, **self._forwarded.news(self.session.alerts), **waiting}
        prefix = str(self.session.settings.get("log_prefix") or LOG_PREFIX)
        return {f"{prefix}{name}": value for name, value in values.items()}

    # -- inside -----------------------------------------------------------------------

    def _begin(self, recipe: Any) -> None:
        scheduler = recipe.step_scheduler
        rank = int(getattr(recipe.dist_env, "rank", 0) or 0)
        done = int(scheduler.step)
        self._model = joined(listed(getattr(recipe, "model_parts", None) or getattr(recipe, "model", None)), "part")
        most = getattr(scheduler, "max_steps", None)
        begun = self.watch.begin(
            functools.partial(self._make_controls, recipe),
            model=self._model,
            optimizers=listed(recipe.optimizer),
            step=done,
            epoch=float(scheduler.epoch),
            max_steps=int(most) if most else None,
            state=read_state(self.restored_from, rank) if done else None,
            ranks=(rank, int(getattr(recipe.dist_env, "world_size", 1) or 1)),
        )
        if begun and self.session is not None:
            # Each rank's micro-batch loss is its share times the number of ranks: to be added up.
            self.watch.losses_weigh(1.0)
            self._forwarded = Forwarded(self.session.alerts)

    def _make_controls(self, recipe: Any, base: Any) -> AutoModelControls:
        self.controls = AutoModelControls(base, self, recipe)
        return self.controls

    def _batch_ended(self, recipe: Any, sample: Any) -> None:
        source = self.watch.source
        if not self.watch.active or source is None or sample is self.sample:  # the mixin has announced it early
            return
        self.sample = sample
        values: Mapping[str, Any] = sample.metrics
        self.watch.in_epoch(float(sample.epoch))
        source.ends(
            int(sample.step) + 1,
            loss=values.get("loss"),
            grad_norm=values.get("grad_norm"),
            lr=values.get("lr"),
            tokens=values.get("num_tokens_per_step"),
            metrics=_others(values),
        )
        if self.controls is not None:
            self.controls.heed()

    def _validated(self, recipe: Any, val_results: Mapping[str, Any]) -> None:
        for name, sample in val_results.items():
            found = {k: v for k, v in sample.metrics.items() if k not in _NO_RESULTS}
            dataset = "" if name == "default" and len(val_results) == 1 else name
            self.watch.evaluation_begins(dataset=dataset)
            self.watch.evaluation_ends(metrics=found, dataset=dataset)
        if self.controls is not None:
            self.controls.heed()

    def _saved(self, info: Mapping[str, Any]) -> None:
        folder = str(info["checkpoint_path"])
        self.watch.emit(EventKind.CHECKPOINT_SAVED, path=folder)
        kept = self.watch.state()
        if kept is not None and os.path.isdir(folder):
            write_state(folder, kept, self.session.info.rank if self.session is not None else 0)

    def _end(self, ending: Ending) -> None:
        self.watch.end(ending)
        self.controls = self.sample = self._model = None


class HealthCheckRecipe(CallbackRecipe):
    """Watches a released recipe: ``class Mine(HealthCheckRecipe, TheRecipe)``.

    Options of :class:`HealthCheckCallback` stand in the class attribute ``healthcheck``, or are given
    as ``Mine(cfg, healthcheck={"rules": ...})``. WatchedResults are on ``recipe.health``.
    """

    healthcheck: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        cfg: Any,
        *args: Any,
        callbacks: Sequence[Any] = (),
        healthcheck: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        ours = [c for c in callbacks if isinstance(c, HealthCheckCallback)]
        health = ours[0] if ours else HealthCheckCallback(**(healthcheck or type(self).healthcheck))
        others = [c for c in callbacks if c is not health]
        super().__init__(cfg, *args, callbacks=[health, *others], **kwargs)

    @property
    def health(self) -> HealthCheckCallback:
        """The callback that watches this recipe."""
        found: HealthCheckCallback = self.callbacks[0]
        return found

    def load_checkpoint(self, restore_from: str | None = None, *args: Any, **kwargs: Any) -> Any:
        result = super().load_checkpoint(restore_from, *args, **kwargs)  # type: ignore[misc]
        self.health.restored_from = _restored_folder(self, restore_from)
        return result

    def _run_train_optim_step(self, *args: Any, **kwargs: Any) -> Any:
        self.health.watch.guard(self.health.update_begins, self)
        return super()._run_train_optim_step(*args, **kwargs)  # type: ignore[misc]

    def _run_validation_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self.health.watch.guard(self.health.validation_begins)
        return super()._run_validation_epoch(*args, **kwargs)  # type: ignore[misc]

    def _train_metrics_ready(self, log_data: Any) -> None:
        """The watch comes first, so that the recipe's loggers get its metrics with the update's own."""
        health = self.health
        health.on_train_batch_end(self, train_log_data=log_data)
        for name, value in (health.watch.guard(health.to_log) or {}).items():
            log_data.metrics.setdefault(name, value)


def attach(recipe: Any, session: Session | None = None, **options: Any) -> HealthCheckCallback:
    """Watch a recipe that exists already, before its ``run_train_validation_loop()``; returns ``recipe.health``."""
    if not isinstance(recipe, HealthCheckRecipe):
        health = HealthCheckCallback(session=session, **options)
        callbacks = (health, *(getattr(recipe, "callbacks", None) or ()))
        mix_in(HealthCheckRecipe, recipe)
        recipe.callbacks, recipe._validation_seen = callbacks, {}
        if hasattr(recipe, "step_scheduler"):  # it was set up already, from a checkpoint perhaps
            health.restored_from = _restored_folder(recipe, None)
    found: HealthCheckCallback = recipe.health
    return found


def _others(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Metrics of the recipe's own that we do not measure; a device scalar stays where it is."""
    found = {}
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in _MEASURED and (number or getattr(value, "ndim", None) == 0):
            found[canonical_metric(name)] = value
    return found or None


def _restored_folder(recipe: Any, restore_from: str | None) -> str | None:
    """The checkpoint whose step the recipe has taken over: named by the user, else by its step."""
    root = str(getattr(getattr(getattr(recipe, "checkpointer", None), "config", None), "checkpoint_dir", "") or "")
    if restore_from and restore_from.upper() != "LATEST":
        named = os.path.join(root, restore_from)
        return restore_from if os.path.isdir(restore_from) else named
    done = int(getattr(getattr(recipe, "step_scheduler", None), "step", 0))
    try:
        there = [name for name in os.listdir(root) if name.endswith(f"_step_{done - 1}")]
    except OSError:
        there = []
    return os.path.join(root, there[-1]) if done and there else None


# --------------------------------------------------------------------------------------------------
# NeMo AutoModel: a mixin for its released recipes, and callback objects for them.


__all__ = [
    "CAPABILITIES",
    "EVENTS",
    "LOG_PREFIX",
    "AutoModelControls",
    "Callback",
    "CallbackRecipe",
    "HealthCheckCallback",
    "HealthCheckRecipe",
    "attach",
    "rank_zero_only",
]
