"""Profiles: on a schedule, by a rule, in code and by a command; traces that load, a table that names what is slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers

import healthcheck_performance
from healthcheck.testing import check_plugin
from healthcheck_performance import DriveProfiler, Profile

RULES = {"version": 1, "settings": {"performance.profile": {"wait": 4, "active": 3, "repeat": 2}}, "rules": {}}
SORT = ("aten::sort", "encoder.1")


def top(row: dict[str, Any]) -> tuple[str, str]:
    return row["operator"], row["module"]


def names_in(trace: Path) -> set[str]:
    return {str(event.get("name")) for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]}


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(healthcheck_performance, "healthcheck_performance") == []


def test_a_schedule_in_the_rule_file_leaves_traces_that_load_and_a_table_that_names_the_slow_operator(
    train: Callable[..., Any],
) -> None:
    ran = train(RULES, steps=20)
    folder = ran.session.info.run_dir / "profile"
    traces = sorted(folder.glob("*.pt.trace.json"))
    assert len(traces) == 2
    for trace in traces:
        assert {"aten::sort", "healthcheck.module:encoder.1"} <= names_in(trace)
        assert trace.stat().st_mode & 0o077 == 0
    findings = ran.report["performance"]["findings"]
    for name in ("performance.profile", "performance.profile-2"):
        assert top(findings[name]["rows"][0]) == SORT
    for table in folder.glob("*.operators.txt"):
        assert table.read_text(encoding="utf-8").splitlines()[2].split()[:2] == list(SORT)
    assert any("aten::sort in encoder.1 takes" in note for note in ran.notes)


def test_three_steps_are_recorded_and_no_more(train: Callable[..., Any]) -> None:
    ran = train(RULES, steps=20)
    [first, second] = healthcheck_performance.profiling.profiler_of(ran.session).done
    assert [one.reading.steps for one in (first, second)] == [3, 3]
    assert (first.last - first.first, second.last - second.first) == (2, 2)
    assert second.first > first.last + 4


def test_a_rule_starts_one_and_its_alert_has_the_table(train: Callable[..., Any]) -> None:
    then = [{"performance.profile": {"steps": 3}}]
    rules = {"r": {"metric": "loss", "when": {"above": 0}, "warmup": 5, "severity": "info", "then": then}}
    ran = train({"version": 1, "rules": rules}, steps=60)
    [alert] = ran.report["alerts"]
    [action] = alert["actions"]
    assert action["done"], action["text"]
    assert top(action["operators"][0]) == SORT
    assert action["steps"][1] - action["steps"][0] == 2
    assert "aten::sort" in names_in(Path(action["trace"]))


def test_one_at_a_time_and_the_second_says_so(train: Callable[..., Any]) -> None:
    rule = {"metric": "loss", "when": {"above": 0}, "warmup": 5, "severity": "info"}
    rules = {
        name: {**rule, "then": [{"performance.profile": {"steps": n}}]} for name, n in (("first", 50), ("second", 3))
    }
    ran = train({"version": 1, "rules": rules}, steps=40)
    outcomes = {alert["rule"]: alert["actions"][0] for alert in ran.report["alerts"]}
    assert sorted(outcome["done"] for outcome in outcomes.values()) == [False, True]
    assert any("one is being recorded" in outcome["text"] for outcome in outcomes.values())


def test_nothing_is_left_behind_and_before_it_nobody_hears_of_steps(train: Callable[..., Any]) -> None:
    heard: dict[int, bool] = {}

    def between(step: int, session: Any) -> None:
        heard[step] = session.has_hooks("step_end")

    before = len(hooks._global_forward_pre_hooks)
    ran = train(callbacks=[Profile(wait=6, active=2)], steps=24, between=between)
    during = [step for step, was in heard.items() if was]
    assert during
    assert min(during) > 6
    assert max(during) < 6 + 1 + 2 + 4
    assert not ran.session.has_hooks("step_end")
    assert not torch.autograd._profiler_enabled()
    assert len(hooks._global_forward_pre_hooks) == before
    assert healthcheck_performance.profiling._counters == []


def test_hooks_of_others_are_called_while_ours_begin_and_end(train: Callable[..., Any]) -> None:
    """torch does not stand it when a hook comes or goes while it goes through them."""
    called: list[int] = []
    handles: list[Any] = []

    def between(step: int, session: Any) -> None:
        if step == 3:
            handles.append(optimizers.register_optimizer_step_post_hook(lambda *given: called.append(1)))

    rule = {"metric": "loss", "when": {"above": 0}, "warmup": 4, "severity": "info", "then": ["profile"]}
    rules = {"version": 1, "rules": {"r": rule}}
    ran = train(rules, callbacks=[Profile(wait=2, active=1, repeat=3), Waits()], steps=60, between=between)
    handles[0].remove()
    assert len(called) == 58
    assert len(healthcheck_performance.profiling.profiler_of(ran.session).done) == 3
    assert ran.report["internal_errors"] == []


class Waits(Profile):
    """Another that counts."""

    name = "another"

    def __init__(self) -> None:
        super().__init__(wait=9, active=1, ranks="all")

    def _due(self) -> None:
        return


def test_the_profiled_steps_enter_no_step_time_and_change_no_weight(train: Callable[..., Any]) -> None:
    timed = {"version": 1, "rules": {"t": {"metric": "time.step", "when": {"above": 1e9}}}}
    plain, profiled = train(timed, steps=24), train(timed, callbacks=[Profile(wait=6, active=3)], steps=24)
    for one, other in zip(plain.model.parameters(), profiled.model.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = [{step for step, _ in ran.session.history("time.step")} for ran in (plain, profiled)]
    [done] = healthcheck_performance.profiling.profiler_of(profiled.session).done
    missing = steps[0] - steps[1]
    assert {*range(done.first, done.last + 1)} <= missing
    assert len(missing) <= 3 + 1 + 2  # warm-up, and the steps in which it begins and ends


def test_a_run_that_ends_within_a_profile_ends_it(train: Callable[..., Any]) -> None:
    ran = train(callbacks=[Profile(wait=4, active=50)], steps=12)
    assert not torch.autograd._profiler_enabled()
    assert ran.report["internal_errors"] == []
    ran = train(callbacks=[Profile(wait=4, warmup=50)], steps=12)
    assert "performance.profile" not in ran.report["performance"]["findings"]


def test_a_profiler_of_one_s_own_runs_on_its_schedule_with_its_handler(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=2),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(tmp_path / "logs")),
        acc_events=True,
    )
    ran = train(callbacks=[DriveProfiler(profiler)], steps=16)
    assert len(list((tmp_path / "logs").glob("*.pt.trace.json"))) == 2
    assert len(healthcheck_performance.profiling.profiler_of(ran.session).done) == 2
    assert top(ran.report["performance"]["findings"]["performance.profile"]["rows"][0]) == SORT


def test_an_option_that_does_not_exist_is_a_mistake_at_once() -> None:
    with pytest.raises(TypeError, match="no option 'aktive'"):
        Profile(aktive=3)


@pytest.mark.slow
def test_the_command_writes_where_tensorboard_looks(script: Callable[..., Any], tmp_path: Path) -> None:
    lines = (
        "import torch",
        "model = torch.nn.Linear(8, 8)",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)",
        "for _ in range(30):",
        "    torch.sort(torch.rand(200_000))",
        "    model(torch.randn(4, 8)).sum().backward()",
        "    optimizer.step()",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    command = ("-m", "healthcheck_performance", "profile", "--wait", "3", "--active", "2", "--tensorboard", "logs")
    done = script(*command, "--observe", "train.py")
    assert done.returncode == 0, done.stderr
    [trace] = (tmp_path / "logs").glob("*.pt.trace.json")
    assert "aten::sort" in names_in(trace)
    assert "aten::sort takes" in done.stderr
