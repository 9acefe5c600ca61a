"""Actions that mark, mitigate and stop: what they do, and the words when they cannot."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from healthcheck.actions import BUILT_IN
from healthcheck.actions.cleanup import Cleanup
from healthcheck.actions.control import Checkpoint, ScaleLr, SkipUpdate, Stop
from healthcheck.actions.diagnostics import DumpStacks, MemorySnapshot, Profile, where_main_stands
from healthcheck.assembly import plugin_host
from healthcheck.core.alerts import Alert
from healthcheck.core.protocols import ActionContext

Context = Callable[..., ActionContext]
MIB = 2**20


class FakeAllocator:
    """An accelerator's allocator as a cleanup sees it: there is no card here to hold a cache."""

    kind = "cuda"

    def __init__(self, allocated: int, reserved: int, *, returns: int = 0) -> None:
        self.allocated, self.reserved, self.returns = allocated, reserved, returns

    def allocated_bytes(self) -> int:
        return self.allocated

    def reserved_bytes(self) -> int:
        return self.reserved

    def release_cached(self) -> None:
        self.reserved -= self.returns


def test_every_built_in_is_registered_through_the_public_hook() -> None:
    host = plugin_host()
    names = [action().name for action in BUILT_IN]
    assert set(names) <= set(host.registry.actions)
    assert all(host.registry.owners["actions", name] == "healthcheck" for name in names)


def test_two_sessions_do_not_share_what_an_action_remembers() -> None:
    assert plugin_host().registry.actions["cleanup"] is not plugin_host().registry.actions["cleanup"]


def test_option_schemas_are_draft_07_and_refuse_unknown_options() -> None:
    import jsonschema

    for action in BUILT_IN:
        schema = action().options_schema
        jsonschema.Draft7Validator.check_schema(dict(schema))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"no-such-option": 1}, dict(schema))


# --------------------------------------------------------------------------- skip, stop


def test_skip_update_skips_before_the_update_only(alert: Alert, context: Context, controls: Any) -> None:
    late = SkipUpdate().run(alert, context(before_update=False))
    assert (late.done, controls.skipped) == (False, False)
    assert "after the update of step 131" in late.text
    assert SkipUpdate().run(alert, context()).text == "skipped the update of step 131"
    assert controls.skipped


def test_skip_update_says_the_adapters_reason_where_it_cannot(
    alert: Alert, context: Context, make_controls: Callable[..., Any]
) -> None:
    limited = make_controls(frozenset({"stop"}), skip_update="the engine steps by itself")
    outcome = SkipUpdate().run(alert, context(controls=limited))
    assert (outcome.done, outcome.text) == (False, "the engine steps by itself")


def test_stop_before_the_update_also_keeps_it_from_the_weights(alert: Alert, context: Context, controls: Any) -> None:
    outcome = Stop().run(alert, context())
    assert outcome.done
    assert outcome.text == "stop at step 131; update skipped"
    assert controls.skipped
    assert controls.stops == [
        {"reason": "gradient norm is nan", "rule": "grads-not-finite", "step": 131, "mode": "graceful", "exit_code": 1}
    ]


def test_stop_after_the_update_does_not_claim_to_have_skipped_it(alert: Alert, context: Context, controls: Any) -> None:
    outcome = Stop().run(alert, context({"mode": "abort", "exit_code": 17}, before_update=False))
    assert outcome.text == "stop at step 131"
    assert not controls.skipped
    assert (controls.stops[0]["mode"], controls.stops[0]["exit_code"]) == ("abort", 17)


def test_stop_is_honest_when_the_update_cannot_be_gated(alert: Alert, context: Context, controls: Any) -> None:
    controls.can_gate = False
    outcome = Stop().run(alert, context())
    assert outcome.done
    assert "the update could not be skipped" in outcome.text
    assert outcome.data["update_skipped"] is False


def test_stop_with_checkpoint_saves_first_or_says_why_not(
    alert: Alert, context: Context, controls: Any, make_controls: Callable[..., Any]
) -> None:
    saved = Stop().run(alert, context({"checkpoint": True}))
    assert Path(saved.data["checkpoint"]).is_file()
    limited = make_controls(frozenset({"stop"}), checkpoint="a plain script saves by itself")
    unsaved = Stop().run(alert, context({"checkpoint": True}, controls=limited))
    assert unsaved.done
    assert unsaved.text.endswith("no checkpoint: a plain script saves by itself")


# --------------------------------------------------------------------------- mitigate


def test_scale_lr_changes_every_group_and_says_the_new_rate(alert: Alert, context: Context, view: Any) -> None:
    outcome = ScaleLr().run(alert, context({"factor": 0.5}))
    assert outcome.text == "multiplied the learning rate by 0.5, now 0.005"
    assert [group["lr"] for group in view.optimizer.param_groups] == [0.005]


