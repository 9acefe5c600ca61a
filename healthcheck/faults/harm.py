"""What each fault does to tensors. Torch is imported where it is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from healthcheck.faults.spec import Fault


def loss_factor(fault: Fault, step: int) -> float:
    """What the loss is multiplied with at ``step``."""
    if fault.kind == "nan-loss":
        return math.nan
    if fault.kind == "spike":
        return fault.amount
    return float(fault.amount ** min(step - fault.first + 1, 2000))


def trained(optimizer: Any) -> list[Any]:
    """Parameters of an optimizer that have a gradient now."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _spoil(tensor: Any, value: float) -> None:
    import torch

    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = value


def spoil_gradient(optimizers: Iterable[Any], value: float) -> bool:
    """Set one element of one gradient; False if there is no gradient."""
    for optimizer in optimizers:
        for parameter in trained(optimizer):
            _spoil(parameter.grad, value)
            return True
    return False


def spoil_weight(optimizer: Any) -> bool:
    for parameter in trained(optimizer):
        _spoil(parameter, math.nan)
        return True
    return False


def spoil_input(given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The same inputs with a NaN in the first floating-point tensor; None if there is none."""
    for i, value in enumerate(given):
        if hasattr(value, "is_floating_point") and value.is_floating_point() and value.numel():
            broken = value.clone()
            _spoil(broken, math.nan)
            return (*given[:i], broken, *given[i + 1 :])
    return None


def zero_rates(optimizer: Any, saved: list[tuple[Any, Any]]) -> None:
    """Set every learning rate to 0; the first rates are kept in ``saved``."""
    known = {id(group) for group, _ in saved}
    for group in optimizer.param_groups:
        if id(group) not in known:
            saved.append((group, group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"]))
        if hasattr(group["lr"], "zero_"):
            group["lr"].zero_()
        else:
            group["lr"] = 0.0


def restore_rates(saved: list[tuple[Any, Any]]) -> None:
    while saved:
        group, rate = saved.pop()
        group["lr"] = rate


def remember(optimizer: Any, frozen: list[tuple[Any, Any]]) -> bool:
    """Keep a copy of one tensor that is about to be updated; False if there is none."""
    for parameter in trained(optimizer):
        frozen.append((parameter, parameter.detach().clone()))
        return True
    return False


def put_back(frozen: list[tuple[Any, Any]]) -> None:
    if not frozen:
        return
    import torch

    with torch.no_grad():
        while frozen:
            parameter, before = frozen.pop()
            parameter.copy_(before)


def keep(optimizer: Any, size: float) -> Any:
    """A tensor of ``size`` bytes on the device of the parameters; written to, so that the memory is really taken."""
    import torch

    device = optimizer.param_groups[0]["params"][0].device
    return torch.ones(max(1, int(size) // 4), dtype=torch.float32, device=device)
