"""What a person reads, from real sessions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.reports.wording import how_it_ended, with_exit

Watched = Callable[..., Any]
HEALTHY = [2 + 0.01 * math.sin(i) for i in range(60)]
DIES = [*HEALTHY[:50], "nan", *HEALTHY[51:]]
SPIKES = [20.0 if i in (40, 41) else v for i, v in enumerate(HEALTHY)]


def test_a_healthy_run_prints_two_lines_at_the_start_and_three_at_the_end(watched: Watched) -> None:
    result = watched(series={"loss": HEALTHY, "norm": HEALTHY})
    lines = result.stderr.splitlines()
    assert result.stdout == ""
    assert len(lines) == 5, result.stderr
    assert lines[0].startswith("healthcheck 0.1.0: watching train.py, 4 rules of ")
    assert lines[1].startswith("  may stop the run: loss-not-finite, norm-not-finite; everything else only warns")
    assert re.fullmatch(r"healthcheck: OK, 60 steps in [\d.]+ s +exit 0", lines[2])
    assert lines[3] == "  3 of 4 checks that apply were judged; log other"
    assert lines[4] == "  numbers: healthcheck metrics latest    record: runs/latest"


def test_a_run_that_is_asked_to_be_short_says_before_it_starts_what_it_cannot_judge(watched: Watched) -> None:
    result = watched(series={"loss": HEALTHY, "norm": HEALTHY}, settings={"max_steps": 10})
    assert result.stderr.splitlines()[2] == "  10 steps are too few for 1 rule (healthcheck plan --max-steps 10)"


def test_rules_that_an_upgrade_brought_are_said_once(
    watched: Watched, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packs = {"rules": "healthcheck:core", "series": {"loss": [1.0]}}
    first = watched(**packs)
    assert "new since" not in first.stderr
    path = runs / "latest" / "report.json"
    report = json.loads(path.read_text())
    del report["rules"]["eval-not-finite"]  # as an older version of the pack had left it
    path.write_text(json.dumps(report))
    capfd.readouterr()
    assert main(["plan", "--rules", "healthcheck:core", "--new"]) == 0
    assert capfd.readouterr().out.startswith("1 rule of healthcheck:core\n")
    assert "  1 rule is new since your last run here (healthcheck plan --new)" in watched(**packs).stderr
    assert "new since" not in watched(**packs).stderr


def test_an_alert_says_what_where_what_is_normal_what_we_did_and_what_to_try(watched: Watched) -> None:
    result = watched(series={"loss": DIES, "norm": HEALTHY})
    assert result.returncode == 1
    block = re.search(r"^ERROR.*?(?=^healthcheck)", result.stderr, re.DOTALL | re.MULTILINE)
    assert block is not None, result.stderr
    lines = block[0].splitlines()
    assert len(lines) <= 5
    assert re.match(r"ERROR loss-not-finite  step 51: loss is nan \(\d\.\d+ one step earlier\)$", lines[0])
    assert "stop at step 51" in block[0]
    assert "try: look at the batch" in block[0]
    assert re.search(r"^healthcheck: STOPPED at step 51 by loss-not-finite +exit 1$", result.stderr, re.MULTILINE)


def test_a_warning_names_value_score_normal_and_limit(watched: Watched) -> None:
    result = watched(series={"loss": SPIKES, "norm": HEALTHY})
    assert result.returncode == 0
    assert re.search(
        r"^WARN loss-spike  step 42: loss jumps \(20, normal 2\.0\d?, z [\d,.]+\)$",
        result.stderr,
        re.MULTILINE,
    ), result.stderr
    assert re.search(r"^healthcheck: WARNED 1, 60 steps", result.stderr, re.MULTILINE)
    assert "why: healthcheck why    record: runs/latest" in result.stderr


@pytest.mark.parametrize(("kind", "lines"), [("trend", 1), ("measure", 2)])
def test_a_second_curve_of_one_disease_adds_no_line_and_what_is_more_certain_does(
    watched: Watched, kind: str, lines: int
) -> None:
    rules = {
        "version": 1,
        "external": ["loss", "norm"],
        "rules": {
            "bad": {
                "message": "it is bad",
                "causes": {
                    "one": {"kind": "trend", "metric": "loss", "when": {"above": 3}, "message": "high"},
                    "other": {"kind": kind, "metric": "norm", "when": {"above": 3}, "message": "high as well"},
                },
            }
        },
    }
    late = [*HEALTHY[:45], *[5.0] * 15]
    result = watched(rules=rules, series={"loss": [*HEALTHY[:40], *[5.0] * 20], "norm": late})
    assert result.stderr.count("\nWARN ") == lines, result.stderr


def test_an_explained_alert_has_no_block_but_is_named_at_the_end(watched: Watched) -> None:
    result = watched(series={"loss": DIES, "norm": DIES})
    assert result.stderr.count("\nERROR ") == 1
    assert "also: norm-not-finite at step 51, explained by loss-not-finite" in result.stderr


def test_observe_mode_says_what_it_would_have_done_and_exits_0(watched: Watched) -> None:
    result = watched(series={"loss": DIES, "norm": HEALTHY}, settings={"mode": "observe"})
    assert result.returncode == 0
    assert "observe mode: nothing is stopped or changed" in result.stderr
    assert "would have stopped (observe)" in result.stderr
    assert re.search(
        r"^healthcheck: WARNED 1 \(observe mode: alerts do not count\), .*exit 0$", result.stderr, re.MULTILINE
    )


def flapping(times: int) -> list[float]:
    return [*HEALTHY[:20], *([20.0, 20.0, 2.0, 2.0, 2.0] * times)]


def test_a_flapping_rule_gets_three_blocks_and_is_then_counted(watched: Watched) -> None:
    rules = {
        "version": 1,
        "external": ["loss"],
        "rules": {"too-high": {"metric": "loss", "when": {"above": 10}, "hint": "look"}},
    }
    many = flapping(7)
    calm = [many[0]] * 1100  # from the third block on it must be away for long
    result = watched(series={"loss": [*many, *calm, *many[-40:], *calm, *many[-40:]]}, rules=rules)
    assert result.stderr.count("\nWARN too-high") == 3
    assert "too-high 2 times" in result.stderr


def test_then_note_says_nothing_while_training_and_names_the_alert_at_the_end(watched: Watched) -> None:
    rules = {
        "version": 1,
        "external": ["loss"],
        "rules": {"too-high": {"metric": "loss", "when": {"above": 10}, "severity": "info"}},
    }
    result = watched(series={"loss": flapping(2)}, rules=rules)
    assert "INFO" not in result.stderr
    assert "noted: too-high at step 21 (2 times)" in result.stderr


def test_q_prints_errors_and_the_closing_line(watched: Watched) -> None:
    both = [*SPIKES[:50], "nan"]
    result = watched(series={"loss": both, "norm": HEALTHY}, settings={"verbosity": -1})
    assert "WARN" not in result.stderr
    assert result.stderr.startswith("ERROR loss-not-finite")
    assert result.stderr.splitlines()[-1].startswith("healthcheck: STOPPED")


def test_qq_prints_nothing(watched: Watched) -> None:
    result = watched(series={"loss": DIES, "norm": HEALTHY}, settings={"verbosity": -2})
    assert (result.stderr, result.returncode) == ("", 1)


def test_v_prints_changes_of_state_and_each_rule_that_was_not_judged(watched: Watched) -> None:
    result = watched(series={"loss": SPIKES, "norm": HEALTHY}, settings={"verbosity": 1})
    assert re.search(r"step 41  loss-spike  ok -> pending", result.stderr)
    assert re.search(r"^  not judged  other-missing: ", result.stderr, re.MULTILINE)


RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}


def test_other_ranks_are_quiet(watched: Watched) -> None:
    result = watched(series={"loss": SPIKES, "norm": HEALTHY}, env=RANK_1)
    assert (result.stderr, result.returncode) == ("", 0)


def test_a_rank_whose_failure_nobody_else_can_know_of_says_it_itself(watched: Watched) -> None:
    """It exits with 1, and the rank that speaks for all says OK: here ranks have no way to talk to each other."""
    result = watched(series={"loss": DIES, "norm": HEALTHY}, env=RANK_1)
    first, *more = result.stderr.splitlines()
    assert result.returncode == 1
    assert first.startswith("healthcheck: rank 1 FAILED")
    assert first.endswith("exit 1")
    assert "  said by this rank itself: ranks do not talk to each other here" in more
    assert any(line.startswith("  loss-not-finite at step") for line in more)
    quiet = watched(series={"loss": DIES, "norm": HEALTHY}, env=RANK_1, settings={"verbosity": -2})
    assert (quiet.stderr, quiet.returncode) == ("", 1)


def test_what_fails_such_a_rank_is_what_fail_on_says(watched: Watched) -> None:
    result = watched(series={"loss": SPIKES, "norm": HEALTHY}, env=RANK_1, settings={"fail_on": "warning"})
    assert result.returncode == 1
    assert result.stderr.startswith("healthcheck: rank 1 FAILED")
    assert "loss-spike at step" in result.stderr


def test_a_hint_with_letters_of_any_language_is_plain_ascii(watched: Watched) -> None:
    rules = {
        "version": 1,
        "external": ["loss"],
        "rules": {"zu-hoch": {"metric": "loss", "when": {"above": 10}, "hint": "Größe → prüfen"}},
    }
    result = watched(series={"loss": flapping(1)}, rules=rules)
    assert "Gr\\xf6\\xdfe" in result.stderr
    assert result.stderr.isascii()


def test_a_run_without_any_judged_rule_says_so_and_exits_5(watched: Watched) -> None:
    rules = {"version": 1, "external": ["other"], "rules": {"r": {"metric": "other", "when": {"above": 1}}}}
    result = watched(series={"loss": HEALTHY}, rules=rules)
    assert result.returncode == 5
    assert re.search(r"^healthcheck: NOT JUDGED, no rule had data, 60 steps .*exit 5$", result.stderr, re.MULTILINE)


def test_an_unwritable_runs_folder_is_said_once_and_the_run_is_judged(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = watched(
        series={"loss": HEALTHY, "norm": HEALTHY},
        env={"HEALTHCHECK_RUNS": str(tmp_path / "file"), "TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0
    assert result.stderr.count("cannot be written") == 1


def test_hot_hooks_exist_only_where_they_are_needed(runs: Path, sessions: Any) -> None:
    """Without -v nobody collects transitions; without a record nobody collects samples."""
    session = sessions.open_session(target="t", rules=sessions.RULES, record=False, console=False)
    reports = {report.name: report for report in session.reports}
    assert not hasattr(reports["console"], "transition")
    assert not session.engine.watch_transitions
    assert not hasattr(reports["record"], "samples")


def test_a_record_that_lies_elsewhere_is_named_in_the_next_steps(watched: Watched) -> None:
    """`healthcheck why` alone would look where nothing could be written."""
    result = watched(series={"loss": DIES, "norm": HEALTHY}, env={"HEALTHCHECK_RUNS": "/dev/null/runs"})
    assert "cannot be written" in result.stderr
    assert re.search(r"^  why: healthcheck why \S+healthcheck-runs-\w+/latest$", result.stderr, re.MULTILINE)
    assert re.search(r"^  record: \S+healthcheck-runs-\w+/latest$", result.stderr, re.MULTILINE)


def test_the_exit_code_stands_at_the_same_column_and_fits_80() -> None:
    (ok,), (failed,) = with_exit("healthcheck: OK", 0), with_exit("healthcheck: FAILED", 143)
    assert ok.index("exit 0") == failed.index("exit 143")
    assert len(failed) <= 80


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_long_closing_line_keeps_its_exit_code_in_the_first_line(width: int) -> None:
    text = "healthcheck: FAILED, required but not judged: " + ", ".join(f"rule-{n}" for n in range(30))
    first, *rest = with_exit(text, 1, width)
    assert first.endswith("  exit 1")
    assert rest
    assert max(map(len, [first, *rest])) <= width
    assert " ".join([first.removesuffix("exit 1").strip(), *map(str.strip, rest)]) == text


def test_a_terminal_says_how_wide_its_lines_are(watched: Watched) -> None:
    rules = {
        "version": 1,
        "external": ["loss"],
        "rules": {"high": {"metric": "loss", "when": {"above": 10}, "hint": "look " * 30, "message": "loss " * 30}},
    }
    for columns in (60, 80, 120):
        result = watched(series={"loss": flapping(1)}, rules=rules, env={"COLUMNS": str(columns)})
        widths = [len(line) for line in result.stderr.splitlines() if "record:" not in line]
        assert columns - 12 < max(widths) <= columns


def test_one_fault_is_one_block_whichever_of_its_events_came_first(
    sessions: Any, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under ``watch()`` the gradients of a step are seen before its loss."""
    session = sessions.open_session(target="t", rules=sessions.RULES)
    session.bind(sessions.NumbersOnly())
    for step in range(1, 4):
        broken = math.nan if step == 3 else 1.0
        session.log({"norm": broken}, step=step)
        session.emit(sessions.Event(sessions.EventKind.BEFORE_UPDATE, step))
        session.log({"loss": broken}, step=step)
        session.emit(sessions.Event(sessions.EventKind.STEP_END, step))
    session.finish(sessions.Ending())
    shown = " ".join(capfd.readouterr().err.split())
    assert "ERROR norm-not-finite step 3: " in shown
    assert "ERROR loss-not-finite step 3: loss is nan; norm-not-finite above is the same fault " in shown
    assert "try: look at the batch" not in shown


@pytest.mark.parametrize(
    ("own", "seconds", "said"), [(1.9, 60.0, ""), (2.1, 60.0, ", cost 7.0 % of the time"), (2.1, 4.0, "")]
)
def test_the_cost_is_said_where_more_was_spent_than_every_run_may_and_steps_are_not_tiny(
    own: float, seconds: float, said: str
) -> None:
    overhead = {"fraction": 0.07, "host_seconds": own}
    report = {"verdict": "ok", "exit_words": "", "steps": 1000, "unit": "step", "seconds": seconds, "alerts": []}
    ended = how_it_ended({**report, "overhead": overhead})
    assert re.sub(r"^OK, 1,000 steps in [\w. ]+", "", ended) == said
