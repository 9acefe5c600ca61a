"""Rule tests at play: phases, families, clocks, stops, resumes, ranks and records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from healthcheck.core.errors import RuleFileError
from healthcheck.ruletests.run import Result
from tests.unit.ruletests.conftest import Book, Run


def passes(result: Result) -> None:
    assert result.text == ""
    assert result.passed


def test_steps_count_from_one_and_samples_of_one_step_come_together(run: Run) -> None:
    passes(run('series: {kl: "1 x4, 9, 1 x2", loss: "4 x7"}\nexpect: [{rule: gap-high, fires: 5, clears: 6}]'))


def test_the_world_is_closed(run: Run) -> None:
    result = run('series: {loss: "1, 9, 1, 9"}\nexpect: [{rule: loss-high, fires: 2}]')
    assert [d.kind for d in result.differences] == ["unexpected"]
    assert "fired at step 4, and only step 2 was expected" in result.text


def test_an_entry_without_a_step_takes_every_episode_of_its_rule(run: Run) -> None:
    passes(run('series: {loss: "1, 9, 1, 9"}\nexpect: [loss-high]'))
    passes(run('series: {loss: "1, 9, 1, 9"}\nexpect: [{rule: loss-high, fires: [2, 4], clears: 3}]'))


def test_only_off_and_set_change_the_rules_of_one_test(run: Run) -> None:
    passes(run('only: [loss-not-finite]\nseries: {loss: "9 x5"}\nexpect: none'))
    passes(run('off: ["loss-*"]\nseries: {loss: "9 x5", kl: "0 x5"}\nexpect: none'))
    passes(run('set: {loss-high.when.above: 8.5}\nseries: {loss: "6, 9"}\nexpect: [{rule: loss-high, fires: 2}]'))


def test_a_profile_and_a_warm_up_can_be_chosen(run: Run) -> None:
    passes(run('profile: strict\nseries: {loss: "9"}\nexpect: [{rule: loss-high, severity: error}]'))
    passes(run('warmup: 3\nseries: {loss: "9 x5"}\nexpect: [{rule: loss-high, fires: 4}]'))
    passes(run('warmup: 0\nseries: {kl: "9 x5", loss: "1 x5"}\nexpect: [{rule: gap-high, fires: 1}]'))


def test_durations_follow_the_virtual_clock(run: Run) -> None:
    body = 'only: [loss-long]\nseries: {loss: "9 x30"}\nexpect: [{rule: loss-long, fires: %s}]'
    passes(run(body % 11))
    passes(run(body % 21, head="step_time: 500ms\n"))
    passes(run("step_time: 5s\n" + body % 3))
    passes(run('only: [loss-long]\nseries: {loss: "9, gap 60s, 9 x3"}\nexpect: [{rule: loss-long, fires: 2}]'))


def test_a_missing_metric_is_noticed_while_others_go_on(run: Run) -> None:
    passes(run('only: [kl-gone]\nseries: {loss: "1 x20", kl: "1 x10"}\nexpect: [{rule: kl-gone, fires: 15}]'))


def test_a_stop_ends_the_series_unless_the_test_plays_on(run: Run) -> None:
    body = 'series: {loss: "1, nan, 9"}\nexpect: [{rule: loss-not-finite, fires: 2, then: [evidence, stop]}'
    passes(run(body + "]"))
    passes(run("continue_after_stop: true\n" + body + ", {rule: loss-high, fires: 3}]"))


def test_a_stop_that_observe_mode_holds_back_does_not_end_the_series(run: Run) -> None:
    passes(
        run(
            'only: [watched-only]\nseries: {kl: "500, 1, 500"}\nexpect: [{rule: watched-only, fires: [1, 3], then: [warn]}]'
        )
    )


def test_actions_that_repeat_belong_to_their_episode(run: Run) -> None:
    passes(run('series: {memory.fraction: "0.95 x15"}\nexpect: [{rule: memory-high, fires: 1, then: [cleanup]}]'))
    passes(run('series: {memory.fraction: "0.95 x30"}\nexpect: [{rule: memory-high, fires: 1, then: [cleanup, stop]}]'))


def test_a_family_is_one_alert_with_its_worst_series_and_a_count(run: Run) -> None:
    series = 'series: {"grad_norm[a.weight]": "1, 20", "grad_norm[b.weight]": "1, 30", "grad_norm[c.weight]": "1, 1"}\n'
    passes(run(series + 'expect: [{rule: grads, fires: 2, count: 2, series: "grad_norm[b.weight]"}]'))
    passes(run(series + 'expect: [{rule: grads, series: "grad_norm[*.weight]", message: "grad_norm[b.weight]"}]'))
    assert "`count`: expected 3 series, was 2" in run(series + "expect: [{rule: grads, count: 3}]").text


def test_an_explained_alert_is_listed_and_its_actions_are_not(run: Run) -> None:
    rules = "version: 1\nrules:\n  a: {metric: loss, when: {above: 5}, explains: [b]}\n  b: {metric: loss, when: {above: 6}}\n"
    expect = "expect: [{rule: a, fires: 2}, {rule: b, fires: 2, explained_by: a, then: []}]"
    passes(run('series: {loss: "1, 9, 1"}\n' + expect, rules=rules))


@pytest.mark.parametrize("steps", [[1], [2], [3], [4], [1, 2, 3, 4, 5, 6]])
def test_a_resume_at_any_step_changes_nothing(run: Run, steps: list[int]) -> None:
    body = 'series: {loss: "1, 9 x3, 1 x3", kl: "8 x7"}\nwarmup: 1\nexpect: [{rule: loss-high, fires: 2, clears: 5}, '
    passes(run(f"resume_at: {steps}\n" + body + "{rule: gap-high, fires: 5}]"))


def test_each_rank_has_its_own_engine_and_alerts_carry_it(run: Run) -> None:
    ranks = 'ranks: {0: {loss: "1 x3"}, 1: {loss: "1, 9, 1"}, 2: {loss: "1, 9, 1"}}\n'
    passes(run(ranks + "expect: [{rule: loss-high, fires: 2, rank: 1}, {rule: loss-high, fires: 2, rank: 2}]"))
    assert "fired at step 2 on rank 2" in run(ranks + "expect: [{rule: loss-high, fires: 2, rank: 1}]").text


def record(folder: Path, values: list[float | str], *, first: int = 1, seconds: float = 1.0) -> None:
    folder.mkdir()
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as out:
        for step, value in enumerate(values, first):
            line = {"step": step, "t": step * seconds, "p": "train", "m": {"loss": value, "grad_norm": 1.0}}
            out.write(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    "series", ["run7", "{file: run7}", "{loss: {file: run7}}", "{loss: {file: run7/samples.jsonl, metric: loss}}"]
)
def test_a_record_of_our_own_is_input_with_its_own_steps(run: Run, tmp_path: Path, series: str) -> None:
    record(tmp_path / "run7", [1.0, 9.0, 1.0, "nan"], first=101)
    passes(run(f"series: {series}\nexpect: [{{rule: loss-high, fires: 102}}, {{rule: loss-not-finite, fires: 104}}]"))


def test_the_clock_of_a_recorded_run_is_its_own(run: Run, tmp_path: Path) -> None:
    record(tmp_path / "run7", [9.0] * 10, seconds=4.0)
    passes(run("only: [loss-long]\nseries: run7\nexpect: [{rule: loss-long, fires: 4}]"))


def test_a_record_without_the_series_is_a_mistake_of_the_file(run: Run, tmp_path: Path) -> None:
    record(tmp_path / "run7", [1.0])
    with pytest.raises(RuleFileError, match=r"team.hctest.yaml:5:\d+: .*holds no series los; it has grad_norm, loss"):
        run("series: {loss: {file: run7, metric: los}}\nexpect: none")


def test_tests_of_one_file_do_not_share_what_derived_metrics_remember(book: Book) -> None:
    rules = "version: 1\nmetrics: {m: 'loss / ewma(loss, 50)'}\nrules:\n  r: {metric: m, when: {above: 3}}\n"
    one = '  - {name: %s, series: {loss: "%s"}, expect: [{rule: r, fires: 21}]}\n'
    made = book(one % ("a", "1 x20, 5") + one % ("b", "100 x20, 500") + one % ("c", "1 x20, 5"), rules=rules)
    for test in made.tests:
        passes(made.run(test))


def test_a_record_keeps_the_labels_of_its_series(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run7").mkdir()
    lines = [
        {"step": n, "t": float(n), "p": "train", "m": {"grad_norm[a.w]": 1.0, "grad_norm[b.w]": 20.0 * (n == 2)}}
        for n in (1, 2)
    ]
    (tmp_path / "run7" / "samples.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    passes(run('series: run7\nexpect: [{rule: grads, fires: 2, series: "grad_norm[b.w]", count: 1}]'))
    passes(
        run(
            'series: {"grad_norm[x]": {file: run7, metric: "grad_norm[b.w]"}}\nexpect: [{rule: grads, series: "grad_norm[x]"}]'
        )
    )
