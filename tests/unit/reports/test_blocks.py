"""The block of one alert: fixed order of facts, at most five lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from healthcheck.core.alerts import ActionOutcome, Alert, SeriesFact, Severity
from healthcheck.reports.alertblock import alert_block, mentions
from healthcheck.run.judge import BLOCK_STEPS


def no_history(series: str, n: int) -> list[tuple[int, float]]:
    return []


def an_alert(**changes: Any) -> Alert:
    value = changes.get("value", 6.91)
    given: dict[str, Any] = {
        "rule": "loss-spike",
        "number": 1,
        "severity": Severity.WARNING,
        "phase": "train",
        "episode": 1,
        "fired_step": 1502,
        "detected_step": 1502,
        "value": value,
        "score": 92.0,
        "normal": 2.02,
        "threshold": "above 8",
        "series": [SeriesFact("loss", (), value, 92.0, 2.02)],
        "count": 1,
        "message": "loss jumps",
        "hint": "look at the batch",
    }
    return Alert(**{**given, **changes})


def block(alert: Alert, explained: Sequence[Alert] = (), **options: Any) -> str:
    return "\n".join(alert_block(alert, explained, options.pop("history", no_history), **options))


def test_the_first_line_has_rule_step_value_normal_and_score_but_no_condition() -> None:
    first = block(an_alert(), score="z").splitlines()[0]
    assert first == "WARN loss-spike  step 1,502: loss jumps (6.91, normal 2.02, z 92)"


def test_a_number_that_the_message_holds_is_not_repeated() -> None:
    alert = an_alert(message="loss 6.910 is 92.0 robust sigmas from its recent median 2.02")
    assert block(alert, score="z", width=200) == (
        "WARN loss-spike  step 1,502: loss 6.910 is 92.0 robust sigmas from its recent median 2.02\n"
        "      try: look at the batch"
    )


def test_a_statistic_over_a_window_is_said_and_not_the_last_sample_in_its_place() -> None:
    alert = an_alert(normal=None, score=0.93, value=1.0, message="most updates were skipped")
    assert block(alert, score="mean").splitlines()[0] == (
        "WARN loss-spike  step 1,502: most updates were skipped (mean 0.93)"
    )


def test_a_non_finite_value_is_set_beside_the_last_finite_one() -> None:
    alert = an_alert(value=math.nan, score=1.0, normal=None, threshold="non-finite", message="loss is nan")

    def history(series: str, n: int) -> list[tuple[int, float]]:
        return [(1499, 2.31), (1500, math.inf), (1502, math.nan)]

    assert "loss is nan (2.31 3 steps earlier)" in block(alert, history=history)


def test_facts_of_explained_alerts_are_told_once() -> None:
    facts = {"first": "head.scale, 1 of 64 values", "tensors": "1 of 24 gradients not finite"}
    text = block(an_alert(facts={**facts, "weights": "finite"}), [an_alert(rule="grads-not-finite", facts=facts)])
    assert text.count("first bad gradient: head.scale, 1 of 64 values") == 1
    assert "weights: finite" in text


def test_a_value_that_arrived_more_than_a_block_late_says_when_it_was_seen() -> None:
    """Short steps are judged in blocks: that an alert comes at the end of its own is nothing to tell."""
    assert "seen at step" not in block(an_alert(detected_step=1502 + BLOCK_STEPS))
    assert "seen at step 1,535" in block(an_alert(detected_step=1502 + BLOCK_STEPS + 1))


def test_many_series_are_counted_and_the_worst_named() -> None:
    series = [SeriesFact(f"grad_norm[layer{i}]", (), 0.0, 0.0, None) for i in range(5)]
    text = block(an_alert(series=series, count=24))
    assert "24 series: grad_norm[layer0], grad_norm[layer1], grad_norm[layer2] and 2 more" in " ".join(text.split())


def test_what_was_held_back_says_why() -> None:
    actions = [ActionOutcome.of("warn", "warned"), ActionOutcome("stop", False, "observe mode", held=True)]
    assert "would have stopped (observe)" in block(an_alert(actions=actions))


def test_an_action_that_failed_is_not_told_as_done() -> None:
    actions = [ActionOutcome("cleanup", False, "failed: RuntimeError: no device")]
    assert "cleanup: failed: RuntimeError: no device" in block(an_alert(actions=actions))


def test_a_muted_alert_gives_the_reason() -> None:
    assert "muted: new data mix" in block(an_alert(muted="new data mix"))


def test_a_block_says_what_then_where_and_what_was_done_then_what_to_try() -> None:
    actions = [
        ActionOutcome.of("cleanup", "released 812 MiB"),
        ActionOutcome.of("evidence", "evidence: /r/001", path="/r/001"),
    ]
    lines = block(an_alert(number=2, facts={"first": "a.b"}, actions=actions, detected_step=1603)).splitlines()
    starts = ["WARN loss-spike", "first bad place: a.b; seen at step 1,603; released 812 MiB", "try: look at the batch"]
    assert [line.strip()[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_block_higher_than_five_lines(width: int) -> None:
    long = " ".join(["a sentence that says what happened, and then says it again"] * 4)
    alert = an_alert(message=long, hint=long, facts={"first": "encoder.layers.11.self_attention.output.weight"})
    lines = block(alert, width=width, score="z").splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 5
    assert lines[0].startswith("WARN loss-spike  step 1,502: ")
    assert any(line.startswith("      try: ") for line in lines)


def test_a_rank_is_named_only_where_there_are_several() -> None:
    assert "rank" not in block(an_alert())
    assert "on rank 3" in block(an_alert(rank=3), world_size=64)


def test_what_is_the_same_in_every_block_is_said_once_at_the_end() -> None:
    text = block(an_alert(docs="rules/loss-spike"))
    assert "healthcheck why" not in text
    assert "explain" not in text
    assert "only reported" not in text


def test_a_number_inside_another_number_is_not_mentioned() -> None:
    """Else "normal 2" would be left out of "loss is 20" as if it had been said."""
    assert not mentions("loss is 20", "2")
    assert not mentions("loss is 2.31", "2")
    assert mentions("loss is 2.", "2")
    assert mentions("loss is 2, usually 1", "2")
