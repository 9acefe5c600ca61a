"""Learning rate, clipping, loss scale, micro-batches, heartbeat, reported numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from driver import Everything, Loop, View, Watched
from torch import nn

from healthcheck.core.events import Event, EventKind
from healthcheck.probes.clipping import ClippingProbe, LossScaleProbe
from healthcheck.probes.learning_rate import LearningRateProbe
from healthcheck.probes.reported import EvaluationProbe, ScriptMetricsProbe
from healthcheck.probes.steps import HeartbeatProbe, StepCountProbe


def squares(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(4, 2)).pow(2).mean()


def test_lr_is_the_largest_of_all_groups_and_each_by_name() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": a.parameters(), "lr": 0.1}, {"params": b.parameters(), "lr": 0.3}])
    watched = Watched([LearningRateProbe()])
    Loop(watched, nn.Sequential(a, b), optimizer).one(lambda: squares(nn.Sequential(a, b)))
    assert watched.of("lr") == [(1, 0.3)]
    assert watched.of("lr[group=0]") == [(1, 0.1)]
    assert watched.of("lr[group=1]") == [(1, 0.3)]


def test_lr_is_the_one_used_not_the_one_that_a_scheduler_set_afterwards() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched, view = Watched([LearningRateProbe()]), View(model, [optimizer])
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=view, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    watched.emit(EventKind.STEP_END, 1, model=view, optimizer=optimizer)
    assert watched.of("lr") == [(1, 0.1)]


def test_a_learning_rate_held_in_a_tensor_is_read() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    watched = Watched([LearningRateProbe()])
    Loop(watched, model, optimizer).one(lambda: squares(model))
    assert watched.last("lr") == 0.25


def test_a_framework_that_shows_no_optimizer_reports_its_rate() -> None:
    watched = Watched([LearningRateProbe()])
    watched.emit(EventKind.STEP_END, 7, lr=0.5)
    assert watched.of("lr") == [(7, 0.5)]


def test_clipping_is_told_from_gradients_that_were_small_enough() -> None:
    model = nn.Linear(2, 1, bias=False)
    watched = Watched([ClippingProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.0), clip=5.0)
    loop.one(lambda: (model.weight * torch.tensor([[6.0, 8.0]])).sum())
    loop.one(lambda: (model.weight * torch.tensor([[0.3, 0.4]])).sum())
    assert watched.values("clip.applied") == [1.0, 0.0]
    assert watched.values("clip.ratio") == pytest.approx([0.5, 1.0])


def test_a_loop_that_does_not_clip_has_no_clip_rate() -> None:
    model = nn.Linear(2, 2)
    watched = Watched([ClippingProbe()])
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1)).one(lambda: squares(model))
    assert watched.samples == []


def skips(watched: Watched, *steps: tuple[bool, float]) -> None:
    for number, (skipped, scale) in enumerate(steps, start=1):
        watched.emit(EventKind.STEP_END, number, optimizer=object(), skipped=skipped, loss_scale=scale)


def test_the_search_for_the_first_scale_is_no_streak() -> None:
    watched = Watched([LossScaleProbe()])
    skips(watched, (True, 65536.0), (True, 32768.0), (True, 16384.0), (False, 8192.0))
    assert watched.values("amp.skipped") == [1.0, 1.0, 1.0, 0.0]
    assert watched.values("amp.skipped_streak") == [0.0, 0.0, 0.0, 0.0]


def test_skips_after_an_applied_update_are_a_streak() -> None:
    watched = Watched([LossScaleProbe()])
    skips(watched, (False, 1024.0), (True, 512.0), (True, 256.0), (True, 128.0), (False, 128.0), (True, 64.0))
    assert watched.values("amp.skipped_streak") == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]


def test_a_search_that_fell_through_the_floor_counts() -> None:
    """The scaler of a model that always overflows halves for ever; nothing is ever applied."""
    watched = Watched([LossScaleProbe()])
    skips(watched, *[(True, 65536.0 * 0.5**k) for k in range(40)])
    streak = dict(watched.of("amp.skipped_streak"))
    assert streak[16] == 0
    assert streak[17] == 1
    assert streak[40] == 24


def test_without_a_loss_scale_nothing_is_said_of_it() -> None:
    watched = Watched([LossScaleProbe()])
    watched.emit(EventKind.STEP_END, 1, optimizer=object(), skipped=False)
    assert watched.samples == []


def test_micro_batches_and_missing_updates() -> None:
    model = nn.Linear(2, 2)
    watched = Watched([StepCountProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(2, lambda: squares(model), micro=4)
    assert watched.values("micro_batches") == [4.0, 4.0]
    assert watched.values("updates.missing") == [0.0, 0.0]


def test_backward_passes_without_any_update_add_up() -> None:
    watched = Watched([StepCountProbe()])
    for step in range(1, 6):
        watched.emit(EventKind.LOSS, step, loss=1.0)
        watched.emit(EventKind.STEP_END, step)
    assert watched.values("updates.missing") == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_an_update_that_the_scaler_skipped_was_attempted() -> None:
    watched = Watched([StepCountProbe()])
    for step in range(1, 6):
        watched.emit(EventKind.LOSS, step, loss=1.0)
        watched.emit(EventKind.STEP_END, step, skipped=True)
    assert set(watched.values("updates.missing")) == {0.0}


def test_the_heart_beats_in_evaluation_too() -> None:
    watched = Watched([HeartbeatProbe(itertools.count().__next__)])
    for kind in (EventKind.LOSS, EventKind.STEP_END, EventKind.EVAL_STEP, EventKind.CHECKPOINT_SAVED):
        watched.emit(kind, 1)
    assert watched.values("heartbeat") == [1.0] * 4


def test_the_heart_beats_at_most_five_times_a_second() -> None:
    ticks = itertools.count()
    watched = Watched([HeartbeatProbe(lambda: next(ticks) / 20)])
    for step in range(1, 41):
        watched.emit(EventKind.STEP_END, step)
    assert watched.values("heartbeat") == [1.0] * 9


@pytest.mark.parametrize("written", ["loss", "eval_loss", "val_loss", "eval/loss", "val.loss"])
def test_evaluation_losses_have_one_name(written: str) -> None:
    watched = Watched([EvaluationProbe()])
    watched.emit(EventKind.EVAL_END, 10, metrics={written: torch.tensor(0.5), "note": "fine"}, phase="eval")
    assert watched.of("eval.loss") == [(10, 0.5)]
    assert watched.names() == {"eval.loss"}
    assert watched.samples[0].phase == "eval"


def test_named_evaluation_sets_are_told_apart() -> None:
    watched = Watched([EvaluationProbe()])
    for name, value in (("clean", 0.9), ("noisy", 0.6)):
        watched.emit(EventKind.EVAL_END, 10, metrics={"accuracy": value}, dataset=name)
    assert watched.of("eval.accuracy[dataset=clean]") == [(10, 0.9)]
    assert watched.of("eval.accuracy[dataset=noisy]") == [(10, 0.6)]


def test_how_far_evaluations_lie_apart_is_known_from_the_second_on_for_each_set() -> None:
    watched = Watched([EvaluationProbe()])
    for step, name in ((10, "clean"), (11, "noisy"), (20, "clean"), (41, "noisy")):
        watched.emit(EventKind.EVAL_END, step, metrics={"loss": 0.9}, dataset=name, phase="eval")
    assert watched.of("evaluations.apart") == [(20, 10.0), (41, 30.0)]


def test_script_metrics_keep_their_names() -> None:
    watched = Watched([ScriptMetricsProbe()])
    watched.emit(EventKind.STEP_END, 3, metrics={"reward": 1.5, "kl": torch.tensor(0.1), "table": object()})
    assert watched.of("reward") == [(3, 1.5)]
    assert watched.last("kl") == pytest.approx(0.1)
    assert "table" not in watched.names()


@pytest.mark.parametrize(("late", "within", "looks"), [(40, 10, 25), (700, 100, 60)])
def test_a_loop_that_begins_to_clip_late_is_seen_soon(late: int, within: int, looks: int) -> None:
    """Until then the probe rests, and nobody asks for what it has nothing to say about."""
    probe = ClippingProbe()
    asked: list[int] = []
    for step in range(1, late + within + 1):
        if probe.rests_until > step:
            continue
        asked.append(step)
        norm, limit = (2.0, 1.0) if step > late else (None, None)
        event = Event(EventKind.STEP_END, step, grad_norm=norm, max_norm=limit)
        if found := list(probe.sample(event, Everything())):
            break

    assert [sample.value for sample in found] == [1.0, pytest.approx(0.5, rel=1e-3)]
    assert asked[:21] == list(range(1, 22))
    assert len(asked) <= looks
