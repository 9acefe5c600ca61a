"""The player: several rule sets in one reading, damage told and never raised, the record's own clock."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.samples import Sample
from healthcheck.engine.engine import Engine
from healthcheck.readers.find import read_run
from healthcheck.readers.series import RecordedRun
from healthcheck.replay.play import RuleCopies, only_rules, play, replay_report
from healthcheck.rulelang.rule import RuleSet

RULES = """
version: 1
metrics: {smooth: "ewma(loss, 50) + 0 * loss"}
rules:
  high: {metric: loss, when: {above: 5}}
  smooth-high: {metric: smooth, when: {above: 5}}
  loss-nan: {metric: loss, when: nonfinite, severity: error, then: [stop]}
  lr-nan: {metric: lr, when: nonfinite}
"""


REGISTRY = plugin_host().registry


def rules(text: str = RULES) -> RuleSet:
    return load_rules_for(host=plugin_host(), rules=text)


def log(path: Path, values: list[float], **more: Any) -> RecordedRun:
    rows = [json.dumps({"step": i, "loss": v, **{k: f(i) for k, f in more.items()}}) for i, v in enumerate(values, 1)]
    path.write_text("\n".join(rows) + "\n")
    return read_run(path)


def test_two_rule_sets_judge_one_reading_independently(tmp_path: Path) -> None:
    run = log(tmp_path / "a.jsonl", [2.0] * 10 + [7.0])
    loose = rules(RULES.replace("above: 5", "above: 9"))
    plays, seen = play(run, [rules(), loose])
    assert [[a.rule for a in p.alerts] for p in plays] == [["high"], []]
    assert (seen.batches, seen.first_step, seen.last_step) == (11, 1, 11)


def test_a_compiled_rule_set_is_as_new_for_each_run(tmp_path: Path) -> None:
    copies = RuleCopies(rules())
    hot = log(tmp_path / "hot.jsonl", [9.0] * 60)
    cool = log(tmp_path / "cool.jsonl", [2.0] * 60)
    assert {a.rule for a in play(hot, [copies.fresh()])[0][0].alerts} == {"high", "smooth-high"}
    assert play(cool, [copies.fresh()])[0][0].alerts == []


def test_one_rule_alone_keeps_the_owner_of_its_non_finite_samples(tmp_path: Path) -> None:
    """Alone, ``high`` would call a NaN its own breach; in the whole file ``loss-nan`` owns it."""
    narrowed = only_rules(rules(), {"high"})
    assert [rule.id for rule in narrowed.rules] == ["high", "loss-nan"]
    plays, _ = play(log(tmp_path / "a.jsonl", [2.0, math.nan, 2.0]), [narrowed])
    assert [a.rule for a in plays[0].alerts] == ["loss-nan"]


def test_every_action_of_a_replay_is_held_and_a_stop_is_told(tmp_path: Path) -> None:
    run = log(tmp_path / "a.jsonl", [2.0] * 5 + [math.nan] + [2.0] * 5 + [math.nan])
    plays, seen = play(run, [rules()])
    report = replay_report(plays[0], run, seen, REGISTRY, path="a.jsonl")
    assert all(o["held"] and not o["done"] for a in report["alerts"] for o in a["actions"])
    assert report["stop"] == {
        "rule": "loss-nan", "step": 6, "reason": "replay", "mode": "graceful", "also": [], "held": True
    }  # fmt: skip
    assert (report["exit_code"], report["exit_reason"]) == (1, "stopped")
    assert [a["fired_step"] for a in report["alerts"] if a["rule"] == "loss-nan"] == [6, 12], (
        "it goes on after the stop"
    )
    json.dumps(report, allow_nan=False)


def test_observe_mode_counts_no_alert_as_in_a_run(tmp_path: Path) -> None:
    run = log(tmp_path / "a.jsonl", [2.0, math.nan])
    plays, seen = play(run, [rules(RULES + "settings: {mode: observe}\n")])
    report = replay_report(plays[0], run, seen, REGISTRY, path="a.jsonl")
    assert (report["exit_code"], report["mode"]) == (0, "observe")
    assert "stop" not in report


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([500, 1000, 1500], 0),
        ([18_001, 18_002], 18_000),
        ([0, 1, 2], 0),
        ([1, 2], 0),
        ([18_500, 19_000], 18_000),
        ([7], 0),
    ],
)
def test_a_run_began_one_logging_interval_before_its_first_row(tmp_path: Path, rows: list[int], start: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": 2.0}) + "\n" for s in rows))
    plays, _ = play(read_run(path), [rules()])
    assert plays[0].engine.states[0].start_step == start


class _Breaks:
    """A reader that a plugin might bring: it raises in the middle."""

    name = "breaks"
    help = ""

    def recognises(self, path: Path, head: bytes) -> float:
        return 1.0

    def read(self, path: Path, notes: list[str]) -> Iterator[Any]:
        for i in range(1, 1001):
            yield None, {"step": i, "loss": 2.0}
        raise RuntimeError("the rest is gone")


def test_reading_that_breaks_off_is_told_and_what_came_is_judged(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "x", _Breaks())
    plays, seen = play(run, [rules()])
    assert "the rest is gone" in seen.problem
    assert seen.batches in (999, 1000)
    report = replay_report(plays[0], run, seen, REGISTRY, path="x")
    assert report["record"]["problem"] == seen.problem
    assert report["rules"]["high"]["verdict"] == "ok"


def test_the_reason_names_what_the_record_has_instead(tmp_path: Path) -> None:
    run = log(tmp_path / "a.jsonl", [2.0] * 20)
    text = "version: 1\nmetrics: {gap: 'eval.loss - last(loss)'}\nrules:\n  gap: {metric: gap, when: {above: 1}}\n"
    plays, seen = play(run, [rules(text)])
    report = replay_report(plays[0], run, seen, REGISTRY, path="a")
    assert report["rules"]["gap"]["reason"] == "the record has no eval.loss"
    assert (report["exit_code"], report["exit_reason"]) == (5, "not judged")


EVERY = "version: 1\nexternal: [kl]\nrules:\n  kl: {metric: kl, when: {above: 1}, every: 10}\n"


def test_a_value_that_comes_late_is_not_judged_again_by_a_rule_with_every() -> None:
    """What belongs to step 95 and is seen after step 100 lies in a bucket that has been judged."""
    engine = Engine(rules(EVERY))
    for step in (100, 95, 101):
        engine.evaluate(100, [Sample("kl", step, 0.0)], 0.0)
    assert engine.by_id["kl"].samples == 1


def test_after_a_resume_buckets_cooldown_and_absence_count_from_the_new_step() -> None:
    engine = Engine(rules(EVERY))
    engine.evaluate(100, [Sample("kl", 100, 0.0)], 0.0)
    engine.rewind(51)
    for step in (51, 52, 60, 61):
        engine.evaluate(step, [Sample("kl", step, 0.0)], 0.0)
    series = engine.by_id["kl"].series[()]
    assert series is not None
    assert (engine.by_id["kl"].samples, series.last_step) == (3, 60)


RISE = """
version: 1
metrics: {smooth: "ewma(loss, 5) + 0 * loss"}
rules:
  rise: {metric: loss, when: {rebound: {above: 1.5}}, for: 3}
  drift: {metric: smooth, when: {ratio: {above: 1.5, to: median, window: 10}}, for: 2}
