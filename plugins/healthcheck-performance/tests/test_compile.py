"""Compile health: graph_breaks.log, three rules, steps left out, fullgraph, and advice that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck_performance import CompileTimes, GraphBreakLog

# Dynamo looks at the gradient of what it passes on behind a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
HERE = Path(__file__).name
PACK = "healthcheck_performance:performance"


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, start=1) if line.strip().startswith(text))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        if y.mean() > 10:
            y = y / 10
        return y


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        print("decoding")  # noqa: T201
        return self.out(x)


class Broken(nn.Module):
    """Two graph breaks; its batches come in two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.decoder = Attention(), Decoder()

    def forward(self, x: Any) -> Any:
        return self.decoder(self.attention(x))


class Followed(nn.Module):
    """What the advice says: torch.where instead of `if`, and no print."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        y = torch.where(y.mean() > 10, y / 10, y)
        return self.out(y)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(train: Callable[..., Any], model: nn.Module, *, dynamic: bool | None = None, **given: Any) -> Any:
    called = torch.compile(model, backend="eager", dynamic=dynamic)
    return train(given.pop("rules", PACK), model=model, called=called, size=lambda step: 4 + 2 * (step > 8), **given)


def test_two_breaks_and_a_recompilation_are_named_rules_fire_and_the_log_is_written(train: Callable[..., Any]) -> None:
    ran = compiled(train, Broken(), dynamic=False, callbacks=[GraphBreakLog("graph_breaks.log")])
    alerts = {alert["rule"]: alert for alert in ran.report["alerts"]}
    branch, item = line_of("if y.mean() > 10:"), line_of('print("decoding')
    breaks = alerts["graph-breaks"]
    assert breaks["where"] == f"{HERE}:{branch} in forward (module attention, a Attention)"
    assert f"{HERE}:{item} in forward (module decoder, a Decoder)" in breaks["facts"]["also_2"]
    again = alerts["recompiles"]
    assert "size mismatch at index 0. expected 4, actual 6" in str(again["facts"])
    assert HERE in again["where"]
    assert "recompilation" not in alerts
    log = Path("graph_breaks.log").read_text(encoding="utf-8")
    assert f"attention\n{__file__}:{branch} - Graph break due to:\n  - Data-dependent" in log
    assert f"decoder\n{__file__}:{item} - Graph break due to:" in log
    assert "Suggested fix: compute both sides and choose with torch.where" in log
    assert "Recompiled because of:" in log
    assert "TORCH_LOGS" not in log + str(alerts)


def test_the_advice_followed_leaves_nothing_to_say(train: Callable[..., Any]) -> None:
    ran = compiled(train, Followed(), dynamic=True, callbacks=[GraphBreakLog("graph_breaks.log")])
    assert [alert["rule"] for alert in ran.report["alerts"]] == []
    log = Path("graph_breaks.log").read_text(encoding="utf-8")
    assert "Graph break" not in log
    assert "Recompiled" not in log
    assert "Compile time:" in log


def test_what_is_compiled_in_the_steps_that_are_skipped_does_not_count(train: Callable[..., Any]) -> None:
    ran = compiled(train, Broken(), dynamic=False, callbacks=[GraphBreakLog("late.log", skip=5)])
    log = Path("late.log").read_text(encoding="utf-8")
    assert "Recompiled because of:" in log  # at step 9
    early = GraphBreakLog("unused.log")
    assert early.skip == 0
    assert ran.report["internal_errors"] == []


def test_nothing_compiled_is_no_file(train: Callable[..., Any]) -> None:
    train(callbacks=[GraphBreakLog("graph_breaks.log")], steps=5)
    assert not Path("graph_breaks.log").exists()


def test_fullgraph_raises_at_the_first_break_and_is_taken_back_at_the_end(train: Callable[..., Any]) -> None:
    original = torch.compile
    tool = GraphBreakLog("full.log", fullgraph=True)
    model = Broken()

    def between(step: int, session: Any) -> None:
        if step == 1:
            assert torch.compile is not original

    class Late:
        """Compiled once the run has begun, as trainers do."""

        def __call__(self, x: Any) -> Any:
            self.made = getattr(self, "made", None) or torch.compile(model, backend="eager")
            return self.made(x)

    with pytest.raises(Exception, match="Data-dependent branching"):
        train(model=model, called=Late(), callbacks=[tool], between=between)
    assert torch.compile is original
    assert "Data-dependent branching" in Path("full.log").read_text(encoding="utf-8")


def test_compile_time_is_said_by_function(train: Callable[..., Any]) -> None:
    times = CompileTimes()
    ran = compiled(train, Broken(), rules=None, callbacks=[times])
    assert sum(times.compile_times.values()) > 0
    assert len(times.graph_breaks) == 2
    assert any("in the compiler" in note for note in ran.notes)


def test_a_setting_of_the_rule_file_does_the_same(train: Callable[..., Any]) -> None:
    rules = {"version": 1, "settings": {"performance.compile": {"log_file": "from_rules.log"}}, "rules": {}}
    ran = compiled(train, Broken(), rules=rules)
    assert "Graph break due to:" in Path("from_rules.log").read_text(encoding="utf-8")
    finding = ran.report["performance"]["findings"]["performance.compile"]
    assert finding["text"].startswith("2 graph breaks")
    assert {row["what"] for row in finding["rows"]} >= {"graph break"}
