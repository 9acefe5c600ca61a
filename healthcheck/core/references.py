"""Ways back to things that must not live on because we looked at them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak(thing: Any) -> Callable[[], Any]:
    """A way back to ``thing`` that does not keep it alive, where its type allows that.

    We outlive models and optimizers that a script replaces; holding one would hold its memory.
    """
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing
