"""What counts as a step, and which events it has, for every way in which people write a loop."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.probes.memory import KeptGraphProbe
from healthcheck.probes.out_of_memory import OutOfMemoryProbe

PLAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        optimizer.step()
"""

STEP = ["step_start", "loss", "backward_end", "before_update", "after_update", "step_end"]


def test_a_plain_loop_shows_each_step_once_and_in_order(play: Callable) -> None:
    played = play(PLAIN)

    assert played.kinds() == ["train_start", *STEP, *STEP, *STEP, "train_end"]
    assert played.steps() == [1, 2, 3]
    assert {e.step for e in played.of("before_update")} == {1, 2, 3}
    assert all(e.optimizer is not None for e in played.of("before_update"))


def test_parameters_have_the_names_of_the_model(play: Callable) -> None:
    names: list[str] = []

    def look(session: object, event: object) -> None:
        names[:] = [name for name, _ in event.model.named_parameters()]  # type: ignore[attr-defined]

    play(PLAIN, on={"before_update": look})

    assert names == ["weight", "bias"]


def test_an_optimizer_that_an_earlier_run_left_behind_is_not_waited_for(
    play: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "left_behind", [], raising=False)
    play(f"{PLAIN}    import sys; sys.left_behind.append((model, optimizer))\n")
    assert len(sys.left_behind) == 1  # type: ignore[attr-defined]

    assert play(PLAIN).kinds() == ["train_start", *STEP, *STEP, *STEP, "train_end"]


def test_accumulation_is_one_step_with_a_loss_for_each_micro_batch(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(6):
            (model(torch.ones(4, 2)) + i).mean().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        """
    )

    assert played.steps("loss") == [1, 1, 1, 2, 2, 2]
    assert played.steps() == [1, 2]
    assert [e.loss_weight for e in played.of("loss")] == [None] * 6


def test_clipping_shows_the_norm_from_before_and_its_threshold(play: Callable) -> None:
    """Even a clip function that the script imported under its own name."""
    played = play(
        """
        import torch
        from torch.nn.utils import clip_grad_norm_ as clip
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        (model(torch.ones(1, 1)) * 30).sum().backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        """
    )

    (event,) = played.of("before_update")
    assert event.grad_norm == pytest.approx(30.0)
    assert event.max_norm == 0.5
    assert played.kinds(1).index("backward_end") < played.kinds(1).index("before_update")


@pytest.mark.parametrize(("unscale", "scaled"), [("scaler.unscale_(optimizer)", False), ("pass", True)])
def test_clipping_says_whether_gradients_still_carry_the_loss_scale(play: Callable, unscale: str, scaled: bool) -> None:
    played = play(
        f"""
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 2)).mean()).backward()
            {unscale}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """
    )

    assert [e.clipped_scaled for e in played.of("before_update")] == [scaled] * 3


def test_an_infinity_norm_is_not_passed_off_as_a_euclidean_one(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(1, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))
        optimizer.step()
        """
    )

    assert played.of("before_update")[0].grad_norm is None


GAN = """
    import torch
    generator = torch.nn.Linear(2, 2)
    critic = torch.nn.Linear(2, 1)
    opt_g = torch.optim.Adam(generator.parameters())
    opt_c = torch.optim.SGD(critic.parameters(), lr=0.1)
    for i in range(3):
        opt_c.zero_grad(); critic(torch.ones(4, 2)).mean().backward(); opt_c.step()
        opt_g.zero_grad(); critic(generator(torch.ones(4, 2))).mean().backward(); opt_g.step()
"""


def test_two_optimizers_share_a_step_and_are_told_apart(play: Callable) -> None:
    played = play(GAN)

    assert played.steps() == [1, 2, 3]
    assert [(e.step, e.optimizer_index) for e in played.of("before_update")] == [
        (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1),
    ]  # fmt: skip
    assert played.steps("loss") == [1, 1, 2, 2, 3, 3]


