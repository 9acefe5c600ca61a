"""``error_after``: what goes on for long is worse than what has just begun."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from healthcheck.core.alerts import Severity
from healthcheck.core.errors import RuleFileError

RULES = "external: [x]\nrules: {high: {metric: x, when: {above: 1}, for: 2, error_after: 4}}"
MANY = """
external: [x, y]
rules:
  high:
    causes:
      first: {metric: x, when: {above: 1}, error_after: 3}
      second: {metric: y, when: {above: 1}}
"""


def severities(b: Any) -> list[Severity]:
    return [alert.severity for alert in b.engine.alerts]


def test_an_episode_becomes_an_error_after_so_many_further_breaches(bench: Callable[..., Any]) -> None:
    b = bench(RULES)
    b.series("x", [0, 2, 2, 2, 2, 2])
    assert severities(b) == [Severity.WARNING]
    b.step(7, x=2.0)
    assert severities(b) == [Severity.ERROR]
    assert b.results[-1].amended == b.engine.alerts  # reports hear of it once ...
    b.step(8, x=2.0)
    assert not b.results[-1].amended  # ... and only once
    assert b.engine.alerts[0].findings[0].error_step == 7


def test_one_that_ends_before_stays_a_warning_and_the_next_one_counts_anew(bench: Callable[..., Any]) -> None:
    b = bench(RULES)
    b.series("x", [2, 2, 2, 2, 0, 0, 2, 2, 2, 2, 2, 0, 0])
    assert severities(b) == [Severity.WARNING, Severity.WARNING]


def test_samples_between_the_two_thresholds_do_not_make_it_worse(bench: Callable[..., Any]) -> None:
    text = "external: [x]\nrules: {high: {metric: x, when: {above: 1}, recover: {below: 0.5}, error_after: 2}}"
    b = bench(text)
    b.series("x", [2, 0.8, 0.8, 0.8, 0.8, 2])
    assert severities(b) == [Severity.WARNING]
    b.step(7, x=2.0)
    assert severities(b) == [Severity.ERROR]


def test_one_cause_that_goes_on_makes_the_alert_of_its_rule_an_error(bench: Callable[..., Any]) -> None:
    b = bench(MANY)
    b.step(1, x=2.0, y=2.0)
    for step in range(2, 5):
        b.step(step, x=2.0)
    (alert,) = b.engine.alerts
    assert alert.severity is Severity.ERROR
    assert [finding.severity for finding in alert.findings] == [Severity.ERROR, Severity.WARNING]


def test_a_run_that_is_resumed_goes_on_counting(bench: Callable[..., Any]) -> None:
    first = bench(RULES)
    first.series("x", [2, 2, 2, 2])
    saved = json.loads(json.dumps(first.engine.state_dict()))
    again = bench(RULES, start_step=4)
    assert again.engine.load_state_dict(saved) == []
    again.series("x", [2, 2], start=5)
    assert severities(again) == [Severity.ERROR]


def test_the_state_of_an_older_version_counts_from_where_it_goes_on(bench: Callable[..., Any]) -> None:
    first = bench(RULES)
    first.series("x", [2, 2])
    saved = first.engine.state_dict()
    del saved["causes"]["high"]["series"][0]["breached_since"]
    del saved["rules"]["high"]["open"]["findings"][0]["error_step"]
    again = bench(RULES, start_step=2)
    assert again.engine.load_state_dict(saved) == []
    again.series("x", [2] * 4, start=3)
    assert severities(again) == [Severity.ERROR]


def test_whoever_says_a_severity_in_a_nearer_file_keeps_it(bench: Callable[..., Any]) -> None:
    b = bench("extends: [healthcheck:core]\nrules: {not-learning.no-detections: {severity: warning}}")
    assert b.engine.by_id["not-learning.no-detections"].cause.error_after == 0
    b = bench("extends: [healthcheck:core]\nrules: {not-learning.no-detections: {for: 2}}")
    assert b.engine.by_id["not-learning.no-detections"].cause.error_after > 0


def test_a_note_stays_a_note(bench: Callable[..., Any]) -> None:
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, severity: info, error_after: 2}}")
    b.series("x", [2] * 6)
    assert severities(b) == [Severity.INFO]


def test_it_counts_samples_and_says_so(bench: Callable[..., Any]) -> None:
    with pytest.raises(RuleFileError, match="expected a number of samples, at least 1"):
        bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, error_after: 30s}}")
