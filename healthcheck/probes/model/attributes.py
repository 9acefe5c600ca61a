"""Parameters behind tensors that hang at a module and are none of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.probes.graph.nodes import parents_of
from healthcheck.probes.values import is_tensor

NODES = 16
"""Operations between such a tensor and its parameter that are followed: a move to a device or another type, a view."""


def made_of_parameters(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """``(path of the attribute, parameter)`` for ``self.w = nn.Parameter(...).to(device)`` and its like.

    Such a tensor was calculated once, from a parameter that the module does not know. Only what torch marks as a
    parameter counts: other tensors with a gradient may be inputs that are optimised by hand.
    """
    from torch import nn

    for name, module in modules:
        for key, value in vars(module).items():
            if is_tensor(value) and value.grad_fn is not None:
                for leaf in _leaves(value.grad_fn):
                    if isinstance(leaf, nn.Parameter):
                        yield f"{name}.{key}" if name else key, leaf


def _leaves(node: Any) -> Iterator[Any]:
    waiting, seen = [node], 0
    while waiting and seen < NODES:
        node = waiting.pop()
        seen += 1
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += parents_of(node)
