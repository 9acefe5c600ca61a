"""All of the graph behind a loss: what each node was made from, and what it kept, without having anything computed anew."""

from __future__ import annotations

from typing import Any

from healthcheck.probes.graph.nodes import parents_of

MOST = 20_000
"""Nodes of one graph that are followed; some thousands are usual."""


def all_behind(root: Any) -> list[Any]:
    """Every node behind ``root``, each after those that it was made from; empty if there are too many.

    The list keeps torch's wrappers alive, so that the same node has the same ``id`` while it is looked at.
    """
    order: list[Any] = []
    known: dict[int, Any] = {}
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
            continue
        if id(node) in known:
            continue
        if len(known) >= MOST:
            return []
        known[id(node)] = node
        waiting.append((node, True))
        waiting += [(parent, False) for parent in parents_of(node)]
    return order


def saved(node: Any, name: str) -> Any:
    """A tensor that a node keeps for its backward pass (``_saved_NAME``); None if it keeps none.

    None as well where reading it has a price: activation checkpointing would run a part of the model anew, and
    offloading would fetch it back.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", None) is not None:
        return None
    return getattr(node, f"_saved_{name}", None)


def keeps(node: Any, name: str) -> bool | None:
    """Whether a node keeps a tensor of this name, without reading it; None where torch does not tell."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None else getattr(raw, "data", None) is not None
