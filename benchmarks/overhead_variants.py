"""What is done around a training step in the overhead benchmark: nothing, ours, habits, callbacks, other packages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import healthcheck

PER_PARAMETER: dict[str, Any] = {
    "each-gradient": {"metric": "grad_norm[*]", "when": "nonfinite"},
    "bad-elements": {"metric": "grad_nonfinite", "when": {"above": 0}},
}
RATIO: dict[str, Any] = {"ratio": {"metric": "update_ratio", "when": {"above": 100}, "every": 10}}
TWO: dict[str, Any] = {
    "loss-not-finite": {"metric": "loss", "when": "nonfinite"},
    "grads-not-finite": {"metric": "grad_norm", "when": "nonfinite"},
}
THEMES = ("core", "wiring", "curves", "performance", "gan", "rl", "finetune", "moe", "ranks")


def extending(packs: tuple[str, ...], rules: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"version": 1, "extends": [f"healthcheck:{pack}" for pack in packs], "rules": dict(rules or {})}


OURS: dict[str, Any] = {
    "no rules": {"version": 1, "rules": {}},
    "loss and norm": {"version": 1, "rules": TWO},
    "loss, norm, update ratio every 10": {"version": 1, "rules": {**TWO, **RATIO}},
    "recommended": "healthcheck:recommended",
    "recommended + per parameter": extending(("recommended",), PER_PARAMETER),
    "recommended + per parameter, update ratio every 10": extending(("recommended",), {**PER_PARAMETER, **RATIO}),
    "profile production": {**extending(("recommended",)), "settings": {"profile": "production"}},
    "profile minimal": {**extending(("recommended",)), "settings": {"profile": "minimal"}},
    "strict": "healthcheck:strict",
    "ci-smoke": "healthcheck:ci-smoke",
    "thematic packs": extending(THEMES),
}

STRICT = ("strict", "ci-smoke", "thematic packs")
"""These may stop a run of the same batch again and again, so they run in observe mode."""


@dataclass(slots=True)
class Setup:
    """What a variant may attach to."""

    model: nn.Module
    optimizer: Any


class Plain:
    """Nothing. Other variants override what they need; ``before``, ``backward_done`` and ``stepped`` come every step."""

    def __init__(self, setup: Setup) -> None:
        self.model, self.optimizer = setup.model, setup.optimizer

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Entered round forward and backward."""
        return contextlib.nullcontext()

    def before(self) -> None: ...

    def backward_done(self, loss: torch.Tensor) -> None: ...

    def stepped(self, loss: torch.Tensor) -> None: ...

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Entered round a block of its steps."""
        return contextlib.nullcontext()

    def close(self) -> None: ...


@contextlib.contextmanager
def only_now(health: Any) -> Iterator[None]:
    """The training of one variant goes on. While the others have their turn its time stands still, as in an evaluation:
    the budget is a part of the time that is watched."""
    session = health.session
    if session.active.paused_at is not None:
        session.active.resume(session.clock.monotonic())
    try:
        yield
    finally:
        session.active.pause(session.clock.monotonic())


def ours(name: str) -> Callable[[Setup], Plain]:
    """``healthcheck.watch`` with one set of rules. Without rules nothing may be attached: that is asserted."""

    class Ours(Plain):
        def __init__(self, setup: Setup) -> None:
            super().__init__(setup)
            self.health = healthcheck.watch(
                setup.model,
                setup.optimizer,
                rules=OURS[name],
                console=False,
                record=False,
                observe=name in STRICT or None,
            )
            if name == "no rules":
                assert not self.health.session.watching
                assert not setup.optimizer._optimizer_step_pre_hooks
                assert not setup.optimizer._optimizer_step_post_hooks
            else:
                assert self.health.session.watching

        def stepped(self, loss: torch.Tensor) -> None:
            self.health.step(loss=loss)

        def turn(self) -> contextlib.AbstractContextManager[Any]:
            return only_now(self.health)

        def close(self) -> None:
            self.health.close()
            errors = [*self.health.session.internal_errors, *self.health.session.dispatch.errors]
            assert not errors, f"{name}: {errors}"

    return Ours


# --------------------------------------------------------------------------- habits


class LossItem(Plain):
    def stepped(self, loss: torch.Tensor) -> None:
        loss.item()


class ClipItem(Plain):
    def backward_done(self, loss: torch.Tensor) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        loss.item()


class Loops(Plain):
    def backward_done(self, loss: torch.Tensor) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                bool(parameter.grad.isnan().any())
                parameter.grad.norm().item()


class Anomaly(Plain):
    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.set_detect_anomaly(True)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------- callbacks as people write them


class LightningCallback(Plain):
    """A gradient monitor for Lightning, with its two hooks called as the Trainer calls them.

    ``on_before_optimizer_step`` logs the norm of each parameter and their total, ``on_train_batch_end`` stops on a
    loss that is not finite. Logged values become floats, as loggers take them.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.logged: dict[str, float] = {}
        self.should_stop = False

    def backward_done(self, loss: torch.Tensor) -> None:
        self.on_before_optimizer_step(self.model)

    def stepped(self, loss: torch.Tensor) -> None:
        self.on_train_batch_end({"loss": loss})

    def on_before_optimizer_step(self, module: nn.Module) -> None:
        norms = {f"grad/{n}": p.grad.detach().norm(2) for n, p in module.named_parameters() if p.grad is not None}
        norms["grad/total"] = torch.stack(list(norms.values())).norm(2)
        self.logged.update({name: float(norm) for name, norm in norms.items()})

    def on_train_batch_end(self, outputs: Mapping[str, Any]) -> None:
        loss = outputs["loss"].detach()
        if not torch.isfinite(loss):
            self.should_stop = True
        self.logged["train_loss"] = loss.item()


