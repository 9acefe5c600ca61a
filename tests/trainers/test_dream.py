"""Dream Trainer: micro-batches, its own checks, no way to stop, no exception in its interrupt."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.run import current
from healthcheck.trainers.dream import HOOKS, HealthCheckCallback

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent / "drivers"))

import dream_loop
import torch
from source_order import calls, real_files
from told import Model, batches

pytestmark = pytest.mark.usefixtures("nothing_left")
FILES = real_files("dream_trainer/trainer/base.py")
WATCH = {
    "version": 1,
    "rules": {
        "grads": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "loss": {"metric": "loss", "when": {"above": 1e6}},
        "eval": {"metric": "eval.loss", "when": {"above": 1e6}},
    },
}


def fit(rules: Any = WATCH, model: Any = None, callbacks: Any = (), options: Any = None, **given: Any) -> Any:
    health = HealthCheckCallback(rules, console=False, record=False, **(options or {}))
    collection = dream_loop.CallbackCollection([health, *callbacks])
    trainer = dream_loop.Trainer(model or Model(), batches(given.pop("batches", 6)), collection, **given)
    trainer.health = health
    trainer.fit()
    return trainer


def test_a_step_is_one_update_however_many_micro_batches_it_has() -> None:
    health = fit(accumulate=3).health
    assert [step for step, _ in health.session.history("loss")] == [1, 2]
    assert health.report["steps"] == 2
    assert health.report["internal_errors"] == []


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches_from_the_first_confirmed_step_on() -> None:
    trainer = fit(accumulate=2, model=Frozen())
    assert [v for _, v in trainer.health.session.history("loss")] == pytest.approx([1.5, 3.5, 5.5])


class Frozen(Model):
    """Its loss is the batch's own number."""

    def forward(self, x: Any) -> Any:
        weights = self.weight.sum()
        return {"loss": x.mean() + weights - weights.detach()}


def test_only_overridden_hooks_are_called_and_our_class_is_found_by_its_name() -> None:
    health = HealthCheckCallback()
    collection = dream_loop.CallbackCollection([health])
    mine = {name for name in HOOKS if collection.triggers[name]}
    assert {"post_train_step", "on_interrupt", "post_fit"} <= mine
    assert {"train_context", "validation_context", "pre_launch"} & mine == set()
    assert type(health).__qualname__ != "Callback"


def test_a_stop_keeps_the_bad_update_out_before_the_trainer_s_own_check_raises() -> None:
    trainer = fit(model=Model(bad=3), n_epochs=4)
    report = trainer.health.report
    assert (report["stop"]["step"], report["steps"], report["exit_reason"]) == (3, 3, "stopped")
    assert bool(trainer.model.weight.isfinite().all())
    assert trainer.model.seen == 3
    assert trainer.current_epoch == 4  # the epochs that were left had no batches


def test_without_a_rule_that_stops_its_own_check_raises_and_the_report_knows_the_exception() -> None:
    rules = {"grads": {"metric": "grad_norm", "when": "nonfinite", "severity": "error"}}
    trainers: list[Any] = []

    class Keep(dream_loop.Callback):  # type: ignore[misc]
        def pre_fit(self) -> None:
            trainers.append(self.trainer)

    with pytest.raises(RuntimeError, match="Invalid gradients"):
        fit({"version": 1, "rules": rules}, model=Model(bad=3), callbacks=[Keep()])
    report = trainers[0].callbacks["HealthCheckCallback"].report
    assert report["exit_reason"] == "script failed"
    assert [(a["rule"], a["fired_step"]) for a in report["alerts"]] == [("grads", 3)]


def test_an_endless_run_is_ended_by_an_exception_since_without_batches_it_would_spin() -> None:
    with pytest.raises(healthcheck.StopTraining):
        fit(model=Model(bad=3), n_epochs=None)


def test_a_skipped_update_leaves_weights_and_the_run_alone() -> None:
    rules = {"grads": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["skip_update"]}}
    trainer = fit({"version": 1, "rules": rules}, model=Model(bad=3))
    assert trainer.global_step == 6
    assert bool(trainer.model.weight.isfinite().all())


