"""The plugin's parts, each with the real thing it works on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import healthcheck_example
import pytest
import torch
from healthcheck_example.action import Touch
from healthcheck_example.condition import GROWN
from healthcheck_example.probe import WeightNorm

from healthcheck.events import Event, EventKind
from healthcheck.plugins import PluginHost
from healthcheck.protocols import ActionContext
from healthcheck.verdicts import Alert, Severity


class Model:
    """The part of a model view that the probe uses, over a real module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        return list(self.module.named_parameters())

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        return list(self.module.named_modules())

    def optimizers(self) -> Sequence[Any]:
        return []


class EveryThirdStep:
    def wants(self, key: str) -> bool:
        return True

    def due(self, key: str, step: int) -> bool:
        return step % 3 == 0


def alert() -> Alert:
    return Alert(
        rule="weights-grow",
        number=1,
        severity=Severity.WARNING,
        phase="train",
        episode=1,
        fired_step=7,
        detected_step=7,
        value=30.0,
        score=3.0,
        normal=10.0,
        threshold="at least 3 times the first value",
        series=[],
        count=1,
    )


def context(run_dir: Path | None, **options: Any) -> ActionContext:
    return ActionContext(
        options=options,
        controls=None,  # type: ignore[arg-type]  # this action asks nothing of the trainer
        step=7,
        before_update=False,
        run_dir=run_dir,
        history=lambda name, count: [],
    )


def test_the_plugin_registers_one_of_each_through_the_public_hooks() -> None:
    host = PluginHost(strict=True)
    host.register(healthcheck_example, name="example")
    found = host.registry.of("example")
    assert found["probes"] == ["example-weight-norm"]
    assert found["metrics"] == ["example.weight_norm"]
    assert found["conditions"] == ["example.grown"]
    assert found["actions"] == ["example.touch"]
    assert found["packs" if "packs" in found else "rulepacks"] == ["example:weights"]
    assert all(Path(path).is_file() for path in host.registry.packs.values())


def test_the_norm_is_that_of_all_parameters_and_stays_a_tensor() -> None:
    module = torch.nn.Linear(3, 2)
    [sample] = WeightNorm().sample(Event(EventKind.AFTER_UPDATE, 3, model=Model(module)), EveryThirdStep())
    assert isinstance(sample.value, torch.Tensor)
    assert not sample.value.requires_grad
    expected = math.sqrt(sum(float((p.detach() ** 2).sum()) for p in module.parameters()))
    assert float(sample.value) == pytest.approx(expected)
    assert (sample.metric, sample.step) == ("example.weight_norm", 3)


def test_the_probe_does_no_work_at_a_step_that_no_rule_looks_at() -> None:
    event = Event(EventKind.AFTER_UPDATE, 4, model=Model(torch.nn.Linear(1, 1)))
    assert list(WeightNorm().sample(event, EveryThirdStep())) == []


def test_no_model_and_no_parameters_give_no_sample_instead_of_zero() -> None:
    probe = WeightNorm()
    assert list(probe.sample(Event(EventKind.AFTER_UPDATE, 3), EveryThirdStep())) == []
    assert list(probe.sample(Event(EventKind.AFTER_UPDATE, 3, model=Model(torch.nn.ReLU())), EveryThirdStep())) == []


def test_growth_is_measured_against_the_first_value() -> None:
    condition = GROWN.compile(3, {})
    memory = condition.start()
    assert memory.update(2.0, 1) is None
    scores = [memory.update(value, step) for step, value in enumerate((3.0, 5.9, 6.0), start=2)]
    assert scores == [1.5, 2.95, 3.0]
    assert [condition.breaches(score) for score in scores if score is not None] == [False, False, True]
    assert memory.normal == 2.0


def test_a_first_value_of_zero_gives_no_score() -> None:
    memory = GROWN.compile(3, {}).start()
    memory.update(0.0, 1)
    assert memory.update(5.0, 2) is None


def test_the_memory_survives_a_resume_through_json() -> None:
    condition = GROWN.compile(3, {})
    before, after = condition.start(), condition.start()
    before.update(2.0, 1)
    after.restore(json.loads(json.dumps(before.state())))
    assert after.update(8.0, 2) == before.update(8.0, 2) == 4.0


def test_the_action_touches_the_file_it_is_given(tmp_path: Path) -> None:
    target = tmp_path / "new" / "look-here"
    outcome = Touch().run(alert(), context(None, path=str(target)))
    assert outcome.done
    assert target.is_file()
    assert str(target) in outcome.text


def test_without_a_path_it_touches_one_in_the_record_or_says_why_not(tmp_path: Path) -> None:
    assert Touch().run(alert(), context(tmp_path)).done
    assert (tmp_path / "touched").is_file()
    assert not Touch().run(alert(), context(None)).done
