"""Graphs that are kept, loaders that ran dry, labels among the features, warm-ups that repeat, optimizers not resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driver import Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.leaked import LOOKS, LabelLeakProbe
from healthcheck.probes.learning_rate import LearningRateProbe
from healthcheck.probes.loaders import LONG, SETTLED, DryLoaderProbe
from healthcheck.probes.memory import EVERY, KeptGraphProbe
from healthcheck.probes.optimizers import ResumedOptimizerProbe

# --- graphs of past steps --------------------------------------------------------------------------------------------


def kept(keep: Callable[[list[Any], torch.Tensor, torch.Tensor], None], steps: int = 12 * EVERY) -> float:
    watched = Watched([KeptGraphProbe()])
    model, held = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), list[Any]()
    for step in range(1, steps + 1):
        outputs = model(torch.randn(8, 4))
        loss = F.cross_entropy(outputs, torch.randint(0, 3, (8,)))
        if step % EVERY == 1:
            watched.emit(EventKind.LOSS, step, loss_graph=loss.grad_fn)
        loss.backward()
        keep(held, loss, outputs)
    return watched.last("memory.kept_graphs")


def summed(held: list[Any], loss: torch.Tensor, outputs: torch.Tensor) -> None:
    held[:] = [held[0] + loss if held else loss]


@pytest.mark.parametrize(
    "keep", [summed, lambda held, loss, outputs: held.append(loss), lambda held, loss, outputs: held.append(outputs)]
)
def test_sums_and_lists_that_keep_graphs_are_told(
    keep: Callable[[list[Any], torch.Tensor, torch.Tensor], None],
) -> None:
    assert kept(keep) == 11 * EVERY


def test_detached_values_and_the_graph_of_the_last_step_are_not() -> None:
    assert kept(lambda held, loss, outputs: held.append((loss.detach(), outputs.detach()))) == 0
    assert kept(lambda held, loss, outputs: held.__setitem__(slice(None), [loss, outputs])) <= EVERY


def test_a_part_that_every_step_uses_anew_counts_once() -> None:
    watched, weight = Watched([KeptGraphProbe()]), nn.Parameter(torch.ones(3))
    shared = weight.exp()
    for step in range(1, 10 * EVERY, EVERY):
        watched.emit(EventKind.LOSS, step, loss_graph=(shared * step).sum().grad_fn)
    assert watched.last("memory.kept_graphs") <= EVERY


# --- loaders that ran dry --------------------------------------------------------------------------------------------


def stale(batches: Iterator[torch.Tensor | None], *, copied: bool = False, micro: int = 1) -> list[float]:
    watched, model, x = Watched([DryLoaderProbe()]), nn.Linear(4, 1), torch.zeros(4, 4)
    for step, batch in enumerate(batches, 1):
        if batch is not None:
            x = batch
            watched.emit(EventKind.BATCH_READY, step, n_samples=len(x))
        used = x.clone() if copied else x
        for _ in range(micro):
            watched.emit(EventKind.LOSS, step, batch=batch, loss_graph=model(used).square().mean().grad_fn)
    return watched.values("batch.stale") if "batch.stale" in watched.names() else []


def drawn(count: int, every: int = 1) -> Iterator[torch.Tensor | None]:
    for number in range(count * every):
        yield torch.randn(4, 4) if number % every == 0 else None


def nothing(count: int) -> Iterator[None]:
    yield from [None] * count


def test_the_last_batch_over_and_over_is_told() -> None:
    assert stale(iter([*drawn(SETTLED), *nothing(2 * LONG)])) == [LONG, 2 * LONG]


def test_other_data_many_updates_per_batch_and_one_batch_from_the_start_are_not() -> None:
    assert stale(iter([*drawn(SETTLED), *nothing(2 * LONG)]), copied=True) == [0, 0]
    assert stale(iter([*drawn(SETTLED, every=20), *nothing(2 * LONG)])) == []
    assert stale(iter([*drawn(1), *nothing(4 * LONG)])) == []


def test_passes_that_give_nothing_are_counted_in_a_row() -> None:
    watched = Watched([DryLoaderProbe()])
    for step, samples in enumerate([8, 0, 0, 8, 0], 1):
        watched.emit(EventKind.BATCH_READY, step, n_samples=samples)
        if samples:
            watched.emit(EventKind.LOSS, step, batch=torch.zeros(samples))
    assert watched.values("batch.empty_passes") == [1, 2, 0, 1]


# --- labels among the features ---------------------------------------------------------------------------------------


def told(x: torch.Tensor, y: torch.Tensor, loss: Callable[..., torch.Tensor] = F.cross_entropy) -> float:
    watched = Watched([LabelLeakProbe()])
    outputs = nn.Sequential(nn.Linear(x.shape[1], 8), nn.ReLU(), nn.Linear(8, 3 if y.dtype == torch.long else 1))(x)
    for step in range(1, LOOKS[0] + 1):
        graph = loss(outputs if y.dtype == torch.long else outputs.squeeze(1), y).grad_fn
        watched.emit(EventKind.LOSS, step, loss_graph=graph)
    return watched.last("input.tells_label") if watched.names() else 0.0


def with_columns(x: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, *(c.reshape(len(x), -1).float() for c in columns)], 1)


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3


def test_columns_made_of_the_label_are_counted() -> None:
    assert told(with_columns(X, Y), Y) == 1
    assert told(with_columns(X, (Y.float() - 1) / 0.82), Y) == 1
    assert told(with_columns(X, F.one_hot(Y, 3)), Y) == 3
    assert told(with_columns(X, 3 * X[:, 0] + 1), X[:, 0], F.mse_loss) == 2
    assert told(with_columns(X, Y > 0), (Y > 0).float(), F.binary_cross_entropy_with_logits) == 1


def test_columns_that_say_something_of_it_are_not() -> None:
    assert told(with_columns(X, Y + 0.01 * X[:, 0]), Y) == 0
    assert told(with_columns(X, Y > 0), Y) == 0  # tells one class from two that stay alike
    assert told(X, X.sum(1), F.mse_loss) == 0
    assert told(X, (X[:, 0] > 0).long()) == 0


def test_prototypes_without_noise_toys_of_a_few_columns_and_small_batches_are_left_alone() -> None:
    assert told(torch.randn(3, 10)[Y], Y) == 0
    assert told(with_columns(X[:, :2], Y), Y) == 0
    assert told(2 * X[:, :1] + 1, X[:, 0], F.mse_loss) == 0
    assert told(with_columns(X, Y)[:12], Y[:12]) == 0
    assert told(with_columns(X, Y), torch.zeros(64, dtype=torch.long)) == 0


# --- warm-ups that repeat --------------------------------------------------------------------------------------------


def warmups(rates: list[float], *, rebuilt: int = 10**9) -> float:
    watched, model = Watched([LearningRateProbe()]), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, rate in enumerate(rates, 1):
        if step % rebuilt == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.param_groups[0]["lr"] = rate
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
    return watched.last("lr.warmups") if watched.names() else 0.0


RISE = [0.1 * n for n in range(1, 11)]


def test_warm_ups_that_fall_from_their_peak_to_their_start_are_counted() -> None:
    assert warmups(RISE * 4) == 3
    assert warmups([*RISE, *[1.0] * 20] * 4) == 3


def test_cycles_restarts_and_warm_ups_of_further_optimizers_are_not() -> None:
    assert warmups((RISE + RISE[::-1]) * 4) == 0
    assert warmups([*RISE, 0.9, 0.7, 0.4] * 4) == 0
    assert warmups(RISE[::-1] * 4) == 0
    assert warmups(RISE * 4, rebuilt=10) == 0


# --- optimizers that are not resumed ---------------------------------------------------------------------------------


def state_lost(step: int, *optimizers: torch.optim.Optimizer) -> list[float]:
    watched = Watched([ResumedOptimizerProbe()])
    for later, optimizer in enumerate(optimizers):
        watched.emit(EventKind.BEFORE_UPDATE, step + later, optimizer=optimizer)
    return watched.values("optimizer.state_lost") if watched.names() else []


def test_an_optimizer_that_goes_on_without_its_state_is_told() -> None:
    model = nn.Linear(2, 1)
    assert state_lost(101, torch.optim.Adam(model.parameters())) == [1]
    trained = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    trained.step()
    assert state_lost(101, trained) == [0]


def test_backward_passes_before_the_first_update_make_no_resume() -> None:
    watched = Watched([ResumedOptimizerProbe()])
    watched.emit(EventKind.LOSS, 1)
    watched.emit(EventKind.BEFORE_UPDATE, 4, optimizer=torch.optim.Adam(nn.Linear(2, 1).parameters()))
    assert not watched.names()


def test_first_steps_further_optimizers_and_those_without_a_memory_are_not() -> None:
    model = nn.Linear(2, 1)
    assert state_lost(1, torch.optim.Adam(model.parameters())) == []
    assert state_lost(1, *(torch.optim.Adam(model.parameters()) for _ in range(3))) == []
    assert state_lost(101, torch.optim.SGD(model.parameters(), lr=0.1)) == [0]
