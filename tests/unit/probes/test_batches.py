"""Batches: no targets left, bad values, the same batch again."""

from __future__ import annotations

import math

import pytest
import torch
from driver import Watched

from healthcheck.core.events import EventKind
from healthcheck.probes.batches import BatchProbe, named_tensors


def feed(*steps) -> Watched:
    """Each argument is the list of micro-batches of one step."""
    watched = Watched([BatchProbe()])
    for number, batches in enumerate(steps, start=1):
        for batch in batches:
            watched.emit(EventKind.BATCH_READY, number, batch=batch)
        watched.emit(EventKind.STEP_END, number)
    return watched


def labelled(*labels: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 50, (len(labels),)), "labels": torch.tensor(labels)}


def test_a_batch_whose_labels_are_all_masked_has_no_targets() -> None:
    watched = feed([labelled(-100, 3, 4)], [labelled(-100, -100, -100)], [labelled(1, 2, 3)])
    assert watched.values("batch.targets") == [2.0, 0.0, 3.0]


def test_the_poorest_micro_batch_counts() -> None:
    watched = feed([labelled(-100, 3, 4), labelled(-100, -100, 4), labelled(1, 1, 1)])
    assert watched.values("batch.targets") == [1.0]


def test_labels_in_a_tuple_are_the_last_integers() -> None:
    watched = feed([(torch.randn(3, 4), torch.tensor([-100, 1, 2]))])
    assert watched.last("batch.targets") == 2


def test_without_the_convention_nothing_is_counted() -> None:
    watched = feed([labelled(0, 1, 2)], [{"x": torch.tensor([-100, -100])}])
    assert "batch.targets" not in watched.names()


def test_bad_values_are_counted_and_located() -> None:
    watched = feed([{"image": torch.tensor([1.0, math.nan, math.inf])}], [{"image": torch.ones(3)}])
    assert watched.values("batch.nonfinite") == [2.0, 0.0]
    (sample,) = [s for s in watched.samples if s.metric == "batch.nonfinite" and s.step == 1]
    assert sample.detail is not None
    assert sample.detail() == {"where": "image, 2 of 3 values"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_batch_that_comes_again_is_a_repeat(dtype: torch.dtype) -> None:
    batches = [torch.arange(8).roll(n).to(dtype) if dtype != torch.bool else torch.arange(8) == n for n in range(4)]
    stuck = [[batches[0]], [batches[1]], [batches[1].clone()], [batches[1].clone()], [batches[2]]]
    assert feed(*stuck).values("batch.hash_repeat") == [0.0, 0.0, 1.0, 2.0, 0.0]


def test_batches_that_agree_at_few_places_only_are_no_run() -> None:
    """One in many elements is compared first; what agrees there is compared at many more."""
    batches = [torch.zeros(64, 1024) for _ in range(6)]
    for number, batch in enumerate(batches):
        batch[0, 1 + number] = 1.0
    assert max(feed(*([batch] for batch in batches)).values("batch.hash_repeat")) <= 1.0


def test_another_epoch_in_the_same_order_is_no_repeat() -> None:
    epoch = [[torch.arange(8).roll(n)] for n in range(4)]
    assert set(feed(*epoch, *epoch, *epoch).values("batch.hash_repeat")) == {0.0}


def test_evaluation_batches_are_not_training_batches() -> None:
    watched = Watched([BatchProbe()])
    watched.emit(EventKind.BATCH_READY, 1, batch=torch.tensor([math.nan]), phase="eval")
    watched.emit(EventKind.STEP_END, 1)
    assert watched.samples == []


def test_tensors_are_found_in_nested_batches() -> None:
    batch = {"a": [torch.ones(1), {"b": torch.ones(1)}], "c": "text", "d": 3}
    assert [name for name, _ in named_tensors(batch)] == ["a.0", "a.1.b"]


def test_a_batch_that_is_shown_only_with_its_losses_counts_once_a_step() -> None:
    """Two losses may share a batch; the same batch in the next step is a repetition."""
    watched, batch = Watched([BatchProbe()]), torch.arange(4)
    for step in (1, 2):
        for _ in range(2):
            watched.emit(EventKind.LOSS, step, batch=batch)
        watched.emit(EventKind.STEP_END, step)
    assert watched.values("batch.hash_repeat") == [0.0, 1.0]


def test_batches_of_one_label_each_are_noticed_once_the_label_changes() -> None:
    rows = torch.randn(8, 2)
    of = [[(rows, torch.full((8,), label))] for label in (0, 0, 1, 1)]
    mixed = [(rows, torch.arange(8) % 3)]
    assert feed(*of, mixed, of[0]).values("batch.one_label") == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def test_labels_that_never_change_and_batches_of_few_rows_are_no_order() -> None:
    rows = torch.randn(8, 2)
    always = [[(rows, torch.zeros(8, dtype=torch.bool))]] * 3
    assert set(feed(*always).values("batch.one_label")) == {0.0}
    few = [[(rows[:4], torch.full((4,), n))] for n in range(3)]
    sequences = [[(rows, torch.full((8, 4), n))] for n in range(3)]
    assert feed(*few, *sequences).values("batch.one_label") == []


def test_a_batch_that_is_the_whole_data_set_is_no_repetition() -> None:
    x = torch.randn(8, 4)
    for size, repeats in ((8, [0.0, 0.0, 0.0]), (64, [0.0, 1.0, 2.0]), (None, [0.0, 1.0, 2.0])):
        watched = Watched([BatchProbe()])
        for step in (1, 2, 3):
            watched.emit(EventKind.BATCH_READY, step, n_samples=8, dataset_size=size)
            watched.emit(EventKind.LOSS, step, batch=[x.clone()])
            watched.emit(EventKind.STEP_END, step)
        assert watched.values("batch.hash_repeat") == repeats