def test_a_probe_that_has_nothing_to_do_with_optimizers_rests_in_a_gan_as_well(
    play: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marking the graph of a loss, and walking it for a report that never comes, costs a step a hundred microseconds."""
    called: Counter[str] = Counter()
    for probe in (KeptGraphProbe, OutOfMemoryProbe):

        def sample(self: Any, event: Any, demand: Any, sample: Any = probe.sample, name: str = probe.name) -> Any:
            called[name] += event.kind.value == "loss"
            return sample(self, event, demand)

        monkeypatch.setattr(probe, "sample", sample)
    play(GAN.replace("range(3)", "range(40)"), rules="healthcheck:recommended", listen=False)

    # Two passes a step: in steps 1, 10, 20, 30 and 40, and up to the walk in step 2.
    assert 5 <= called["kept-graphs"] <= 12
    assert 1 <= called["out-of-memory"] <= 6


def test_several_roots_are_prefixed_by_the_scripts_own_names(play: Callable) -> None:
    names: list[str] = []
    play(GAN, on={"step_end": lambda s, e: names.__setitem__(slice(None), [n for n, _ in e.model.named_parameters()])})

    assert sorted(names) == ["critic.bias", "critic.weight", "generator.bias", "generator.weight"]


def test_an_optimizer_made_anew_takes_the_place_of_the_one_that_is_gone(play: Callable) -> None:
    """Never that of another which still steps: each step of a pair would count as two then."""
    seen: list[tuple[int, int]] = []
    play(
        """
        import torch
        first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        kept = torch.optim.SGD(second.parameters(), lr=0.1)
        for i in range(6):
            if i % 3 == 0:
                made = torch.optim.SGD(first.parameters(), lr=0.1)
            for model, optimizer in ((first, made), (second, kept)):
                optimizer.zero_grad()
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
        """,
        on={"before_update": lambda session, event: seen.append((event.step, event.optimizer_index))},
        listen=False,  # events that are kept would keep the optimizer that is gone
    )

    assert seen == [(step, index) for step in range(1, 7) for index in (0, 1)]


def test_the_step_follows_the_first_optimizer_when_the_second_steps_less_often(play: Callable) -> None:
    played = play(
        GAN.replace("opt_g.step()", "(opt_g.step() if i == 1 else None)"),
    )

    assert [(e.step, e.optimizer_index) for e in played.of("before_update")] == [(1, 0), (2, 0), (2, 1), (3, 0)]


SCALER = """
    import torch
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.{optimizer}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2)).square().mean()
        if i == 1:
            loss = loss * torch.tensor(float("inf"))
        scaler.scale(loss {divided}).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    "optimizer", ["SGD(model.parameters(), lr=0.0)", "AdamW(model.parameters(), lr=0.0, fused=True)"]
)
def test_an_overflow_is_a_skipped_step_and_shows_no_gradients(play: Callable, optimizer: str) -> None:
    played = play(SCALER.format(optimizer=optimizer, divided=""))

    assert [(e.step, e.skipped, e.loss_scale) for e in played.of("step_end")] == [
        (1, False, 1024.0),
        (2, True, 1024.0),
        (3, False, 512.0),
    ]
    assert played.steps("before_update") == [1, 3]


def test_losses_are_shown_without_the_scale(play: Callable) -> None:
    played = play(SCALER.format(optimizer="SGD(model.parameters(), lr=0.0)", divided=""))

    first, second, third = (e.loss for e in played.of("loss"))
    assert first == pytest.approx(third)
    assert first < 100
    assert math.isinf(second)


def test_a_scaled_loss_that_was_changed_again_is_divided_by_the_scale(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        (scaler.scale(model(torch.ones(1, 1)).sum() * 6) / 2).backward()
        scaler.step(optimizer)
        """
    )

    assert played.of("loss")[0].loss == pytest.approx(3.0)


def test_a_closure_shows_its_gradients_from_inside(play: Callable) -> None:
    """LBFGS evaluates its closure many times; the first evaluation is the step's."""
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(8, 2)) - 1).square().mean()
            loss.backward()
            return loss
        for i in range(2):
            optimizer.step(closure)
        """
    )

    assert played.kinds(1) == ["train_start", *STEP]
    assert played.steps("loss") == [1, 2]


def test_optimizers_inside_the_backward_pass_make_one_step_of_it(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for i in range(2):
            model(torch.ones(4, 2)).square().mean().backward()
        for handle in handles:  # a cycle through C++ that the garbage collector cannot free
            handle.remove()
        """
    )

    assert played.steps() == [1, 2]
    assert played.session.unit == "step"


def test_a_script_without_optimizer_is_counted_by_backward_passes(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        for i in range(3):
            model.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        """
    )

    assert played.session.unit == "backward"
    assert played.steps() == [1, 2, 3]
    assert played.steps("backward_end") == [1, 2, 3]


def test_an_optimizer_that_is_never_called_is_noticed_after_a_few_passes(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(7):
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
        """
    )

    assert played.session.unit == "backward"
    assert played.steps()[-1] == 7
    assert all(e.optimizer is None for e in played.of("step_end"))