"""
FALLING = [4.0 * 0.9**i for i in range(30)]


def folds(path: Path, *runs: list[float], metric: str = "loss", from_step: int = 1) -> RecordedRun:
    rows = [f"{i},{v}" for run in runs for i, v in enumerate(run, from_step)]
    path.write_text("\n".join([f"epoch,{metric}", *rows]) + "\n")
    return read_run(path)


def test_runs_one_after_the_other_in_a_file_are_each_judged_by_themselves(tmp_path: Path) -> None:
    (judged,), seen = play(folds(tmp_path / "folds.csv", FALLING, FALLING, FALLING), [rules(RISE)])

    assert judged.alerts == []
    assert seen.runs == 3


def test_a_fault_in_the_second_of_them_is_told_and_does_not_go_on_into_the_third(tmp_path: Path) -> None:
    risen = [*FALLING, 9.0, 9.5, 9.9, 9.7]
    run = folds(tmp_path / "folds.csv", FALLING, risen, [*FALLING, *FALLING[-1:] * 9])
    (judged,), seen = play(run, [rules(RISE)])

    rise = next(alert for alert in judged.alerts if alert.rule == "rise")
    assert (rise.fired_step, rise.cleared_step) == (34, 34)
    report = replay_report(judged, run, seen, REGISTRY, path="folds.csv")
    assert report["rules"]["rise"]["verdict"] == "warned"
    assert report["record"]["runs"] == 3


def test_what_was_judged_in_a_run_before_is_no_rule_without_data(tmp_path: Path) -> None:
    run = folds(tmp_path / "folds.csv", FALLING, [4.0])
    (judged,), seen = play(run, [rules(RISE)])

    report = replay_report(judged, run, seen, REGISTRY, path="folds.csv")
    assert report["rules"]["rise"]["verdict"] == "ok"
    assert report["rules"]["rise"]["samples"] == 31


def test_a_loss_that_goes_on_where_it_stood_is_of_the_same_run(tmp_path: Path) -> None:
    # Steps that are counted in each epoch: the second pass over them goes on with the loss of the first.
    on = [FALLING[-1] * 0.97**i for i in range(20)]
    _, seen = play(folds(tmp_path / "a.csv", FALLING, on), [rules(RISE)])
    assert seen.runs == 1

    noise = [0.7 + 0.01 * (i % 3) for i in range(20)]
    _, seen = play(folds(tmp_path / "b.csv", noise, noise), [rules(RISE)])
    assert seen.runs == 1


def test_a_resume_in_the_middle_is_no_other_run(tmp_path: Path) -> None:
    path = tmp_path / "resumed.csv"
    path.write_text("epoch,loss\n" + "".join(f"{i},{4.0 / i}\n" for i in (1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7)))
    _, seen = play(read_run(path), [rules(RISE)])
    assert seen.runs == 1


def test_rewards_that_begin_again_are_of_another_run(tmp_path: Path) -> None:
    seeds = folds(tmp_path / "seeds.csv", [float(i) for i in range(40)], [float(i) for i in range(40)], metric="reward")
    _, seen = play(seeds, [rules(RISE)])
    assert seen.runs == 2
