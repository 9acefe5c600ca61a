"""The examples of Megatron Bridge's page on callbacks, and each of its promises in our words.

The examples differ from the page in their imports only: ``megatron.bridge`` is the driver.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.run import current
from healthcheck.run.ending import Ending
from healthcheck.trainers.megatron_bridge import HealthCheckCallback

sys.path.insert(0, str(Path(__file__).parent / "drivers"))

torch = pytest.importorskip("torch")
megatron_loop: Any = pytest.importorskip("megatron_loop")
Callback, CallbackManager, pretrain = megatron_loop.Callback, megatron_loop.CallbackManager, megatron_loop.pretrain

RULES = {"version": 1, "rules": {"loss": {"metric": "loss", "when": {"above": 1e9}}}}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert current.current() is None, "a test left a session open"


class Model(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x).square().mean()


def forward_step(batch: Any, model: list[Any]) -> Any:
    return model[0](batch)


def qwen25_500m_pretrain_config() -> Any:
    batches = [torch.ones(2, 3)] * 10
    return megatron_loop.config(
        train={"train_iters": 5},
        model={"chunks": [Model(3, 1)]},
        dataset={"batches": batches, "valid": batches[:2]},
        validation={"eval_interval": 5, "final": False},
    )


def health(**options: Any) -> HealthCheckCallback:
    return HealthCheckCallback(RULES, console=False, record=False, **options)


# --------------------------------------------------------------------------- the page's own callbacks


class MyCallback(Callback):  # type: ignore[misc, valid-type]
    def on_train_start(self, context):  # type: ignore[no-untyped-def]
        context.user_state["start_time"] = time.time()
        print(f"Training started at step {context.state.train_state.step}")

    def on_train_step_end(self, context):  # type: ignore[no-untyped-def]
        if context.loss_dict:
            print(f"Step {context.state.train_state.step}: loss={context.loss_dict}")

    def on_train_end(self, context):  # type: ignore[no-untyped-def]
        elapsed = time.time() - context.user_state["start_time"]
        print(f"Training completed in {elapsed:.2f}s")


def log_step(context):  # type: ignore[no-untyped-def]
    step = context.state.train_state.step
    if context.loss_dict:
        print(f"Step {step}: {context.loss_dict}")


class StepCounterCallback(Callback):  # type: ignore[misc, valid-type]
    def on_train_start(self, context):  # type: ignore[no-untyped-def]
        context.user_state["callback_step_count"] = 0

    def on_train_step_end(self, context):  # type: ignore[no-untyped-def]
        context.user_state["callback_step_count"] += 1

    def on_train_end(self, context):  # type: ignore[no-untyped-def]
        print(f"Callback saw {context.user_state['callback_step_count']} steps")


class InternalMetricsClient:
    sent: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def send(self, what: dict[str, Any]) -> None:
        self.sent.append(what)


class ProprietaryMetricsCallback(Callback):  # type: ignore[misc, valid-type]
    def __init__(self, endpoint: str) -> None:
        self.client = InternalMetricsClient(endpoint)

    def on_train_step_end(self, context):  # type: ignore[no-untyped-def]
        if context.loss_dict:
            self.client.send(
                {
                    "step": context.state.train_state.step,
                    "loss": context.loss_dict.get("lm loss"),
                    "grad_norm": context.grad_norm,
                    "cluster_id": os.environ.get("CLUSTER_ID"),
                }
            )


def test_class_based_callbacks_run_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    ours = health()
    config = qwen25_500m_pretrain_config()
    pretrain(config, forward_step, callbacks=[MyCallback(), ours])
    said = capsys.readouterr().out
    assert "Training started at step 0" in said
    assert "Step 4: loss=" in said
    assert "Training completed in" in said
    assert ours.report["steps"] == 5


def test_functional_callbacks_run_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    ours = health()
    callback_manager = CallbackManager()
    callback_manager.register("on_train_step_end", log_step)
    for event in ("on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"):
        callback_manager.register(event, getattr(ours, event))
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=callback_manager)
    assert capsys.readouterr().out.count("Step ") == 5
    assert ours.report["steps"] == 5


def test_both_patterns_may_be_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    manager = CallbackManager()
    manager.add(MyCallback())
    manager.add([StepCounterCallback(), health()])
    manager.register("on_eval_end", lambda ctx: print("Evaluation complete!"))
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=manager)
    said = capsys.readouterr().out
    assert "Callback saw 5 steps" in said
    assert "Evaluation complete!" in said


def test_proprietary_metrics_are_sent_from_a_callback_or_from_one_of_ours() -> None:
    class Ours(healthcheck.Callback):
        def __init__(self, endpoint: str) -> None:
            self.client, self.sent = InternalMetricsClient(endpoint), []

        def on_step_end(self, event: Any) -> None:
            self.sent.append({"step": event.step, "loss": event.loss, "grad_norm": event.grad_norm})

    ours, theirs = Ours("https://internal"), ProprietaryMetricsCallback("https://internal")
    theirs.client.sent.clear()
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=[theirs, health(callbacks=(ours,))])
    assert [s["step"] for s in theirs.client.sent] == [0, 1, 2, 3, 4]
    assert [s["step"] for s in ours.sent] == [1, 2, 3, 4, 5]
    assert [float(s["loss"]) for s in ours.sent] == [float(s["loss"]) for s in theirs.client.sent]
    assert [s["grad_norm"] for s in ours.sent] == [s["grad_norm"] for s in theirs.client.sent]


# --------------------------------------------------------------------------- each promise, in our words


class Counts(healthcheck.Callback):
    def on_step_end(self, event: Any) -> None:
        event.user_state["callback_step_count"] = event.user_state.get("callback_step_count", 0) + 1


def test_one_user_state_is_shared_by_their_callbacks_and_our_plugins() -> None:
    manager = CallbackManager()
    manager.add([StepCounterCallback(), health(callbacks=(Counts(),))])
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=manager)
    assert manager.user_state["callback_step_count"] == 10


def test_classes_and_functions_are_called_in_the_order_of_their_registration() -> None:
    session = healthcheck.open_session(target="x", rules=RULES, console=False, record=False)
    order: list[str] = []

    class First(healthcheck.Callback):
        def on_step_end(self) -> None:
            order.append("first")

    class Third(healthcheck.Callback):
        def on_step_end(self) -> None:
            order.append("third")

    session.register(First())
    session.on("step_end", lambda event: order.append("second"))
    session.register(Third())
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=[HealthCheckCallback(session=session)])
    assert order == ["first", "second", "third"] * 5
    session.finish(Ending())


def test_introspection_tells_who_listens_and_refuses_unknown_events() -> None:
    session = healthcheck.open_session(target="x", rules=RULES, console=False, record=False)
    assert session.has_hooks("train_start") is False
    assert session.list_hooks("train_start") == []
    remove = session.on("train_start", print)
    assert session.has_hooks("train_start") is True
    assert session.list_hooks("train_start") == ["print"]
    remove()
    assert session.has_hooks("train_start") is False
    assert set(session.events) >= {f"{p}_{e}" for p in ("train", "eval", "test") for e in ("start", "end")}
    for look in (session.has_hooks, session.list_hooks):
        with pytest.raises(healthcheck.UnknownHookError, match="train_start"):
            look("train_strat")
    with pytest.raises(healthcheck.UnknownHookError, match="train_start"):
        session.on("train_strat", print)
    session.finish(Ending())


def test_our_own_parts_never_use_the_hooks_of_the_user() -> None:
    """Rules are judged although nobody listens to anything."""
    ours = health()
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=[ours])
    session = ours.session
    assert session is not None
    assert {event: session.list_hooks(event) for event in session.events} == {event: [] for event in session.events}
    assert ours.report["rules"]["loss"]["verdict"] == "ok"


def test_with_nothing_to_judge_and_nobody_listening_no_event_is_built() -> None:
    nothing = HealthCheckCallback({"version": 1, "rules": {}}, console=False, record=False)
    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=[nothing])
    assert nothing.session is not None
    assert nothing.session.event_cost.keys() <= {healthcheck.EventKind.TRAIN_END}


def test_the_twelve_events_of_the_page_reach_our_plugins() -> None:
    heard: list[str] = []
    ours = health(callbacks=(Everything(heard),))
    config = qwen25_500m_pretrain_config()
    config.validation.final = True
    pretrain(config, forward_step, callbacks=[ours])
    assert ours.report["plugin_errors"] == []
    assert set(heard) == {
        *("train_start", "step_start", "step_end", "train_end"),
        *("eval_start", "eval_step", "eval_end", "test_start", "test_step", "test_end"),
    }
    assert (heard[0], heard[-1]) == ("train_start", "train_end")


class Everything(healthcheck.Callback):
    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def _hear(self, event: Any) -> None:
        self._heard.append(event.kind.value)

    on_train_start = on_step_start = on_step_end = on_train_end = _hear
    on_eval_start = on_eval_step = on_eval_end = on_test_start = on_test_step = on_test_end = _hear


def test_our_plugins_run_on_every_rank_unless_they_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen: list[str] = []

    class OnRanks(healthcheck.Callback):
        def on_step_end(self) -> None:
            seen.append("all")

        @healthcheck.rank_zero_only
        def on_train_start(self, session: Any) -> None:
            seen.append("zero")

    pretrain(qwen25_500m_pretrain_config(), forward_step, callbacks=[health(callbacks=(OnRanks(),))])
    assert seen == ["all"] * 5
