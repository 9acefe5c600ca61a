"""What every trainer promises besides finding faults: nothing changes, a stop is clean, a resume goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from drivers import DRIVERS, FAULTS, RULES, Order, Run
from toy import Toy

import healthcheck

PACKAGE = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
TRAINERS = list(DRIVERS)
WITH_CHECKPOINTS = ["huggingface", "lightning", "accelerate"]
HEALTHY = replace(FAULTS["healthy"], steps=15)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def drive(trainer: str, order: Order) -> Run:
    if trainer in PACKAGE:
        pytest.importorskip(PACKAGE[trainer])
    return DRIVERS[trainer](order)


def rules_with(rule: str, then: list[Any]) -> dict[str, Any]:
    """The suite's rules, one of which acts."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    rules["rules"][rule]["then"] = then
    return rules


@pytest.mark.parametrize("trainer", TRAINERS)
def test_watched_weights_are_bit_identical_to_plain_ones(trainer: str, tmp_path: Path) -> None:
    plain = drive(trainer, Order(HEALTHY, tmp_path, watched=False)).weights
    watched = drive(trainer, Order(HEALTHY, tmp_path)).weights
    assert {name: torch.equal(watched[name], plain[name]) for name in plain} == dict.fromkeys(plain, True)


@pytest.mark.parametrize("fault", ["nan_loss", "nan_gradient"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_stop_before_the_update_leaves_finite_weights(trainer: str, fault: str, tmp_path: Path) -> None:
    # Of a NaN loss, a loop sees the gradients before its update.
    rule = "grads-not-finite" if (trainer, fault) == ("loop", "nan_loss") else FAULTS[fault].rule
    run = drive(trainer, Order(FAULTS[fault], tmp_path, rules=rules_with(rule, ["stop"])))
    assert run.finite
    assert run.session.report["stop"]["step"] == 12
    assert run.session.report["stop"]["rule"] == rule
    assert run.session.report["exit_code"] == 1
    assert run.session.report["steps"] == 12


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_requested_checkpoint_exists_and_loads(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    then = [{"stop": {"checkpoint": True}}]
    order = Order(FAULTS["nan_gradient"], tmp_path, rules=rules_with("grads-not-finite", then), record=True)
    run = drive(trainer, order)
    action = next(a for alert in run.session.alerts for a in alert.actions if a.action == "stop")
    where = Path(action.data["checkpoint"])
    assert where.exists()
    saved = weights_in(where)
    assert saved.keys() == run.weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in run.weights.items())


def weights_in(where: Path) -> dict[str, Any]:
    """The model's weights in a checkpoint of any of the trainers."""
    if where.is_dir():
        from safetensors.torch import load_file

        return dict(load_file(where / "model.safetensors"))
    content = torch.load(where, weights_only=False)
    if "state_dict" in content:
        return {name.removeprefix("model."): value for name, value in content["state_dict"].items()}
    return dict(content["modules"][0])


def checkpoint(trainer: str, folder: Path, step: int) -> str:
    names = {"huggingface": f"hf/checkpoint-{step}", "lightning": f"pl/step={step}.ckpt", "accelerate": f"acc-{step}"}
    return str(folder / names[trainer])


@pytest.mark.parametrize("trainer", WITH_CHECKPOINTS)
def test_a_resume_neither_loses_nor_repeats_an_alert(trainer: str, tmp_path: Path) -> None:
    if trainer == "huggingface" and tuple(map(int, version("transformers").split(".")[:2])) < (4, 48):
        pytest.skip("this transformers cannot read its own checkpoints with torch 2.6 or later (weights_only)")
    fault = FAULTS["slow_divergence"]
    whole = drive(trainer, Order(fault, tmp_path, save_every=10))
    (step,) = [step for rule, step in whole.fired if rule == fault.rule]
    assert 20 < step < 30
    said: list[str] = []

    def listen(session: Any) -> None:
        session.add_report(SimpleNamespace(name="listener", note=said.append))

    before = drive(trainer, Order(fault, tmp_path, resume=checkpoint(trainer, tmp_path, 20), prepare=listen))
    assert [s for rule, s in before.fired if rule == fault.rule] == [step]
    (check,) = [text for text in said if "resume check after 20 steps" in text]
    assert "lr 0.001 (same): the loss is higher than it was" in check  # it diverges, and no optimizer state to compare
    after = drive(trainer, Order(fault, tmp_path, resume=checkpoint(trainer, tmp_path, 30)))
    assert [s for rule, s in after.fired if rule == fault.rule] == []
    assert after.session.report["resumed_from"] == 30
    assert after.session.report["steps"] == fault.steps
    assert after.session.history("loss")[0][0] == 31


class Faulty(healthcheck.Callback):
    """A plugin that fails wherever it can."""

    def on_step_end(self) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def on_before_update(self) -> None:
        raise ValueError("no such thing")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_monitor_error_never_ends_training(trainer: str, tmp_path: Path) -> None:
    run = drive(trainer, Order(HEALTHY, tmp_path, callbacks=(Faulty(),)))
    report = run.session.report
    assert run.model.step == HEALTHY.steps
    assert report["steps"] == HEALTHY.steps
    errors = {entry["hook"]: entry for entry in report["plugin_errors"]}
    assert set(errors) == {"step_end", "before_update"}
    assert errors["step_end"]["step"] == 1
    assert "cleanup" in errors["step_end"]  # it looks like memory, so that memory was cleaned up, once
    assert "cleanup" not in errors["before_update"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_plugin_s_error_reaches_the_training_of_a_user_who_wants_it_so(trainer: str, tmp_path: Path) -> None:
    rules = {**yaml.safe_load(RULES.read_text(encoding="utf-8")), "settings": {"on_plugin_error": "raise"}}
    order = Order(HEALTHY, tmp_path, rules=rules, callbacks=(Faulty(),))
    if trainer == "script":
        report = drive(trainer, order).session.report
        assert (report["exit_reason"], report["steps"]) == ("script failed", 1)
        return
    with pytest.raises(ValueError, match="no such thing"):
        drive(trainer, order)


@pytest.fixture
def _no_spy() -> Iterator[None]:
    yield
    Toy.spy = None


@pytest.mark.usefixtures("_no_spy")
@pytest.mark.parametrize("trainer", TRAINERS)
def test_without_rules_nothing_is_attached(trainer: str, tmp_path: Path) -> None:
    from torch.optim import optimizer

    seen: list[tuple[bool, int]] = []

    def look() -> None:
        wrapped = any(
            hasattr(function, "__wrapped__") and "healthcheck" in str(getattr(function, "__code__", ""))
            for function in (torch.autograd.backward, torch.amp.GradScaler.step, torch.save)
        )
        seen.append((wrapped, len(optimizer._global_optimizer_pre_hooks)))

    Toy.spy = staticmethod(look)  # type: ignore[assignment]
    run = drive(trainer, Order(replace(HEALTHY, steps=5), tmp_path, rules={"version": 1, "rules": {}}))
    assert seen
    assert set(seen) == {(False, 0)}
    assert run.session.alerts == []


@pytest.mark.usefixtures("_no_spy")
def test_with_rules_the_same_look_finds_what_is_attached(tmp_path: Path) -> None:
    """The test above could not fail otherwise."""
    from torch.optim import optimizer

    seen: list[tuple[bool, int]] = []
    Toy.spy = staticmethod(  # type: ignore[assignment]
        lambda: seen.append(
            (hasattr(torch.autograd.backward, "__wrapped__"), len(optimizer._global_optimizer_pre_hooks))
        )
    )
    drive("script", Order(replace(HEALTHY, steps=5), tmp_path))
    assert set(seen) == {(True, 1)}


FAMILY = {"version": 1, "rules": {"norms": {"metric": "grad_norm[*]", "when": {"above": 1e30}}}}
NAMES = {"grad_norm[body.weight]", "grad_norm[body.bias]", "grad_norm[head.weight]", "grad_norm[head.bias]"}


def families(run: Run) -> set[str]:
    return {name for name in run.session.history.series() if name.startswith("grad_norm[")}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_parameters_have_their_plain_names(trainer: str, tmp_path: Path) -> None:
    run = drive(trainer, Order(replace(HEALTHY, steps=5), tmp_path, rules=FAMILY))
    assert {name.replace("[model.", "[") for name in families(run)} == NAMES


@pytest.mark.parametrize("trainer", ["loop", "script", "accelerate"])
def test_compiling_does_not_change_the_names(trainer: str, tmp_path: Path) -> None:
    order = Order(
        replace(HEALTHY, steps=5), tmp_path, rules=FAMILY, wrap=lambda model: torch.compile(model, backend="eager")
    )
    assert families(drive(trainer, order)) == NAMES


@pytest.mark.distributed
@pytest.mark.parametrize("trainer", ["loop", "script"])
def test_ddp_does_not_change_the_names(trainer: str, tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        order = Order(replace(HEALTHY, steps=5), tmp_path, rules=FAMILY, wrap=DistributedDataParallel)
        assert families(drive(trainer, order)) == NAMES
    finally:
        dist.destroy_process_group()
