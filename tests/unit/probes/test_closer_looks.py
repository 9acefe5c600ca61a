"""What is far from what rules name is looked at where rules ask for it, and sooner as soon as it comes nearer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck.core.events import Event, EventKind
from healthcheck.engine.lookups import RuleDemand
from healthcheck.probes.class_labels import LabelOrderProbe
from healthcheck.probes.data_scale import DataDriftProbe
from healthcheck.probes.looks import next_look, spread_over_ranks
from healthcheck.probes.memory import KeptGraphProbe, MemoryProbe
from healthcheck.probes.output_range import ConstantTargetProbe
from healthcheck.probes.predictions import FrequencyProbe, LatentProbe, PredictionProbe
from healthcheck.rulelang.rule import SETTLED

Loss = Callable[[int], Any]


def looks(probe: Any, loss: Loss, steps: int = 700, *, every: int = 10, settled: int = 100) -> dict[int, float]:
    """Steps in which a probe looked, with the first value that it saw there, where each of its metrics is due every so many steps."""
    demand = RuleDemand()
    keys = [metric.key for metric in probe.provides]
    if hasattr(probe, "plan"):
        demand.every.update(dict.fromkeys(keys, every))
        probe.plan(demand)
    seen: dict[int, float] = {}
    for step in range(1, steps + 1):
        pace = every if step <= SETTLED else settled
        demand.every.update(dict.fromkeys(keys, pace))
        demand.due_now = frozenset() if step % pace else frozenset(keys)
        if probe.rests_until > step:
            continue
        value = loss(step)
        event = Event(EventKind.LOSS, step, loss=value.detach(), loss_graph=value.grad_fn)
        for sample in probe.sample(event, demand):
            seen.setdefault(step, float(sample.value))
    return seen


def classifier(step: int, *, spread: float = 1.0, labels: Any = None) -> Any:
    layer = nn.Linear(8, 4)
    with torch.no_grad():
        layer.weight.mul_(spread)
        layer.bias.zero_()
    wanted = torch.arange(32) % 4 if labels is None else labels
    return nn.functional.cross_entropy(layer(torch.randn(32, 8)), wanted)


def turns(at: int, before: Loss, after: Loss) -> Loss:
    return lambda step: before(step) if step <= at else after(step)


def between(seen: dict[int, float], first: int, last: int) -> list[int]:
    return [step for step in seen if first <= step <= last]


def test_a_run_that_has_settled_has_a_pace_of_its_own() -> None:
    assert [next_look(step, 10, 20) for step in (150, 199, 200, 211)] == [160, 200, 220, 220]


def test_answers_that_differ_are_looked_at_seldom_and_closely_once_they_no_longer_do() -> None:
    seen = looks(PredictionProbe(), turns(450, classifier, lambda step: classifier(step, spread=1e-6)))
    assert between(seen, 1, 200) == list(range(10, 201, 10))
    assert between(seen, 201, 500) == [300, 400, 500]
    assert between(seen, 501, 700) == list(range(510, 701, 10))
    assert max(seen[step] for step in between(seen, 500, 700)) < 0.001


def test_who_asks_for_each_step_gets_each_step() -> None:
    seen = looks(PredictionProbe(), classifier, 240, every=1, settled=1)
    assert between(seen, 202, 240) == list(range(202, 241))


class Sharded(torch.Tensor):
    """As a tensor of several ranks: what is made of it is one as well."""


def test_ranks_that_calculate_together_look_in_the_same_steps_whatever_they_see() -> None:
    assert spread_over_ranks(torch.ones(1).as_subclass(Sharded))
    assert not spread_over_ranks(torch.ones(1))
    assert not spread_over_ranks(nn.Parameter(torch.ones(1)))

    def sorted_by_class(step: int) -> Any:
        return classifier(step, labels=torch.full((32,), step // 30 % 4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("healthcheck.probes.class_labels.spread_over_ranks", lambda value: True)
        seen = looks(LabelOrderProbe(), sorted_by_class)
    assert between(seen, 201, 700) == [300, 400, 500, 600, 700]


def test_labels_of_one_class_are_counted_closely() -> None:
    alike = turns(450, classifier, lambda step: classifier(step, labels=torch.ones(32, dtype=torch.long)))
    seen = looks(PredictionProbe(), alike, 620)
    assert between(seen, 201, 500) == [300, 400, 500]
    assert between(seen, 501, 620) == list(range(505, 621, 5))


def test_a_model_that_knows_more_than_frequencies_is_looked_at_seldom() -> None:
    def good(step: int) -> Any:
        labels = torch.arange(32) % 4
        logits = (5 * nn.functional.one_hot(labels, 4).float()).requires_grad_()
        return nn.functional.cross_entropy(logits * 1.0, labels)

    seen = looks(FrequencyProbe(), turns(450, good, lambda step: classifier(step, spread=1e-6)))
    assert between(seen, 240, 500) == [300, 400, 500]
    assert between(seen, 501, 700) == list(range(510, 701, 10))


def test_rows_of_several_labels_are_looked_at_seldom_and_sorted_ones_closely() -> None:
    def sorted_by_class(step: int) -> Any:
        return classifier(step, labels=torch.full((32,), step // 30 % 4))

    seen = looks(LabelOrderProbe(), turns(450, classifier, sorted_by_class))
    assert between(seen, 201, 500) == [300, 400, 500]
    assert between(seen, 501, 700) == list(range(505, 701, 5))


def test_targets_that_keep_their_size_are_looked_at_seldom() -> None:
    def regression(size: float) -> Loss:
        return lambda step: nn.functional.mse_loss(nn.Linear(4, 1)(torch.randn(64, 4)), size * torch.randn(64, 1))

    seen = looks(DataDriftProbe(), turns(450, regression(1.0), regression(1e-3)))
    assert between(seen, 201, 500) == [300, 400, 500]
    assert between(seen, 501, 700) == list(range(505, 701, 5))
    assert seen[520] < 0.01


def test_a_code_that_says_something_is_looked_at_seldom_and_a_loss_without_one_too() -> None:
    def code(size: float) -> Loss:
        def loss(step: int) -> Any:
            mean = (size * torch.ones(16, 8)).requires_grad_()
            logvar = torch.zeros(16, 8, requires_grad=True)
            return 0.5 * (mean**2 + logvar.exp() - logvar - 1).sum(1).mean()

        return loss

    seen = looks(LatentProbe(), turns(450, code(1.0), code(1e-4)))
    assert between(seen, 201, 500) == [300, 400, 500]
    assert between(seen, 501, 700) == list(range(510, 701, 10))
    probe = LatentProbe()
    looks(probe, classifier, 220)
    assert probe.rests_until == 300


def test_targets_that_have_differed_once_are_never_looked_at_again() -> None:
    def regression(step: int) -> Any:
        return nn.functional.mse_loss(nn.Linear(4, 1)(torch.randn(64, 4)), torch.randn(64, 1))

    assert list(looks(ConstantTargetProbe(), regression)) == [10]


@pytest.mark.parametrize("every", [1, 100])
def test_graphs_that_are_kept_are_counted_as_before_in_a_settled_run(every: int) -> None:
    """Each mark stands for the steps up to the next; those of the last thousand steps are followed."""
    probe, kept, seen = KeptGraphProbe(), list[Any](), dict[int, float]()
    for step in range(1, 3001):
        loss = classifier(step)
        if step > 400 and step % every == 0:
            kept.append(loss)
        if probe.rests_until <= step:
            event = Event(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn)
            seen |= {sample.step: float(sample.value) for sample in probe.sample(event, RuleDemand())}
    assert list(seen)[:22] == [1, *range(10, 201, 10), 220]
    if every == 1:
        assert next(step for step, value in seen.items() if value >= 400) <= 840
        assert max(seen.values()) <= 1100
    else:  # one graph in a hundred is no leak of four hundred
        assert max(seen.values()) < 400


class Reading:
    """A device whose memory is set by hand."""

    kind = "cuda"

    def __init__(self) -> None:
        self.used, self.retries = 1000, 0

    def statistics(self) -> dict[str, int]:
        return {"allocated": self.used, "reserved": self.used, "peak": self.used, "retries": self.retries}

    def allocated_bytes(self) -> int:
        return self.used

    def capacity_bytes(self) -> int:
        return 10_000


def memory_looks(change: Callable[[Reading, int], None], steps: int) -> list[int]:
    reading, demand = Reading(), RuleDemand()
    probe = MemoryProbe(reading)  # type: ignore[arg-type]
    found = []
    for step in range(1, steps + 1):
        demand.every["memory.allocated"] = 10 if step <= SETTLED else 100
        change(reading, step)
        if probe.rests_until <= step and list(probe.sample(Event(EventKind.STEP_END, step), demand)):
            found.append(step)
    return found


def test_memory_that_stays_is_read_seldom_and_memory_that_grows_often() -> None:
    def leaks(reading: Reading, step: int) -> None:
        reading.used = 1000 + max(0, step - 450)

    assert [step for step in memory_looks(leaks, 560) if step > 200] == [300, 400, 500, 510, 520, 530, 540, 550, 560]


def test_memory_that_is_nearly_full_or_short_is_read_often() -> None:
    def full(reading: Reading, step: int) -> None:
        reading.used = 9000

    def short(reading: Reading, step: int) -> None:
        reading.retries = step // 100

    assert [step for step in memory_looks(full, 240) if step > 200] == [210, 220, 230, 240]
    assert [step for step in memory_looks(short, 420) if step > 200] == [210, 300, 310, 400, 410]