def test_checkpoint_does_not_overwrite_and_does_not_raise(alert: Alert, context: Context, tmp_path: Path) -> None:
    """A path in a rule file, which may be anybody's, is one in the record."""
    assert Checkpoint().run(alert, context({"path": "mine.pt"}, run_dir=tmp_path)).done
    assert (tmp_path / "mine.pt").is_file()
    again = Checkpoint().run(alert, context({"path": "mine.pt"}, run_dir=tmp_path))
    assert not again.done
    assert "exists already" in again.text
    without = Checkpoint().run(alert, context({"path": "mine.pt"}, run_dir=None))
    assert not without.done
    assert "no record" in without.text


def test_cleanup_really_collects_cycles(alert: Alert, context: Context) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.tensor = torch.ones(1000)

    gc.disable()
    try:
        import weakref

        gone = weakref.ref(Cycle())
        assert gone() is not None
        outcome = Cleanup().run(alert, context())
    finally:
        gc.enable()
    assert gone() is None
    assert outcome.data["reserved_before"] > 0


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (FakeAllocator(1000 * MIB, 2000 * MIB, returns=812 * MIB), "released 812 MiB of cached memory"),
        (
            FakeAllocator(21 * 1024 * MIB, 21914 * MIB, returns=100 * MIB),
            "cleanup freed 100 MiB of 21.4 GiB: live tensors hold it, not the cache",
        ),
        (
            FakeAllocator(100 * MIB, 2000 * MIB),
            "cleanup freed 0 B of 1.95 GiB: the cache could not be returned",
        ),
    ],
)
def test_cleanup_says_what_it_freed_and_what_it_did_not(
    alert: Alert, context: Context, controls: Any, device: FakeAllocator, words: str
) -> None:
    controls.device = device
    assert Cleanup().run(alert, context()).text == words


def test_cleanup_keeps_its_distance_unless_told(alert: Alert, context: Context) -> None:
    action = Cleanup()
    assert action.run(alert, context(step=100)).done
    soon = action.run(alert, context(step=150))
    assert not soon.done
    assert "at step 100" in soon.text
    assert action.run(alert, context({"cooldown": 10}, step=150)).done
    assert action.run(alert, context(step=400)).done


# --------------------------------------------------------------------------- observe


def test_dump_stacks_names_the_line_where_the_main_thread_stands(
    alert: Alert, context: Context, tmp_path: Path
) -> None:
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(DumpStacks().run(alert, context(event=None))))
    thread.start()
    thread.join()  # the main thread stands here
    (outcome,) = outcomes
    assert "test_actions.py" in outcome.text
    assert "test_dump_stacks_names_the_line" in outcome.text
    text = Path(outcome.data["path"]).read_text()
    assert "Thread 0x" in text
    assert "test_actions.py" in text
    assert Path(outcome.data["path"]).parent == tmp_path / "run" / "stacks"


def test_dump_stacks_numbers_its_files_and_works_without_a_record(alert: Alert, context: Context) -> None:
    names = [Path(DumpStacks().run(alert, context()).data["path"]).name for _ in range(2)]
    assert names == ["0001-rank0.txt", "0002-rank0.txt"]
    assert DumpStacks().run(alert, context(run_dir=None)).text.startswith("main thread is in ")


def test_the_place_leaves_our_own_frames_out() -> None:
    assert "where_main_stands" not in where_main_stands()


def test_memory_snapshot_is_honest_without_cuda(alert: Alert, context: Context) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    outcome = MemorySnapshot().run(alert, context())
    assert (outcome.done, outcome.text) == (False, "only the CUDA allocator can give one")


@pytest.mark.slow
def test_profile_records_the_asked_number_of_whole_steps_and_ends_by_itself(
    alert: Alert, context: Context, view: Any
) -> None:
    said: list[str] = []
    action = Profile()
    outcome = action.run(alert, context({"steps": 2}, say=said.append))
    path = Path(outcome.data["path"])
    view.optimizer.step()  # the step under way
    for _ in range(2):
        assert not path.exists()
        assert "being recorded" in action.run(alert, context()).text
        view.optimizer.zero_grad()
        view.model(torch.randn(5, 4)).sum().backward()
        view.optimizer.step()
    assert path.exists()
    assert said == [f"profile written: {path}"]
    view.optimizer.step()  # the hook is gone


def test_stop_on_several_ranks_says_who_decides_on_the_update(alert: Alert, context: Context, controls: Any) -> None:
    controls.can_gate = False
    controls.may_skip = False  # a loss differs from rank to rank; gradients do not
    outcome = Stop().run(alert, context())
    assert "the rules on gradients, which all ranks share, decide on the update" in outcome.text
    assert "could not" not in outcome.text


def test_profile_works_in_a_loop_whose_steps_are_judged_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event is built at the end of such a block."""
    import torch

    import healthcheck

    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path))
    rules = {"r": {"metric": "loss", "when": {"above": -1}, "severity": "info", "then": [{"profile": {"steps": 2}}]}}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with healthcheck.watch(model, optimizer, rules={"version": 1, "rules": rules}, console=False) as health:
        for _ in range(60):
            loss = model(torch.ones(1, 2)).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step(loss=loss)
    assert health.report is not None
    [action] = health.report["alerts"][0]["actions"]
    assert action["done"], action["text"]
    assert Path(action["path"]).is_file()
