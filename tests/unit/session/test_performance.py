"""``performance`` of ``report.json``: what a run says of its own speed, and what plugins add."""

from __future__ import annotations

from typing import Any

import pytest

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.extend.hookspecs import hookimpl
from healthcheck.run.ending import Ending
from healthcheck.run.performance import Performance

RULES: dict[str, Any] = {"version": 1, "external": ["loss"], "rules": {"any": {"metric": "loss", "when": {"above": 9}}}}


def measured(data: float = 0.001, *, rate: float = 800.0, steps: int = 30) -> dict[str, Any]:
    """``performance`` of steps of 10 ms each, in which ``data`` seconds are waits for the batch."""
    values = {"time.step": 0.01, "time.data": data, "throughput": rate}

    def recent(name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step in range(1, steps + 1)] if name in values else []

    report: dict[str, Any] = {"steps": steps, "seconds": steps * 0.01}
    Performance().add(report, recent, steps * 0.01, None, lambda found: None)
    return report["performance"]


class Finder:
    """A plugin that answers with what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.heard = answer, {}

    @hookimpl
    def healthcheck_performance(self, session: Any, performance: dict[str, Any]) -> Any:
        self.heard = dict(performance)
        performance.clear()
        return self.answer


def report_of(*plugins: Any) -> dict[str, Any]:
    """The report of a real session of 30 steps with plugins."""
    session = open_session(target="train.py", rules=RULES, record=False, console=False)
    for n, plugin in enumerate(plugins):
        session.register(plugin, f"finder-{n}")
    for step in range(1, 31):
        session.log({"loss": 1.0}, step=step)
        session.emit(Event(EventKind.STEP_END, step))
    return session.finish(Ending())


def test_a_run_that_waits_for_its_data_is_bound_by_it_and_says_what_to_try() -> None:
    found = measured(0.006)
    assert found["step"] == {"seconds": 0.01, "of_last": 30, "data": 0.006, "other": 0.004}
    assert found["verdict"]["bound"] == "data"
    assert found["verdict"]["share"] == pytest.approx(0.6)
    assert "loader workers" in found["verdict"]["advice"]


def test_a_run_that_does_not_wait_says_so_and_has_no_verdict() -> None:
    found = measured(0.0005)
    assert found["findings"]["data-wait"]["value"] == 0.05
    assert "bound" not in found["findings"]["data-wait"]
    assert "verdict" not in found


def test_what_nobody_measured_is_absent() -> None:
    found = measured(steps=3)
    assert found["steps"] == 3
    assert not {"step", "compile_seconds", "tokens_per_second"} & found.keys()


def test_what_an_earlier_run_of_the_process_compiled_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo = pytest.importorskip("torch._dynamo.utils")
    spent = dynamo.compilation_time_metrics.setdefault("_compile.compile_inner", [])
    monkeypatch.setitem(dynamo.compilation_time_metrics, "_compile.compile_inner", [*spent, 7.0])
    performance = Performance()
    report: dict[str, Any] = {"steps": 3, "seconds": 1.0}
    performance.add(report, lambda name: [], 1.0, None, lambda found: None)
    assert "compile_seconds" not in report["performance"]
    dynamo.compilation_time_metrics["_compile.compile_inner"].append(0.5)
    performance.add(report, lambda name: [], 1.0, None, lambda found: None)
    assert report["performance"]["compile_seconds"] == pytest.approx(0.5)


@pytest.mark.parametrize(("rate", "samples"), [(800.0, 800.0), (100.0, None)])
def test_steps_per_second_are_not_called_samples(rate: float, samples: float | None) -> None:
    assert measured(rate=rate).get("samples_per_second") == samples


def test_a_plugin_adds_findings_and_the_one_that_explains_most_is_the_verdict() -> None:
    bound = {"text": "all-reduce takes 70 %", "bound": "communication", "share": 0.7, "advice": "larger buckets"}
    plugin = Finder({"finder.comm": bound, "finder.kernels": {"text": "2 kernels", "rows": [{"kernel": "gemm"}]}})
    found = report_of(plugin)["performance"]
    assert found["findings"]["finder.comm"] == {**bound, "from": "finder-0"}
    assert found["findings"]["finder.kernels"]["rows"] == [{"kernel": "gemm"}]
    assert (found["verdict"]["bound"], found["verdict"]["finding"]) == ("communication", "finder.comm")
    assert plugin.heard["steps"] == found["steps"] == 30  # it was given a copy of what is known


@pytest.mark.parametrize(
    ("finding", "problem"),
    [
        ({"value": 1}, 'as "text"'),
        ({"text": "x", "bound": "luck"}, "not 'luck'"),
        ({"text": "x", "share": 3}, "not 3"),
        ({"text": "x", "rows": "no"}, "list of mappings"),
        (3, 'as "text"'),
    ],
)
def test_a_finding_of_another_form_is_an_error_of_its_plugin(finding: Any, problem: str) -> None:
    report = report_of(Finder({"finder.good": {"text": "fine"}, "finder.bad": finding}))
    (error,) = report["plugin_errors"]
    assert (error["plugin"], error["hook"]) == ("finder-0", "performance")
    assert problem in error["error"]
    assert "finder.good" in report["performance"]["findings"]
    assert "finder.bad" not in report["performance"]["findings"]


def test_a_name_that_is_taken_stays_with_who_had_it() -> None:
    report = report_of(Finder({"finder.x": {"text": "mine"}}), Finder({"finder.x": {"text": "another"}}))
    assert report["performance"]["findings"]["finder.x"] == {"text": "mine", "from": "finder-0"}
    assert report["plugin_errors"][0]["plugin"] == "finder-1"


def test_a_plugin_that_knows_nothing_returns_nothing() -> None:
    assert report_of(Finder(None))["plugin_errors"] == []
