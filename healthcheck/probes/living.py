"""Living objects of torch's classes, found among all that the garbage collector tracks."""

from __future__ import annotations

import gc
import sys
from typing import Any


def living(*kinds: str) -> list[Any]:
    """All living objects of these torch classes: ``Module``, ``Optimizer``, ``LRScheduler``. Some 100 ms; call it rarely.

    Asks ``type(obj)``, never the object: proxies and lazy modules of other packages stay asleep.
    """
    torch = sys.modules["torch"]
    classes = {
        "Module": torch.nn.Module,
        "Optimizer": torch.optim.Optimizer,
        "LRScheduler": torch.optim.lr_scheduler.LRScheduler,
    }
    bases = {classes[kind] for kind in kinds}
    wanted: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        cls = type(thing)
        hit = wanted.get(cls)
        if hit is None:
            hit = wanted[cls] = not bases.isdisjoint(cls.__mro__)
        if hit:
            found.append(thing)
    return found
