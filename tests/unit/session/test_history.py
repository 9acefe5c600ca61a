"""The values that are kept of each series, and which of them a framework's logger is given."""

from __future__ import annotations

from healthcheck.core.samples import Sample
from healthcheck.engine.columns import History


def remembering(**series: list[float]) -> History:
    history = History()
    for name, values in series.items():
        history.remember(Sample(name, step, value) for step, value in enumerate(values, 1))
    return history


def test_what_varies_or_is_a_size_makes_a_chart() -> None:
    history = remembering(loss=[2.0, 1.0], memory=[5e9, 5e9], skipped=[0.0, 1.0, 0.0])
    assert history.charted() == {"loss": 1.0, "memory": 5e9, "skipped": 0.0}


def test_signs_that_never_changed_and_values_seen_once_make_none() -> None:
    assert remembering(lost=[0.0, 0.0], heartbeat=[1.0, 1.0, 1.0], gain=[0.4]).charted() == {}


def test_a_value_that_is_not_finite_is_shown() -> None:
    assert list(remembering(loss=[0.0, float("nan")]).charted()) == ["loss"]


def test_series_with_labels_and_those_that_the_framework_has_are_left_out() -> None:
    history = remembering(loss=[2.0, 1.0], lr=[0.1, 0.2])
    history.remember(Sample("grad_norm", step, float(step + 1), (("parameter", "w"),)) for step in (1, 2))
    assert history.charted(leave_out=["lr"]) == {"loss": 1.0}
