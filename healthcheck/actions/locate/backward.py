"""The backward pass of a replayed call, operation by operation: where gradients stop being finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.actions.locate.ranges import Range, bad, is_real, range_of


@dataclass(frozen=True, slots=True)
class BadOperation:
    """The first operation whose incoming gradients are finite and whose outgoing ones are not."""

    name: str
    """``sqrt``, ``native_layer_norm``."""
    number: int
    """As autograd counts operations in the forward pass."""
    reached: list[Range]
    """Gradients that arrived at its output."""
    made: list[Range]
    """Gradients that it made for its inputs."""


def trace_backward(
    outputs: Sequence[Any], gradients: Sequence[Any], leaves: Sequence[Any], tick: Callable[[], None]
) -> tuple[BadOperation | None, bool]:
    """Differentiate again without touching any ``.grad``; ``(first bad operation, whether a leaf got a bad gradient)``.

    :param outputs: tensors with the graph of the replayed forward pass.
    :param gradients: what came back to each of them in the step.
    :param leaves: tensors to differentiate with respect to.
    """
    import torch

    found: list[BadOperation] = []
    handles = [node.register_hook(_watch(node, found, tick)) for node in _nodes(outputs)]
    try:
        made = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    hit = any(bool((~torch.isfinite(_values(g))).any()) for g in made if g is not None and is_real(g))
    return (found[0] if found else None), hit


def _nodes(outputs: Sequence[Any]) -> list[Any]:
    """All operations behind these tensors, each once."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    nodes = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        waiting += [after for after, _ in node.next_functions if after is not None]
    return nodes


def _watch(node: Any, found: list[BadOperation], tick: Callable[[], None]) -> Callable[[Any, Any], None]:
    name, number = node.name(), node._sequence_nr()

    def look(made: Any, reached: Any) -> None:
        if found:
            return
        tick()
        out = [range_of(g, f"[{i}]") for i, g in enumerate(made) if g is not None and is_real(g)]
        if bad(out) is None:
            return
        came = [range_of(g, f"[{i}]") for i, g in enumerate(reached) if g is not None and is_real(g)]
        if bad(came) is None:
            found.append(BadOperation(_plain(name), number, came, out))

    return look


def _plain(name: str) -> str:
    """``SqrtBackward0`` -> ``sqrt``, ``NativeLayerNormBackward0`` -> ``native_layer_norm``."""
    stem = name.split("::")[-1].rstrip("0123456789").removesuffix("Backward")
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(stem))


def _values(gradient: Any) -> Any:
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return gradient.coalesce().values() if gradient.is_sparse else gradient
