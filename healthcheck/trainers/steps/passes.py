"""Batches as loaders hand them out, and where a loader stands in its pass over the data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.guarding import guarded

if TYPE_CHECKING:
    from healthcheck.trainers.script.hooks import TorchHooks

_AT_RANDOM = frozenset(("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"))


def seen_draws(original: Callable[..., Any], hooks: TorchHooks) -> Callable[..., Any]:
    """``__next__`` of a loader's iterator that tells the steps of each batch."""

    def __next__(iterator: Any) -> Any:
        if not hooks.on:
            return original(iterator)
        began = time.perf_counter()
        try:
            batch = original(iterator)
        except StopIteration:
            if getattr(iterator, "_num_yielded", 1) == 0:
                guarded(hooks.steps.session, _gave_nothing, hooks, iterator)
            raise
        waited = time.perf_counter() - began
        guarded(hooks.steps.session, _drawn, hooks, iterator, batch, waited)
        return batch

    return __next__


def _drawn(hooks: TorchHooks, iterator: Any, batch: Any, waited: float) -> None:
    import torch

    dataset = getattr(iterator, "_dataset", None)
    facts = {"begins_pass": begins_pass(iterator), "worker_draws": hooks.worker_draws.of(iterator)}
    hooks.steps.batch_drawn(batch, waited, dataset, gradients=torch.is_grad_enabled(), **facts)


def _gave_nothing(hooks: TorchHooks, iterator: Any) -> None:
    """A pass that is over before its first batch is told as a batch without samples."""
    import torch

    _drawn(hooks, iterator, torch.empty(0), 0.0)


def begins_pass(iterator: Any) -> bool:
    """Whether the batch that was just drawn is the first of a pass in random order.

    :param iterator: torch's own, of a ``DataLoader``.
    """
    if getattr(iterator, "_num_yielded", 0) != 1:
        return False
    batches = getattr(iterator, "_index_sampler", None)
    sampler = getattr(batches, "sampler", batches)
    # By name: DistributedSampler is a class of its own, and looking for it would import torch.distributed.
    kinds = {cls.__name__ for cls in type(sampler).__mro__}
    if "DistributedSampler" in kinds:
        return bool(getattr(sampler, "shuffle", False))
    return not kinds.isdisjoint(_AT_RANDOM)
