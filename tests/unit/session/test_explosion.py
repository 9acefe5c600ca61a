"""A NaN after an explosion says explosion; one out of nothing does not."""

from __future__ import annotations

from math import inf, nan

import pytest

from healthcheck.core.alerts import Finding, Kind, SeriesFact, Severity
from healthcheck.engine.columns import name_explosion


def found(value: float, before: list[float], fired_step: int = 0) -> Finding:
    finding = Finding(
        cause="",
        kind=Kind.FACT,
        severity=Severity.ERROR,
        phase="train",
        fired_step=fired_step or len(before) + 1,
        detected_step=len(before) + 1,
        value=value,
        score=None,
        normal=None,
        threshold="non-finite",
        series=[SeriesFact("loss", (), value, None, None)],
        count=1,
        message="loss is nan",
        hint="look at the batch",
    )
    name_explosion(finding, lambda series, n: list(enumerate(before, 1))[-n:])
    return finding


def test_the_message_says_from_where_to_where_it_grew_and_the_hint_is_about_growth() -> None:
    finding = found(nan, [2.0, 3.0, 1.0, 50.0, 4e7])
    assert finding.message == "loss is nan: it exploded, from 1 to 4e+07 in 2 steps"
    assert "lower the learning rate" in finding.hint


@pytest.mark.parametrize(
    ("before", "fired_step"),
    [
        ([2.0, 2.1, 1.9, 2.0], 0),
        ([2.0, 90.0, 2.0], 0),
        ([2.0, 9e9, 3.0], 0),
        ([2.0, 4e7], 0),
        ([2.0, 50.0, 4e7], 40),
        ([nan, inf, nan], 0),
    ],
)
def test_what_did_not_grow_until_it_broke_keeps_its_story(before: list[float], fired_step: int) -> None:
    finding = found(nan, before, fired_step)
    assert (finding.message, finding.hint) == ("loss is nan", "look at the batch")


def test_a_finite_value_is_none_of_it_and_nothing_is_said_twice() -> None:
    assert found(5e9, [2.0, 50.0, 4e7]).message == "loss is nan"
    finding = found(nan, [2.0, 50.0, 4e7])
    once = finding.message
    name_explosion(finding, lambda series, n: [(1, 2.0), (2, 50.0), (3, 4e7)])
    assert finding.message == once
