"""Learning rates, as the optimizer uses them in the step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.transfer.late import Late
from healthcheck.probes.values import on_host, optimizer_labels, scalar, with_label
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample


class LearningRateProbe:
    """Reads ``param_groups`` before the update: after it, a scheduler may have moved on."""

    name = "learning-rate"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE, EventKind.STEP_END)
    answers_once = (EventKind.AFTER_UPDATE, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("lr", "Learning rate; the largest of all parameter groups."),
        Metric("lr", "Learning rate of one parameter group.", labels=("group",)),
    )

    def __init__(self) -> None:
        self._given: dict[int, int] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        index = event.optimizer_index
        if self._given.get(index) == event.step:
            return ()
        largest = largest_rate(event.optimizer)
        if largest is None:
            largest = scalar(event.lr)
            if largest is None:
                return ()
        self._given[index] = event.step
        labels = optimizer_labels(index)
        samples = [Sample("lr", event.step, largest, labels)]
        if demand.wants("lr[]"):
            samples += [
                Sample("lr", event.step, rate, with_label(labels, "group", name))
                for name, rate in group_rates(event.optimizer).items()
            ]
        return samples


def group_rates(optimizer: Any) -> dict[str, Any]:
    """Learning rate by group: its name where it has one, else its number. Device rates stay there."""
    rates: dict[str, Any] = {}
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        rate = scalar(group.get("lr"))
        if rate is not None:
            name = group.get("name")
            rates[name if isinstance(name, str) and name not in rates else str(number)] = rate
    return rates


def largest_rate(optimizer: Any) -> Any:
    """The largest rate of all groups, on the device where one is; None without any."""
    groups: Any = getattr(optimizer, "param_groups", ())
    if len(groups) == 1:
        rate = groups[0].get("lr")
        return rate if type(rate) is float else scalar(rate)
    values = list(group_rates(optimizer).values())
    if not values:
        return None
    if all(on_host(v) for v in values):
        return max(values)
    return values[0] if len(values) == 1 else Late(lambda *numbers: max(numbers), *values)


def rates_of(optimizer: Any, params: list[Any]) -> list[float]:
    """Learning rate per parameter; a rate that lives on a device counts as above zero."""
    by_id: dict[int, float] = {}
    for group in optimizer.param_groups:
        rate = scalar(group.get("lr", 1.0))
        number = float(rate) if rate is not None and on_host(rate) else 1.0
        if len(optimizer.param_groups) == 1:
            return [number] * len(params)
        for parameter in group["params"]:
            by_id[id(parameter)] = number
    return [by_id[id(p)] for p in params]
