"""One toy model, its data, and the faults that can be put into it: the same for every trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BATCH = 4
STEPS = 50
EVAL_EVERY = 5


@dataclass(frozen=True)
class Fault:
    """What goes wrong, from which training step on (counted from 1)."""

    name: str
    at: int = 0
    rule: str = ""
    """The rule that must find it; empty for a healthy run."""
    step: int | None = None
    """Where, if that is known beforehand."""
    steps: int = STEPS


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("healthy"),
        Fault("nan_loss", 12, "loss-not-finite", 12, steps=15),
        Fault("nan_gradient", 12, "grads-not-finite", 12, steps=15),
        Fault("exploding_gradient", 30, "exploding-gradient", 30, steps=35),
        Fault("frozen_parameter", 1, "no-gradient", 5, steps=15),
        Fault("lr_zero", 1, "lr-stuck-at-zero", 5, steps=15),
        Fault("missing_zero_grad", 1, "gradients-pile-up", steps=15),
        Fault("loss_spike", 30, "loss-spike", 30, steps=35),
        Fault("slow_divergence", 15, "loss-divergence"),
        Fault("overfit", 10, "overfit"),
        Fault("memory_growth", 10, "memory-growth", steps=40),
        Fault("scaler_overflow", 10, "skipped-steps", 12, steps=20),
    )
}


class _Gradient(torch.autograd.Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class Toy(torch.nn.Module):
    """Two linear layers and their squared error. ``forward`` returns ``{"loss", "logits"}``.

    Counts its own forward passes in training mode: one is one step here.
    """

    spy: Callable[[], None] | None = None
    """Called in every forward pass, to look round while a trainer trains."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(6, 8)
        self.head = torch.nn.Linear(8, 1)
        self.fault = fault
        self.step = 0
        self.evaluations = 0
        self.hoard: list[Any] = []

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        if self.training:
            self.step += 1
        if Toy.spy is not None:
            Toy.spy()
        bad, name, step = self._bad(), self.fault.name, self.step
        hidden = torch.tanh(self.body(x))
        if bad and name == "frozen_parameter":
            hidden = hidden.detach()
        if bad and name == "nan_gradient" and step == self.fault.at:
            hidden = _Gradient.apply(hidden, float("nan"))
        if bad and name == "exploding_gradient":
            hidden = _Gradient.apply(hidden, 1e5)
        logits = self.head(hidden)
        if bad and name == "scaler_overflow":
            logits = _Gradient.apply(logits, float("inf"))
        loss = (logits - labels).pow(2).mean() + 1.0
        if bad:
            loss = self._spoilt(loss)
        if name == "overfit" and not self.training:
            loss = loss * (1.0 + 0.2 * max(0, self.step - self.fault.at) / EVAL_EVERY)
        return {"loss": loss, "logits": logits}

    def _bad(self) -> bool:
        return self.training and 0 < self.fault.at <= self.step

    def _spoilt(self, loss: Any) -> Any:
        name, since = self.fault.name, self.step - self.fault.at
        if name == "nan_loss" and since == 0:
            return loss * float("nan")
        if name == "loss_spike" and since == 0:
            return loss * 1000.0
        if name == "slow_divergence":
            return loss + 0.5 * since
        if name == "memory_growth":
            self.hoard.append(
                torch.ones(2**22)
            )  # 16 MiB a step that nobody gives back, more than a large process has spare
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The way in which a Trainer that owns the loop clears gradients."""
        if self.fault.name != "missing_zero_grad":
            super().zero_grad(set_to_none=set_to_none)


def optimizer_of(model: Toy) -> Any:
    rate = 0.0 if model.fault.name == "lr_zero" else 0.001
    return torch.optim.SGD(model.parameters(), lr=rate)


def scaler_of(fault: Fault) -> Any:
    """A GradScaler on the CPU, for the one fault that needs it."""
    return torch.amp.GradScaler("cpu", init_scale=256.0) if fault.name == "scaler_overflow" else None


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """As many rows as the steps need, in order."""

    def __init__(self, steps: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(steps * BATCH, 6, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True) * 0.1 + 0.1 * torch.randn(steps * BATCH, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.y[index]}


def loader(steps: int, seed: int = 1) -> Any:
    return torch.utils.data.DataLoader(Data(steps, seed), batch_size=BATCH)


def evaluate(model: Any) -> float:
    """Mean loss over the evaluation set, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch)["loss"]) for batch in loader(2, seed=2)]
    model.train()
    return sum(losses) / len(losses)
