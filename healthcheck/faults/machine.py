"""Where faults enter a training: torch's own functions, replaced underneath the watch, and what each does to tensors."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.extend.guard import describe
from healthcheck.faults.spec import KINDS, Fault
from healthcheck.instrument.modelview import living_optimizers
from healthcheck.instrument.patching import AfterImport, Patches

if TYPE_CHECKING:
    from healthcheck.run.session import Session


def loss_factor(fault: Fault, step: int) -> float:
    """What the loss is multiplied with at ``step``."""
    if fault.kind == "nan-loss":
        return math.nan
    if fault.kind == "spike":
        return fault.amount
    return float(fault.amount ** min(step - fault.first + 1, 2000))


def trained(optimizer: Any) -> list[Any]:
    """Parameters of an optimizer that have a gradient now."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _spoil(tensor: Any, value: float) -> None:
    import torch

    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = value


def spoil_gradient(optimizers: Iterable[Any], value: float) -> bool:
    """Set one element of one gradient; False if there is no gradient."""
    for optimizer in optimizers:
        for parameter in trained(optimizer):
            _spoil(parameter.grad, value)
            return True
    return False


def spoil_weight(optimizer: Any) -> bool:
    for parameter in trained(optimizer):
        _spoil(parameter, math.nan)
        return True
    return False


