"""The state of all random number generators that a forward pass may draw from."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class RandomState:
    """Torch's generators (CPU and the CUDA cards in use), Python's and NumPy's. Read without a wait."""

    cpu: Any
    cards: dict[int, Any]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        import torch

        cards: dict[int, Any] = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            cards = {torch.cuda.current_device(): torch.cuda.get_rng_state()}
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(), cards, random.getstate(), numpy.random.get_state() if numpy is not None else None
        )

    def restore(self) -> None:
        import torch

        torch.set_rng_state(self.cpu)
        for card, state in self.cards.items():
            torch.cuda.set_rng_state(state, card)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)
