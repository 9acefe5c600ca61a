"""Numbers that the script or its framework reports itself."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import NO_LABELS, Labels, Metric, Sample
from healthcheck.device.deferred import number

_EVAL_PREFIXES = ("eval_", "eval/", "eval.", "val_", "val/", "val.", "valid_", "valid/", "validation_", "validation/")
_TEST_PREFIXES = ("test_", "test/", "test.")


class EvaluationProbe:
    """Results of an evaluation as ``eval.<name>``, of a test as ``test.<name>``.

    ``eval_loss``, ``val/loss`` and ``loss`` all become ``eval.loss``. A named evaluation set is
    the label ``dataset``. What is no number is left out. The loss of an evaluation that was not reported is inferred,
    where the script computed it (:mod:`healthcheck.instrument.heldout`); an alert says so.
    """

    name = "evaluation"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_END, EventKind.TEST_END)
    provides: tuple[Metric, ...] = (
        Metric("eval.loss", "Loss of an evaluation.", needs=("evaluation",)),
        Metric("eval.accuracy", "Accuracy of an evaluation.", "fraction", needs=("evaluation",)),
        Metric("test.loss", "Loss of a test.", needs=("evaluation",)),
        Metric("evaluations.apart", "Steps from an evaluation to the next one.", "steps", needs=("evaluation",)),
    )
    provides_prefixes = ("eval.", "test.")
    """Any other name with these prefixes comes from here too, where the trainer reports it."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        """Data set -> step of its evaluation before."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not event.metrics:
            return ()
        phase = "eval" if event.kind is EventKind.EVAL_END else "test"
        labels: Labels = (("dataset", event.dataset),) if event.dataset else NO_LABELS
        said = event.inferred
        facts = (lambda: {"inferred": said}) if said else None
        samples = []
        if phase == "eval" and demand.wants("evaluations.apart"):
            before = self._before.get(event.dataset or "")
            self._before[event.dataset or ""] = event.step
            if before is not None:
                samples.append(Sample("evaluations.apart", event.step, float(event.step - before), NO_LABELS, phase))
        for name, given in event.metrics.items():
            value = number(given)
            if value is not None:
                samples.append(Sample(f"{phase}.{_bare(name, phase)}", event.step, value, labels, phase, detail=facts))
        return samples


class ScriptMetricsProbe:
    """Metrics that the script logs at the end of a step, under its own names."""

    name = "script-metrics"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_with = "metrics"
    provides: tuple[Metric, ...] = ()
    provides_prefixes = ("",)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not event.metrics:
            return ()
        values = ((name, number(given)) for name, given in event.metrics.items())
        return [Sample(name, event.step, value) for name, value in values if value is not None]


def _bare(name: str, phase: str) -> str:
    for prefix in _EVAL_PREFIXES if phase == "eval" else _TEST_PREFIXES:
        if name.startswith(prefix) and len(name) > len(prefix):
            return name[len(prefix) :]
    return name
