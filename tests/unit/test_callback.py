"""healthcheck.Callback: Python instead of YAML, a plugin like any other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import healthcheck
from healthcheck.core.errors import UnknownHookError

RULES = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"above": 100}, "severity": "warning"}}}


def train(*callbacks: Any, steps: int = 4, fail_at: int = 0) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with healthcheck.watch(model, optimizer, rules=RULES, callbacks=callbacks, console=False, record=False) as health:
        for step in range(1, steps + 1):
            loss = model(torch.ones(1, 2)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step(loss=1000.0 if step == 3 else loss)
            if step == fail_at:
                raise RuntimeError("the loop's own error")
    return health


class Heard(healthcheck.Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_start(self, session: Any, event: Any) -> None:
        self.calls.append(("start", session.step, event.step))

    def on_train_batch_end(self, event: Any) -> None:
        event.user_state["heard.steps"] = event.user_state.get("heard.steps", 0) + 1
        self.calls.append(("batch", event.step))

    def on_alert(self, alert: Any) -> None:
        self.calls.append(("alert", alert.rule, alert.fired_step))

    def on_exception(self, event: Any) -> None:
        self.calls.append(("exception", str(event.exception)))

    def on_train_end(self) -> None:
        self.calls.append(("end",))


def test_overridden_methods_are_called_with_what_they_name() -> None:
    heard = Heard()
    health = train(heard)
    assert heard.calls[0] == ("start", 1, 1)
    assert [call for call in heard.calls if call[0] == "batch"] == [("batch", n) for n in (1, 2, 3, 4)]
    assert ("alert", "high", 3) in heard.calls
    assert heard.calls[-1] == ("end",)
    assert health.session.user_state["heard.steps"] == 4


def test_an_exception_of_the_loop_is_heard_before_the_end() -> None:
    heard = Heard()
    with pytest.raises(RuntimeError, match="own error"):
        train(heard, fail_at=2)
    assert heard.calls[-2:] == [("exception", "the loop's own error"), ("end",)]


def test_only_overridden_methods_cost_anything() -> None:
    class OnlyEvaluation(healthcheck.Callback):
        def on_validation_end(self, event: Any) -> None: ...

    health = train(OnlyEvaluation())
    assert health.session.list_hooks("eval_end") == ["OnlyEvaluation"]
    assert not health.session.has_hooks("step_end")


def test_a_subclass_of_a_callback_hears_what_its_base_hears() -> None:
    class More(Heard):
        def on_train_batch_start(self, event: Any) -> None:
            self.calls.append(("begin", event.step))

    more = More()
    train(more, steps=2)
    assert ("batch", 2) in more.calls
    assert ("begin", 2) in more.calls


def test_an_unknown_event_is_refused_where_the_class_is_written() -> None:
    with pytest.raises(UnknownHookError, match='did you mean "on_train_batch_end"'):

        class Typo(healthcheck.Callback):
            def on_train_batch_ends(self, event: Any) -> None: ...


def test_an_argument_that_the_event_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownHookError, match='no argument "trainer"; it can take session, event'):

        class Wrong(healthcheck.Callback):
            def on_train_end(self, trainer: Any) -> None: ...


def test_an_error_in_a_callback_is_its_own() -> None:
    class Broken(healthcheck.Callback):
        def on_step_end(self, event: Any) -> None:
            raise KeyError("mine")

    health = train(Broken())
    (error,) = health.report["plugin_errors"]
    assert (error["plugin"], error["hook"], error["quarantined"]) == ("Broken", "step_end", True)
    assert health.report["steps"] == 4


@pytest.mark.parametrize(("rank", "expected"), [(0, ["seen"]), (1, [])])
def test_rank_zero_only_asks_the_session(rank: int, expected: list[str]) -> None:
    seen: list[str] = []

    class Speaks:
        @healthcheck.rank_zero_only
        def on_train_end(self, session: Any) -> None:
            seen.append("seen")

    Speaks().on_train_end(SimpleNamespace(info=SimpleNamespace(rank=rank)))
    assert seen == expected


@pytest.mark.parametrize(("value", "expected"), [("0", 7), ("3", None)])
def test_rank_zero_only_without_a_session_asks_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: Any
) -> None:
    monkeypatch.setenv("RANK", value)
    answer: Callable[[], Any] = healthcheck.rank_zero_only(lambda: 7)
    assert answer() == expected
