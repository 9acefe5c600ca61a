"""Where faults enter a training: torch's own functions, replaced underneath the watch.

Install it before a session attaches, so that the watch wraps what is broken here and takes the
faults for the training's own. Dormant until a fault is added.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.errors import UsageError
from healthcheck.faults import harm
from healthcheck.faults.spec import KINDS, Fault
from healthcheck.trainers.modelview import living_optimizers
from healthcheck.trainers.patching import AfterImport, Patches

if TYPE_CHECKING:
    from healthcheck.session import Session

NEEDS = {
    "slow-data": "no DataLoader gave a batch",
    "nan-input": "no module took a floating-point tensor",
    "scaler-overflow": "no enabled GradScaler was used",
    "no-zero-grad": "zero_grad() was not called",
}
"""What a fault that never came about was waiting for, besides its step."""


class FaultMachine:
    """Breaks whatever trains in this process. Steps are attempted updates of the optimizer seen first.

    :param say: told once for every fault that came about.
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
        self._patches = Patches()
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
            f"{fault} never came about: "
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
        self._say(f"faults cannot be injected here: {type(error).__name__}: {error}")

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
                factor *= harm.loss_factor(fault, step)
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
            if harm.spoil_gradient(living_optimizers(), float("nan" if fault.kind == "nan-grad" else "inf")):
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
                broken = harm.spoil_input(given)
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
            harm.restore_rates(self._rates)
        for fault in self._now("lr-zero", step=step):
            harm.zero_rates(optimizer, self._rates)
            self._did(fault, step)
        for fault in self._now("freeze", step=step):
            if harm.remember(optimizer, self._frozen):
                self._did(fault, step)

    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self.attempts
        harm.put_back(self._frozen)
        for fault in self._now("nan-weight", step=step):
            if harm.spoil_weight(optimizer):
                self._did(fault, step)
        for fault in self._now("leak", step=step):
            self._kept.append(harm.keep(optimizer, fault.amount))
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
