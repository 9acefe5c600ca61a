"""What a run is like, for rules that apply to some runs only (``applies_if``): said as samples, so that a replay knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from healthcheck.core.events import Event, ModelView
from healthcheck.core.samples import NO_LABELS, Labels, Sample
from healthcheck.engine.episodes import ADAPTERS, OPTIMIZERS, RANKS, ROUTER, RuleState

ADAPTER_NAMES = ("lora_", "adapter", "ia3_")
"""How the parts of parameter names begin that libraries for fine-tuning give to what they add."""
ROUTER_NAMES = ("router", "gate")
"""Modules that send tokens to experts, where experts stand beside them."""


class Traits:
    """Looks at steps 1, 2, 4, 8, ..., as long as some rule does not know yet whether it applies.

    :param undecided: the rules that are waiting.
    :param world_size: processes that train together, as far as it is known at the moment.
    """

    def __init__(self, undecided: Callable[[], list[RuleState]], world_size: Callable[[], int]) -> None:
        self._undecided = undecided
        self._world_size = world_size
        self._said: set[tuple[str, Labels]] = set()
        self._next = 1
        self.done = not undecided()
        """Nobody is waiting (any more)."""

    def look(self, event: Event, at: float) -> list[Sample]:
        """What is new, at the end of a step."""
        if event.step < self._next:
            return []
        self._next = 2 * event.step
        self.done = not self._undecided()
        if self.done:
            return []
        found = [
            Sample(metric, event.step, 1.0, labels, "train", at)
            for metric, labels in self._traits(event)
            if (metric, labels) not in self._said
        ]
        self._said.update((sample.metric, sample.labels) for sample in found)
        return found

    def _traits(self, event: Event) -> Iterable[tuple[str, Labels]]:
        if self._world_size() > 1:
            yield RANKS, (("count", str(self._world_size())),)
        optimizers = max(event.optimizer_index + 1, len(event.model.optimizers()) if event.model is not None else 0)
        if optimizers > 1:
            yield OPTIMIZERS, (("count", str(optimizers)),)
        if event.model is not None and any(_adds(name) for name, _ in event.model.named_parameters()):
            yield ADAPTERS, NO_LABELS
        if event.model is not None and _routes(event.model):
            yield ROUTER, NO_LABELS


def _adds(parameter: str) -> bool:
    return any(part.lower().startswith(ADAPTER_NAMES) for part in parameter.split("."))


def _routes(model: ModelView) -> bool:
    names = [name.split(".") for name, _ in model.named_modules()]
    routers = {".".join(parts[:-1]) for parts in names if parts[-1].lower() in ROUTER_NAMES}
    experts = {".".join(parts[:-1]) for parts in names if parts[-1].lower() == "experts"}
    return bool(routers & experts)