def spoil_input(given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The same inputs with a NaN in the first floating-point tensor; None if there is none."""
    for i, value in enumerate(given):
        if hasattr(value, "is_floating_point") and value.is_floating_point() and value.numel():
            broken = value.clone()
            _spoil(broken, math.nan)
            return (*given[:i], broken, *given[i + 1 :])
    return None


def zero_rates(optimizer: Any, saved: list[tuple[Any, Any]]) -> None:
    """Set every learning rate to 0; the first rates are kept in ``saved``."""
    known = {id(group) for group, _ in saved}
    for group in optimizer.param_groups:
        if id(group) not in known:
            saved.append((group, group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"]))
        if hasattr(group["lr"], "zero_"):
            group["lr"].zero_()
        else:
            group["lr"] = 0.0


def restore_rates(saved: list[tuple[Any, Any]]) -> None:
    while saved:
        group, rate = saved.pop()
        group["lr"] = rate


def remember(optimizer: Any, frozen: list[tuple[Any, Any]]) -> bool:
    """Keep a copy of one tensor that is about to be updated; False if there is none."""
    for parameter in trained(optimizer):
        frozen.append((parameter, parameter.detach().clone()))
        return True
    return False


def put_back(frozen: list[tuple[Any, Any]]) -> None:
    if not frozen:
        return
    import torch

    with torch.no_grad():
        while frozen:
            parameter, before = frozen.pop()
            parameter.copy_(before)


def keep(optimizer: Any, size: float) -> Any:
    """A tensor of ``size`` bytes on the device of the parameters; written to, so that the memory is really taken."""
    import torch

    device = optimizer.param_groups[0]["params"][0].device
    return torch.ones(max(1, int(size) // 4), dtype=torch.float32, device=device)


# --------------------------------------------------------------------------------------------------
# Where faults enter a training: torch's own functions, replaced underneath the watch.
#
# Install it before a session attaches, so that the watch wraps what is broken here and takes the
# faults for the training's own. Dormant until a fault is added.


NEEDS = {
    "slow-data": "no DataLoader gave a batch",
    "nan-input": "no module took a floating-point tensor",
    "scaler-overflow": "no enabled GradScaler was used",
    "no-zero-grad": "zero_grad() was not called",
}
"""What a fault that never came about was waiting for, besides its step."""


class FaultMachine:
    """Breaks whatever trains in this process. Steps are attempted updates of the optimizer seen first.

    :param say: called once for every fault that came about.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.faults: list[Fault] = []
        self.happened: dict[Fault, int] = {}
        """Fault -> first step at which it came about."""
        self.attempts = 0
        self._say = say
        self._first: weakref.ref[Any] | None = None
        self._depth = 0
        self._scaled = False
        self._kept: list[Any] = []
        self._frozen: list[tuple[Any, Any]] = []
        self._rates: list[tuple[Any, Any]] = []
        self._input_hook: Any = None
        self._spoilt_at = 0
        self._patches = Patches(stay_in_children=True)
        self._imports = AfterImport(self._broken, self._patches)

    def install(self) -> FaultMachine:
        """Put everything in place; torch need not have been imported yet."""
        self._imports.when("torch", self._torch_is_there)
        self._imports.when("torch.utils.data.dataloader", self._loader_is_there)
        return self

    def remove(self) -> None:
        """Give everything back, and let go of what was kept."""
        self._patches.restore()
        self._kept.clear()
        self._frozen.clear()
        if self._input_hook is not None:
            self._input_hook.remove()
            self._input_hook = None

    def add(self, fault: Fault) -> None:
        """Arm a fault. Raises ``UsageError`` if its steps are over already."""
        if fault.last < self.step:
            raise UsageError(f"{fault} comes too late: the run is at step {self.step}")
        self.faults.append(fault)
        self._imports.when("torch.nn.modules.module", lambda module: self._watch_inputs())

    @property
    def step(self) -> int:
        """The step that is under way."""
        return self.attempts + 1

    def missed(self) -> list[str]:
        """A sentence for every fault that never came about."""
        return [
            f"{fault} never took effect: "
            + (
                NEEDS.get(fault.kind, "nothing was trained then")
                if self.attempts >= fault.first
                else f"the run had {self.attempts} steps"
            )
            for fault in self.faults
            if fault not in self.happened
        ]

    # -- inside -----------------------------------------------------------------------

    def _broken(self, error: Exception) -> None:
        self._say(f"faults cannot be injected here: {describe(error)}")

    def _torch_is_there(self, torch: ModuleType) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        replace = self._patches.replace
        replace(torch.Tensor, "backward", self._tensor_backward)
        replace(torch.autograd, "backward", self._backward)
        replace(torch.amp.GradScaler, "scale", self._scale)
        replace(torch.amp.GradScaler, "step", self._scaler_step)
        replace(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        replace(torch.nn.Module, "zero_grad", self._zero_grad)
        for handle in (register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post)):
            self._patches.on_restore(handle.remove)

    def _loader_is_there(self, dataloader: ModuleType) -> None:
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._next)

    def _now(self, *kinds: str, step: int | None = None) -> list[Fault]:
        at = self.step if step is None else step
        return [f for f in self.faults if f.kind in kinds and f.covers(at)] if self._patches.active else []

    def _did(self, fault: Fault, step: int) -> None:
        if fault not in self.happened:
            self.happened[fault] = step
            self._say(f"injected {fault.kind} at step {step:,}: {KINDS[fault.kind].help}")

    def _tensor_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            step = self.step
            for fault in self._now("hang"):
                self._did(fault, step)
                time.sleep(fault.amount)
            factor = 1.0
            for fault in self._now("nan-loss", "spike", "slow-divergence"):
                factor *= loss_factor(fault, step)
                self._did(fault, step)
            return original(loss if factor == 1.0 else loss * factor, *args, **kwargs)

        return backward

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._spoil_gradients()
            return result

        return backward

    def _spoil_gradients(self) -> None:
        for fault in self._now("nan-grad", "scaler-overflow"):
            if fault.kind == "scaler-overflow" and not self._scaled:
                continue
            if spoil_gradient(living_optimizers(), float("nan" if fault.kind == "nan-grad" else "inf")):
                self._did(fault, self.step)

    def _watch_inputs(self) -> None:
        """Listen to modules only while an input is to be spoiled: module hooks slow torch down."""
        pending = any(f.kind == "nan-input" and f.last >= self.step for f in self.faults)
        if pending and self._input_hook is None:
            from torch.nn.modules.module import register_module_forward_pre_hook

            self._input_hook = register_module_forward_pre_hook(self._forward)
        elif not pending and self._input_hook is not None:
            self._input_hook.remove()
            self._input_hook = None

    def _forward(self, module: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        import torch

        for fault in self._now("nan-input"):
            if self._spoilt_at != self.step and module.training and torch.is_grad_enabled():
                broken = spoil_input(given)
                if broken is not None:
                    self._spoilt_at = self.step
                    self._did(fault, self.step)
                    return broken
        return None

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            self._scaled = self._scaled or scaler.is_enabled()
            return original(scaler, outputs)

        return scale

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.attempts
            result = original(scaler, optimizer, *args, **kwargs)
            if self.attempts == before and self._is_first(optimizer):  # the scaler skipped it
                self.attempts += 1
            return result

        return step

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            faults = self._now("no-zero-grad")
            for fault in faults:
                self._did(fault, self.step)
            return None if faults else original(owner, *args, **kwargs)

        return zero_grad

    def _is_first(self, optimizer: Any) -> bool:
        known = self._first() if self._first is not None else None
        if known is None:
            self._first = weakref.ref(optimizer)
        return known is None or known is optimizer

    def _pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_first(optimizer):
            self.attempts += 1
        step = self.attempts
        self._watch_inputs()
        if self._rates and not self._now("lr-zero", step=step):
            restore_rates(self._rates)
        for fault in self._now("lr-zero", step=step):
            zero_rates(optimizer, self._rates)
            self._did(fault, step)
        for fault in self._now("freeze", step=step):
            if remember(optimizer, self._frozen):
                self._did(fault, step)

    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self.attempts
        put_back(self._frozen)
        for fault in self._now("nan-weight", step=step):
            if spoil_weight(optimizer):
                self._did(fault, step)
        for fault in self._now("leak", step=step):
            self._kept.append(keep(optimizer, fault.amount))
            self._did(fault, step)

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            self._watch_inputs()
            for fault in self._now("slow-data"):
                self._did(fault, self.step)
                time.sleep(fault.amount)
            return original(iterator)

        return __next__


@contextlib.contextmanager
def rehearsal(session: Session, faults: Iterable[Fault]) -> Iterator[FaultMachine]:
    """Break what trains inside the block; the session says it, and its report has ``injected``."""
    machine = FaultMachine(session.note).install()
    for fault in faults:
        machine.add(fault)

    def report_section(report: dict[str, Any]) -> None:
        report["injected"] = [
            {
                "fault": str(fault),
                "happened": fault in machine.happened,
                "step": machine.happened.get(fault, fault.first),
            }
            for fault in machine.faults
        ]
        for text in machine.missed():
            session.note(text)

    session.on("report_section", report_section)
    try:
        yield machine
    finally:
        machine.remove()