def test_each_update_is_seen_once_with_its_norm_before_clipping() -> None:
    class Seen(healthcheck.Callback):
        def __init__(self) -> None:
            self.kinds: list[tuple[str, int]] = []

        def on_before_update(self, event: Any) -> None:
            self.kinds.append(("before", event.step))

        def on_after_update(self, event: Any) -> None:
            self.kinds.append(("after", event.step))
            assert all(p.grad is not None for _, p in event.model.named_parameters())

    seen = Seen()
    trainer = fit(clip=0.1, options={"callbacks": (seen,)})
    assert seen.kinds == [(kind, step) for step in range(1, 7) for kind in ("before", "after")]
    assert all(norm > 0.1 for _, norm in trainer.health.session.history("grad_norm"))
    assert trainer.health.report["plugin_errors"] == []


def test_a_loop_that_steps_its_optimizer_itself_is_seen_as_well() -> None:
    health = fit(uses_own_step=False).health
    assert health.report["steps"] == 6
    assert [step for step, _ in health.session.history("grad_norm")] == [1, 2, 3, 4, 5, 6]


def test_the_sanity_validation_is_no_evaluation() -> None:
    health = fit(validation=[{"x": torch.ones(2, 3)}], val_every_n_steps=3).health
    assert [step for step, _ in health.session.history("eval.loss")] == [3, 6]


def test_detectors_survive_in_the_trainer_s_own_checkpoint() -> None:
    saved: dict[str, Any] = {}

    class Save(dream_loop.Callback):  # type: ignore[misc]
        def post_epoch(self) -> None:
            saved.update(copy.deepcopy(self.trainer.callbacks.state_dict()))

    class Load(dream_loop.Callback):  # type: ignore[misc]
        def pre_fit(self) -> None:
            self.trainer.callbacks["HealthCheckCallback"].load_state_dict(saved["HealthCheckCallback"])
            self.trainer.global_step, self.trainer.current_epoch = 6, 1

    fit(callbacks=[Save()])
    health = fit(callbacks=[Load()], n_epochs=2).health
    assert health.report["resumed_from"] == 6
    assert [step for step, _ in health.session.history("loss")] == [7, 8, 9, 10, 11, 12]
    assert not any("fresh" in note for note in health.session.info.notes)


def test_alerts_reach_the_trainer_s_logger() -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}}}
    assert {"healthcheck/alert/any": 1.0} in fit({"version": 1, "rules": rules}).logged


def test_a_run_without_rules_opens_one_session_and_leaves_none() -> None:
    assert fit({"version": 1, "rules": {}}, n_epochs=3).health.report["rules"] == {}
    assert current.current() is None


def test_under_a_watched_script_its_steps_are_counted_once() -> None:
    from healthcheck.instrument.script import InProcess

    session = healthcheck.open_session(target="x", rules=WATCH, console=False, record=False)
    with InProcess(session):
        trainer = fit(rules=None, accumulate=2)
    assert trainer.health.session is session
    assert [step for step, _ in session.history("loss")] == [1, 2, 3]


NAMES = (*HOOKS, "perform_sanity_validation_steps", "perform_training_epoch", "perform_validation_epoch")
NAMES = (*NAMES, "_validate_gradients", "total_gradient_norm", "clip_gradient_norm", "RuntimeError", "global_step")
NAMES = (*NAMES, "training_step", "batch_idx", "local_batches", "step")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parents[2].name)
@pytest.mark.parametrize("function", ["fit", "_fit", "perform_training_epoch", "perform_validation_epoch", "step"])
def test_the_driver_has_the_order_of_the_real_trainer(path: Path, function: str) -> None:
    """Methods of the trainer itself that bear a hook's name (``post_setup``, ``pre_train_step``) are left out here."""
    mine = _once(calls(Path(dream_loop.__file__), function, NAMES))
    assert _once(calls(path, function, NAMES)) == mine


def _once(names: list[str]) -> list[str]:
    """A hook and the trainer's own method of the same name are called one after the other."""
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


@pytest.mark.parametrize(
    "path", real_files("dream_trainer/callbacks/callback.py"), ids=lambda path: path.parents[2].name
)
def test_the_hooks_are_those_of_the_real_callback(path: Path) -> None:
    import ast

    tree = ast.parse(path.read_text(encoding="utf-8"))
    real = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "Callback")
    methods = {n.name for n in real.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}
    assert methods == {*HOOKS, "state_dict", "load_state_dict", "pop_self"}
    assert set(dream_loop.HOOKS) == set(HOOKS)
