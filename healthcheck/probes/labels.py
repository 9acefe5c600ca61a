"""Labels of series, and many parameter names in few words."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from healthcheck.core.events import Event
from healthcheck.core.samples import Labels


@functools.cache
def optimizer_labels(index: int) -> Labels:
    """No label for the first optimizer, ``optimizer=1`` for the second."""
    return (("optimizer", str(index)),) if index > 0 else ()


def with_label(labels: Labels, name: str, value: str) -> Labels:
    """``labels`` and one more, sorted as :data:`healthcheck.core.samples.Labels` asks."""
    return tuple(sorted((*labels, (name, value))))


def pattern_of(name: str) -> str:
    """The family of a name: its last two parts behind a star, indices starred.

    ``blocks.3.attn.lora_A.weight`` -> ``*.lora_A.weight``; ``0.weight`` -> ``*.weight``.
    """
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    tail = parts[-2:]
    if tail[0] == "*" or len(parts) > 2:
        tail = ["*", *[part for part in tail if part != "*"]]
    return ".".join(tail)


def in_groups(hit: Iterable[str], everyone: Iterable[str], *, most: int = 4) -> str:
    """Describe ``hit`` names against ``everyone`` of their kind, largest groups first.

    A family with a single hit is given by its full name.
    """
    hits = list(hit)
    total = Counter(pattern_of(name) for name in everyone)
    found = Counter(pattern_of(name) for name in hits)
    words = []
    for pattern, count in found.most_common():
        if count == 1:
            words.append(next(name for name in hits if pattern_of(name) == pattern))
        else:
            words.append(f"{count} of {max(total[pattern], count)} tensors like {pattern}")
    if len(words) > most:
        rest = sum(count for _, count in found.most_common()[most:])
        words = [*words[:most], f"{rest} more"]
    return ", ".join(words)


def where_made(event: Event, thing: Any, what: str = "made") -> dict[str, str]:
    """``{"where": "train.py:31"}`` for an object whose place in the user's code is known, else nothing.

    :param what: ``made``; ``stepped`` for a scheduler; ``zero_grad`` for an optimizer or a model.
    """
    place = event.run.places.made(thing, what) if event.run is not None else ""
    return {"where": place} if place else {}


def where_called(event: Event, role: str) -> dict[str, str]:
    """The same for a function of the loop: ``zero_grad``, ``backward``, ``clip``, ``loader``, ``eval``."""
    place = event.run.places.called(role) if event.run is not None else ""
    return {"where": place} if place else {}


def where_in_model(event: Event, names: Iterable[str]) -> dict[str, str]:
    """The same for the module that holds the first of these parameters, or that has this name."""
    modules = dict(event.model.named_modules()) if event.model is not None else {}
    for name in names:
        holder = modules.get(name) or modules.get(name.rpartition(".")[0])
        return where_made(event, holder) if holder is not None else {}
    return {}


def first_few(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    given = list(names)
    if len(given) <= most:
        return ", ".join(given)
    return f"{', '.join(given[:most])} and {len(given) - most} more"
