"""Reading Megatron Bridge's ``GlobalState``: steps, rates, results, and where checkpoints are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from healthcheck.names import canonical_metric

MAIN_LOSS = "lm loss"


def steps_done(state: Any) -> int:
    """Iterations that are behind us. At ``on_train_step_end`` the one just made is not counted yet."""
    return int(state.train_state.step)


def part_of(state: Any, section: str, name: str, default: Any = None) -> Any:
    """``cfg.<section>.<name>``, or ``default`` where this version or this recipe has none."""
    return getattr(getattr(getattr(state, "cfg", None), section, None), name, default)


def learning_rate(optimizer: Any) -> Any:
    """The largest rate of all groups: ``MegatronOptimizer`` and ``ChainedOptimizer`` show all of them."""
    rates = [group["lr"] for group in getattr(optimizer, "param_groups", None) or () if group.get("lr") is not None]
    return max(rates) if rates else None


def main_loss(losses: Mapping[str, Any] | None) -> Any:
    """The loss that is trained on; None on all but the last pipeline stage, where there are no losses."""
    if not losses:
        return None
    if MAIN_LOSS in losses:
        return losses[MAIN_LOSS]
    named = [name for name in losses if "loss" in name.lower()]
    return losses[named[0] if named else next(iter(losses))]


def results(total: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Evaluation results: the main loss as ``loss``, others under their own names."""
    if not total:
        return None
    main = MAIN_LOSS if MAIN_LOSS in total else next((n for n in total if "loss" in n.lower()), "")
    return {("loss" if name == main else canonical_metric(name.replace(" ", "_"))): v for name, v in total.items()}


def last_evaluations(state: Any) -> set[str]:
    """What ``pretrain`` does after training: ``eval``, ``test``, both, or nothing."""
    flags = (("eval", "do_valid"), ("test", "do_test"))
    return {name for name, flag in flags if getattr(state.train_state, flag, False) is True}


def batch_size(state: Any) -> tuple[int | None, int | None]:
    """``(samples, tokens)`` of one iteration; None where it is ramped up or the length is not fixed."""
    samples = part_of(state, "train", "global_batch_size")
    if not isinstance(samples, int) or part_of(state, "train", "rampup_batch_size"):
        return None, None
    length = part_of(state, "model", "seq_length")
    return samples, samples * length if isinstance(length, int) else None


def checkpoint_folder(root: Any, step: int) -> str:
    """Where Megatron writes the checkpoint after ``step`` iterations."""
    return os.path.join(os.fspath(root), f"iter_{step:07d}")


def newest_checkpoint(root: Any, step: int) -> str:
    """The folder of ``step``, or the newest one there: an asynchronous save is announced when it is done."""
    folder = checkpoint_folder(root, step)
    if os.path.isdir(folder):
        return folder
    try:
        there = sorted(name for name in os.listdir(root) if name.startswith("iter_") and name[5:].isdigit())
    except OSError:
        there = []
    return os.path.join(os.fspath(root), there[-1]) if there else folder


def clip_limit(state: Any) -> float | None:
    """The norm that gradients are clipped to; None where they are not."""
    limit = part_of(state, "optimizer", "clip_grad")
    return float(limit) if isinstance(limit, (int, float)) and limit > 0 else None
