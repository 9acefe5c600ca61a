"""What a run is like, for rules that apply to some runs only (``applies_if``): said as samples, so that a replay knows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.core.events import Event, EventKind, ModelView
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import NO_LABELS, Labels, Metric, Sample
from healthcheck.engine.episodes import ADAPTERS, OPTIMIZERS, RANKS, ROUTER
from healthcheck.probes.looks import LOOK_SELDOM, next_look
from healthcheck.rulelang.rule import SETTLED as RUN_SETTLED

ADAPTER_NAMES = ("lora_", "adapter", "ia3_")
"""How the parts of parameter names begin that libraries for fine-tuning give to what they add."""
ROUTER_NAMES = ("router", "gate")
"""Modules that send tokens to experts, where experts stand beside them."""


class RunTraitsProbe:
    """Looks at steps 1, 2, 4, ... 128, 300, 600, 1,200, ... and says what is new. Wanted as long as some rule waits for it."""

    name = "run-traits"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(OPTIMIZERS, "1 when several optimizers are seen to step; the label `count` says how many."),
        Metric(
            RANKS, "1 in a job of several processes; the label `count` says how many.", needs=("several processes",)
        ),
        Metric(ADAPTERS, "1 when parameters of adapters (LoRA and the like) are trained."),
        Metric(ROUTER, "1 when the model has experts and a router."),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._said: set[tuple[str, Labels]] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.step < self.rests_until:
            return ()
        coming = 2 * event.step
        self.rests_until = coming if coming < RUN_SETTLED else next_look(coming - 1, LOOK_SELDOM)
        found = [said for said in _traits(event) if said not in self._said]
        self._said.update(found)
        return [Sample(metric, event.step, 1.0, labels) for metric, labels in found]


def _traits(event: Event) -> list[tuple[str, Labels]]:
    found: list[tuple[str, Labels]] = []
    ranks = event.run.world_size if event.run is not None else 1
    if ranks > 1:
        found.append((RANKS, (("count", str(ranks)),)))
    optimizers = max(event.optimizer_index + 1, len(event.model.optimizers()) if event.model is not None else 0)
    if optimizers > 1:
        found.append((OPTIMIZERS, (("count", str(optimizers)),)))
    if event.model is not None:
        parts = {part.lower() for name, _ in event.model.named_parameters() for part in name.split(".")}
        if [part for part in parts if part.startswith(ADAPTER_NAMES)]:
            found.append((ADAPTERS, NO_LABELS))
        if routed_experts(event.model):
            found.append((ROUTER, NO_LABELS))
    return found


def routed_experts(model: ModelView) -> list[tuple[str, Any]]:
    """Modules named ``experts`` that stand beside a router, with their names."""
    names = model.named_modules()
    routers = {head for name, _ in names for head, _, last in [name.rpartition(".")] if last.lower() in ROUTER_NAMES}
    if not routers:
        return []
    found = ((name, module, *name.rpartition(".")) for name, module in names)
    return [(name, module) for name, module, head, _, last in found if last.lower() == "experts" and head in routers]


LIBRARIES = frozenset({"transformers", "timm", "sentence_transformers", "adapters", "open_clip"})
"""Packages whose models have poolers that a task may leave out."""


def poolers_of_libraries(model: ModelView) -> set[int]:
    """Parameters of the pooling heads that a library's model brings along.

    BERT and its kin end in one; token classifiers, embeddings from the last layer and the like never call it.
    """
    found: set[int] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "pooler" and type(module).__module__.partition(".")[0] in LIBRARIES:
            found.update(id(p) for p in module.parameters())
    return found
