"""Running words: what a device keeps of the gradients of steps whose numbers nobody reads.

Looking at one step in n must lose neither a NaN nor a spike of a single step. So the kernel is launched in every step,
and where its numbers are not read it keeps four of them. They are read with those of the next step that is, and begin anew.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

WORDS = ("nonfinite", "nonfinite_step", "largest", "largest_step")
"""Elements that were not finite and the first such step; the largest finite norm and its step. 0: there was none."""


def take_up(words: MutableSequence[float] | Any, step: int, norm: float, nonfinite: float) -> None:
    """What one step adds to the words: the arithmetic of the kernel, in Python, for a list or a tensor on the host.

    :param norm: L2 norm of all gradients.
    :param nonfinite: how many of their elements are NaN or infinite.
    """
    if nonfinite > 0 or norm != norm:
        if not words[0]:
            words[1] = float(step)
        words[0] += max(nonfinite, 1.0)
    elif norm > words[2]:
        words[2], words[3] = norm, float(step)


def hand_out(words: MutableSequence[float] | Any) -> list[float]:
    """The words, which begin anew."""
    given = [float(word) for word in words]
    for place in range(len(WORDS)):
        words[place] = 0.0
    return given