def test_long_accumulation_is_not_taken_for_a_script_that_never_steps(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(100):
            model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
        """
    )

    assert played.session.unit == "step"
    assert played.steps() == [1]
    assert len(played.of("loss")) == 100


def test_checkpointed_activations_do_not_count_as_backward_passes_of_their_own(play: Callable) -> None:
    played = play(
        """
        import torch
        from torch.utils.checkpoint import checkpoint
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            x = torch.ones(4, 2, requires_grad=True)
            checkpoint(model, x, use_reentrant=True).mean().backward()
            optimizer.step()
        """
    )

    assert played.steps("loss") == [1, 2]


LOADER = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    train = DataLoader(TensorDataset(torch.ones(16, 2), torch.ones(16, 1)), 4)
    held_out = DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            total = sum((model(x) - y).square().mean() for x, y in held_out)
        torch.save(model.state_dict(), "{folder}/model.pt")
        torch.save(optimizer.state_dict(), "{folder}/optimizer.pt")
"""


def test_batches_say_how_many_samples_they_hold_and_how_long_they_took(play: Callable, tmp_path: Path) -> None:
    played = play(LOADER.format(folder=tmp_path))

    assert [e.n_samples for e in played.of("batch_ready")] == [4] * 8
    assert all(e.data_wait is not None and e.data_wait >= 0 for e in played.of("batch_ready"))
    assert played.steps("batch_ready") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_evaluation_is_a_pause_between_two_steps(play: Callable, tmp_path: Path) -> None:
    played = play(LOADER.format(folder=tmp_path))

    after_first_epoch = [e.kind.value for e in played.events if e.phase == "eval"][:4]
    assert after_first_epoch == ["eval_start", "eval_step", "eval_step", "eval_end"]
    assert played.steps("eval_end") == [4, 8]


@pytest.mark.parametrize(("names", "told"), [("'module.' + k", 1), ("k", 0), ("k if k == 'bias' else 'x'", 0)])
def test_a_state_of_which_no_name_fits_is_told_with_the_step_that_follows(
    play: Callable, names: str, told: int
) -> None:
    played = play(
        PLAIN
        + f"""
    state = {{{names}: v for k, v in model.state_dict().items()}}
    model.load_state_dict(state, strict=False)
    for i in range(2):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
"""
    )

    assert [len(e.loads.unmatched) if e.loads else 0 for e in played.of("step_end")] == [0, 0, 0, told, 0]


def test_files_saved_together_are_one_checkpoint(play: Callable, tmp_path: Path) -> None:
    played = play(LOADER.format(folder=tmp_path))

    assert [(e.step, e.path) for e in played.of("checkpoint_saved")] == [
        (4, str(tmp_path / "model.pt")),
        (8, str(tmp_path / "model.pt")),
    ]


def test_setting_a_frozen_part_to_evaluation_is_no_evaluation(play: Callable) -> None:
    played = play(
        """
        import torch
        backbone = torch.nn.Linear(2, 2)
        head = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for i in range(3):
            backbone.eval()
            head(backbone(torch.ones(4, 2))).mean().backward()
            optimizer.step()
        """
    )

    assert played.of("eval_start") == []


def test_without_rules_and_listeners_nothing_is_attached(play: Callable) -> None:
    import torch

    before = torch.autograd.backward
    played = play(
        """
        import torch, torch.optim.optimizer as o
        assert torch.autograd.backward.__module__ == "torch.autograd"
        assert not hasattr(torch.autograd.backward, "__wrapped__")
        assert not o._global_optimizer_pre_hooks
        """,
        listen=False,
    )

    assert played.session.watching is False
    assert played.code == 5
    assert torch.autograd.backward is before


def test_everything_is_given_back_afterwards(play: Callable) -> None:
    import os
    import signal
    import sys
    import threading

    import torch
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    def state() -> list[object]:
        return [
            torch.autograd.backward, torch.save, torch.nn.Module.eval, torch.nn.utils.clip_grad_norm_,
            torch.nn.utils.clip_grad._clip_grads_with_norm_, torch.nn.utils.clip_grad_value_, torch.amp.GradScaler.step,
            torch.amp.GradScaler.scale, dataloader._BaseDataLoaderIter.__next__, dict(optimizer._global_optimizer_pre_hooks),
            dict(optimizer._global_optimizer_post_hooks), list(sys.meta_path), sys.argv, list(sys.path), sys.modules["__main__"],
            signal.signal, signal.getsignal(signal.SIGTERM), os._exit, threading.excepthook,
        ]  # fmt: skip

    before = state()
    play(PLAIN)

    assert state() == before


@pytest.mark.slow
def test_a_compiled_step_is_seen_like_any_other(play: Callable) -> None:
    """Ordinary hooks would be traced away."""
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        @torch.compile(backend="eager")
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for i in range(3):
            step(torch.ones(4, 2))
        torch._dynamo.reset()  # its caches hold the optimizer
        """
    )

    assert played.steps() == [1, 2, 3]
    assert played.steps("before_update") == [1, 2, 3]


OWN_STATES = {
    "kept without a copy": ("model.state_dict()", 1),
    "a copy of the dict, not of its tensors": ("dict(model.state_dict())", 1),
    "copied": ("__import__('copy').deepcopy(model.state_dict())", 0),
    "of another model": ("torch.nn.Linear(2, 1).state_dict()", 0),
}


@pytest.mark.parametrize("case", OWN_STATES)
def test_a_state_that_is_the_models_own_tensors_is_told(play: Callable, case: str) -> None:
    how, told = OWN_STATES[case]
    played = play(PLAIN + f"    best = {how}\n    model.load_state_dict(best)\n")
    loads = [e.loads for e in played.of("step_end") if e.loads] + [played.session.facts.loads]
    assert max(len(each.own) for each in loads) == told
