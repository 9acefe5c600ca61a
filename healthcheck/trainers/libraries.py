"""Libraries without an adapter of their own: where each says that an epoch, an evaluation or an update happens.

One row is one function of a library; ``around`` is written as the call happens: before ``yield`` and after it. How to add a
library: docs/how-to/add-a-library.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from healthcheck.instrument.libraries import Place, Seen, Watching

# -- Keras 3 on the torch backend: its optimizers are its own ----------------------------------


def _own_optimizer(seen: Seen, *given: Any, **named: Any) -> Watching:
    yield
    seen.updates_come()


def _keras_epoch(seen: Seen, callbacks: Any, epoch: int, logs: Any = None) -> Watching:
    seen.epoch_begins(epoch)
    yield


def _keras_epoch_over(seen: Seen, callbacks: Any, epoch: int, logs: Any = None) -> Watching:
    # What has no `val_` is the mean over an epoch of training; each step of it is seen already.
    results = {name: value for name, value in (logs or {}).items() if str(name).startswith("val_")}
    if results:
        seen.evaluation_ends(results)
    seen.epoch_ends(epoch)
    yield


def _keras_evaluation(seen: Seen, *given: Any, **named: Any) -> Watching:
    seen.evaluation_begins()
    yield


def _keras_update(seen: Seen, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Watching:
    variables = list(trainable_variables if trainable_variables is not None else optimizer._trainable_variables)

    def groups() -> Sequence[tuple[Sequence[Any], float]]:
        return [([variable.value for variable in variables], float(optimizer.learning_rate))]

    def set_rate(group: int, rate: float) -> None:
        optimizer.learning_rate = rate  # raises under a schedule, which would undo it

    leave_out = seen.update_begins(optimizer, groups, set_rate)
    yield leave_out
    seen.update_ends(optimizer)


# -- fastai: its optimizers are its own -----------------------------------------------------------


def _fastai_epoch(seen: Seen, learner: Any) -> Watching:
    seen.epoch_begins(learner.epoch)
    yield
    seen.epoch_ends(learner.epoch)


def _fastai_evaluation(seen: Seen, learner: Any, ds_idx: int = 1, dl: Any = None) -> Watching:
    recorder = getattr(learner, "recorder", None)
    seen.evaluation_begins()
    yield
    if recorder is not None and hasattr(recorder, "log"):
        values = dict(zip(recorder.metric_names, recorder.log, strict=False))
        seen.evaluation_ends(
            {name: value for name, value in values.items() if name not in ("epoch", "train_loss", "time")}
        )


def _fastai_update(seen: Seen, optimizer: Any, closure: Any = None) -> Watching:
    if not hasattr(optimizer, "param_lists"):  # one that wraps an optimizer of torch's, which shows itself
        yield
        return

    def groups() -> Sequence[tuple[Sequence[Any], float]]:
        return [
            (list(listed), float(h["lr"])) for listed, h in zip(optimizer.param_lists, optimizer.hypers, strict=True)
        ]

    def set_rate(group: int, rate: float) -> None:
        optimizer.hypers[group]["lr"] = rate

    leave_out = seen.update_begins(optimizer, groups, set_rate)
    yield leave_out
    seen.update_ends(optimizer)


# -- skorch --------------------------------------------------------------------------------------------


def _skorch_epoch(seen: Seen, net: Any, iterator: Any, training: bool, *given: Any, **named: Any) -> Watching:
    """One pass over a loader: an epoch of training, or the evaluation behind it."""
    if iterator is None:
        yield
    elif training:
        seen.epoch_begins(len(net.history) - 1)
        yield
    else:
        seen.evaluation_begins()
        yield


def _skorch_epoch_over(seen: Seen, net: Any, method: str, **named: Any) -> Watching:
    yield  # scoring callbacks write their results
    if method == "on_epoch_end":
        last = net.history[-1]
        seen.evaluation_ends({name: value for name, value in last.items() if name.startswith("valid_")})
        seen.epoch_ends(len(net.history) - 1)


# -- PyTorch-Ignite ------------------------------------------------------------------------------------


def _ignite_run(seen: Seen, engine: Any, *given: Any, **named: Any) -> Watching:
    """An engine that runs while another one trains evaluates."""
    running = seen.memory.setdefault("engines", [])
    running.append(engine)
    if len(running) > 1:
        seen.evaluation_begins()
    try:
        yield
    finally:
        running.remove(engine)
    if running:
        seen.evaluation_ends(getattr(engine.state, "metrics", None))


def _ignite_event(seen: Seen, engine: Any, event: Any, *given: Any, **named: Any) -> Watching:
    name, outermost = getattr(event, "name", ""), seen.memory.get("engines", [])[:1] == [engine]
    if outermost and name == "EPOCH_STARTED":
        seen.epoch_begins(engine.state.epoch - 1)
    yield
    if outermost and name == "EPOCH_COMPLETED":
        seen.epoch_ends(engine.state.epoch - 1)


# -- Ultralytics ---------------------------------------------------------------------------------------


def _ultralytics_callbacks(seen: Seen, trainer: Any, event: str) -> Watching:
    if event == "on_train_epoch_start":
        seen.epoch_begins(trainer.epoch)
    yield
    if event == "on_fit_epoch_end":
        seen.epoch_ends(trainer.epoch)


def _ultralytics_evaluation(seen: Seen, trainer: Any) -> Watching:
    seen.evaluation_begins()
    result = yield
    metrics = result[0] if isinstance(result, tuple) and result else None
    parts = {name.rpartition("/")[2]: value for name, value in (metrics or {}).items()}
    losses = [value for name, value in parts.items() if name.endswith("_loss")]
    seen.evaluation_ends({**parts, **({"loss": sum(losses)} if losses else {})} if metrics else None)


# -- Stable-Baselines3 ---------------------------------------------------------------------------------


_SB3_NAMES = {
    "rollout/ep_rew_mean": "reward",
    "rollout/ep_len_mean": "episode_length",
    "eval/mean_reward": "eval.reward",
    "train/approx_kl": "kl",
    "train/clip_fraction": "clip_fraction",
    "train/explained_variance": "explained_variance",
}
"""As `replay` names them."""


def _sb3_dump(seen: Seen, logger: Any, *given: Any, **named: Any) -> Watching:
    values = {_SB3_NAMES.get(str(name), str(name)): value for name, value in logger.name_to_value.items()}
    seen.logs({name: value for name, value in values.items() if not name.startswith("time/")})
    yield


LIBRARIES: dict[str, tuple[Place, ...]] = {
    "keras": (
        Place("keras.src.callbacks.callback_list", "CallbackList.on_epoch_begin", _keras_epoch),
        Place("keras.src.callbacks.callback_list", "CallbackList.on_epoch_end", _keras_epoch_over),
        Place("keras.src.callbacks.callback_list", "CallbackList.on_test_begin", _keras_evaluation),
        Place("keras.src.optimizers.base_optimizer", "BaseOptimizer.__init__", _own_optimizer),
        Place("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply", _keras_update),
    ),
    "fastai": (
        Place("fastai.learner", "Learner._do_epoch", _fastai_epoch),
        Place("fastai.learner", "Learner._do_epoch_validate", _fastai_evaluation),
        Place("fastai.optimizer", "Optimizer.__init__", _own_optimizer),
        Place("fastai.optimizer", "Optimizer.step", _fastai_update),
    ),
    "skorch": (
        Place("skorch.net", "NeuralNet.run_single_epoch", _skorch_epoch),
        Place("skorch.net", "NeuralNet.notify", _skorch_epoch_over),
    ),
    "ignite": (
        Place("ignite.engine.engine", "Engine.run", _ignite_run),
        Place("ignite.engine.engine", "Engine._fire_event", _ignite_event),
    ),
    "ultralytics": (
        Place("ultralytics.engine.trainer", "BaseTrainer.run_callbacks", _ultralytics_callbacks),
        Place("ultralytics.engine.trainer", "BaseTrainer.validate", _ultralytics_evaluation),
    ),
    "stable_baselines3": (Place("stable_baselines3.common.logger", "Logger.dump", _sb3_dump),),
}
"""Library -> its places. timm's scripts, DeepSpeed's engine and sentence-transformers need none: their loops are plain, their
optimizers torch's, and the last one's trainer is that of transformers."""