class HuggingFaceCallback(Plain):
    """A callback for the HF Trainer, with its two hooks called as the Trainer calls them.

    ``on_pre_optimizer_step`` looks for NaN in every gradient and adds up the norm, ``on_step_end`` looks for NaN in
    every weight and notes memory and learning rate.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.history: list[dict[str, float]] = []
        self.should_training_stop = False

    def backward_done(self, loss: torch.Tensor) -> None:
        self.on_pre_optimizer_step(self.model)

    def stepped(self, loss: torch.Tensor) -> None:
        self.on_step_end(self.model, self.optimizer, loss)

    def on_pre_optimizer_step(self, model: nn.Module) -> None:
        total = 0.0
        for parameter in model.parameters():
            if parameter.grad is not None:
                if torch.isnan(parameter.grad).any():
                    self.should_training_stop = True
                total += parameter.grad.data.norm(2).item() ** 2
        self.norm = total**0.5

    def on_step_end(self, model: nn.Module, optimizer: Any, loss: torch.Tensor) -> None:
        if any(torch.isnan(parameter).any() for parameter in model.parameters()):
            self.should_training_stop = True
        memory = torch.cuda.memory_allocated() if loss.is_cuda else 0
        lr = optimizer.param_groups[0]["lr"]
        self.history.append({"loss": loss.item(), "grad_norm": self.norm, "lr": lr, "memory": memory})


VARIANTS: dict[str, Callable[[Setup], Plain]] = {
    "nothing": Plain,
    "nothing again": Plain,
    **{name: ours(name) for name in OURS},
    "loss.item()": LossItem,
    "clip + .item()": ClipItem,
    "loops: isnan, norm per parameter": Loops,
    "anomaly mode": Anomaly,
    "callback for Lightning": LightningCallback,
    "callback for HF": HuggingFaceCallback,
}

GROUPS: dict[str, tuple[str, ...]] = {
    "ours": tuple(OURS),
    "habits": ("loss.item()", "clip + .item()", "loops: isnan, norm per parameter", "anomaly mode"),
    "callbacks": ("callback for Lightning", "callback for HF"),
}
"""Names that ``--variants`` takes for several. ``peers`` comes from ``overhead_peers``."""
