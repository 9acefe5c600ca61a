"""Other packages that watch training, at their defaults, as their pages say they are called.

``--peers FOLDER`` holds one tree for each, made by ``pip install --no-deps --target FOLDER/NAME NAME``. What is not
there, or does not import or attach here, is left out and said. Those that want a gradient norm or a float get one
in the usual way (``float(loss.detach())``, one norm per parameter), since that is what using them costs.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from overhead_variants import Plain, Setup


def total_norm(model: torch.nn.Module) -> float:
    norms = [p.grad.detach().float().norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm())


class TrainPulse(Plain):
    """trainpulse: ``Monitor.log`` of loss, gradient norm and learning rate."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.monitor = importlib.import_module("trainpulse").Monitor()
        self.step = 0

    def before(self) -> None:
        self.monitor.step_start()

    def backward_done(self, loss: torch.Tensor) -> None:
        self.monitor.log("loss", self.step, float(loss.detach()))
        self.monitor.log("grad_norm", self.step, total_norm(self.model))
        self.monitor.log("learning_rate", self.step, self.optimizer.param_groups[0]["lr"])

    def stepped(self, loss: torch.Tensor) -> None:
        self.monitor.step_end(self.step)
        self.step += 1


class TrainingDoctor(Plain):
    """training-doctor: ``Doctor.log``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.doctor = importlib.import_module("training_doctor").Doctor()
        self.step = 0

    def backward_done(self, loss: torch.Tensor) -> None:
        lr = self.optimizer.param_groups[0]["lr"]
        self.doctor.log(self.step, loss=float(loss.detach()), lr=lr, grad_norm=total_norm(self.model))
        self.step += 1


class StabilityGuard(Plain):
    """stabilityguard: its optimizer round ours."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        guarded = importlib.import_module("stabilityguard").GuardedOptimizer
        self.optimizer = guarded(setup.optimizer, setup.model, verbose=False)


class Thermoclaw(Plain):
    """thermoclaw: ``Observer`` and ``CollapseDetector``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        package = importlib.import_module("thermoclaw")
        self.observer = package.Observer(setup.model, setup.optimizer)
        self.detector = package.CollapseDetector(setup.model, setup.optimizer)

    def stepped(self, loss: torch.Tensor) -> None:
        self.observer.step(loss=float(loss.detach()))
        self.detector.step()


class ArcVigil(Plain):
    """arc-vigil: ``BendexMonitor.observe``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.monitor = importlib.import_module("arc_vigil").BendexMonitor(setup.model)
        self.step = 0

    def before(self) -> None:
        self.monitor.observe(self.step)
        self.step += 1


class ArcTraining(Plain):
    """arc-training: ``Controller.step`` with the loss."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        package = importlib.import_module("arc")
        self.controller = package.Controller(
            setup.model, setup.optimizer, config=package.ControllerConfig(verbose=False)
        )

    def backward_done(self, loss: torch.Tensor) -> None:
        self.controller.step(loss)

    def close(self) -> None:
        self.controller.close()


class TorchAudit(Plain):
    """torch-audit: ``autopatch``, at its default of every 1,000 steps."""

    every = 1000

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        autopatch = importlib.import_module("torch_audit").autopatch
        self.audit = autopatch(
            setup.model,
            optimizer=setup.optimizer,
            every_n_steps=self.every,
            reporters=[],
            run_static=True,
            run_init=True,
        )

    def close(self) -> None:
        self.audit.finish(report=False)
        self.audit.unpatch()


class TorchAuditEveryStep(TorchAudit):
    every = 1


class TorchMortem(Plain):
    """torchmortem: ``Autopsy.attach`` and ``step``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.autopsy = importlib.import_module("torchmortem").Autopsy(setup.model, optimizer=setup.optimizer)
        self.autopsy.attach()

    def stepped(self, loss: torch.Tensor) -> None:
        self.autopsy.step(loss=float(loss.detach()))

    def close(self) -> None:
        self.autopsy.detach()


class TrainTools(Plain):
    """traintools: ``GradientHealthMonitor.inspect``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.monitor = importlib.import_module("traintools").GradientHealthMonitor()
        self.step = 0

    def backward_done(self, loss: torch.Tensor) -> None:
        self.monitor.inspect(self.model, step=self.step, lr=self.optimizer.param_groups[0]["lr"])
        self.step += 1


class GradSnitch(Plain):
    """gradsnitch: ``watch`` and ``log``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.monitor = importlib.import_module("gradsnitch").watch(setup.model, setup.optimizer)
        self.step = 0

    def backward_done(self, loss: torch.Tensor) -> None:
        self.monitor.log(self.step, float(loss.detach()))
        self.step += 1


class TrainScope(Plain):
    """trainscope: ``TrainScope.attach`` and ``step``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.folder = tempfile.TemporaryDirectory()
        config = importlib.import_module("trainscope.core.config").TrainScopeConfig(run_dir=self.folder.name)
        self.scope = (
            importlib.import_module("trainscope").TrainScope(setup.model, setup.optimizer, config=config).attach()
        )
        self.step = 0

    def backward_done(self, loss: torch.Tensor) -> None:
        self.scope.step(float(loss.detach()), batch_index=self.step)
        self.step += 1

    def close(self) -> None:
        self.scope.detach()
        self.folder.cleanup()


class GradLens(Plain):
    """gradlens: ``watch`` and ``log``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.context = importlib.import_module("gradlens").watch(setup.model)
        self.monitor = self.context.__enter__()

    def stepped(self, loss: torch.Tensor) -> None:
        self.monitor.log(loss=float(loss.detach()))

    def close(self) -> None:
        self.context.__exit__(None, None, None)


PEERS: dict[str, tuple[str, Callable[[Setup], Plain]]] = {
    "trainpulse": ("trainpulse", TrainPulse),
    "training-doctor": ("training-doctor", TrainingDoctor),
    "stabilityguard": ("stabilityguard", StabilityGuard),
    "thermoclaw": ("thermoclaw", Thermoclaw),
    "arc-vigil": ("arc-vigil", ArcVigil),
    "arc-training": ("arc-training", ArcTraining),
    "torch-audit": ("torch-audit", TorchAudit),
    "torch-audit every step": ("torch-audit", TorchAuditEveryStep),
    "torchmortem": ("torchmortem", TorchMortem),
    "traintools": ("traintools", TrainTools),
    "gradsnitch": ("gradsnitch", GradSnitch),
    "trainscope": ("trainscope", TrainScope),
    "gradlens": ("gradlens", GradLens),
}
"""Name of the variant -> (folder, class)."""


def peers(folder: Path) -> tuple[dict[str, Callable[[Setup], Plain]], dict[str, str]]:
    """``(variants, versions)`` of the packages in ``folder`` that attach to a small model here."""
    found: dict[str, Callable[[Setup], Plain]] = {}
    versions: dict[str, str] = {}
    for name, (package, kind) in PEERS.items():
        tree = folder / package
        if not tree.is_dir():
            print(f"# {name}: not in {folder}")
            continue
        if str(tree) not in sys.path:
            sys.path.append(str(tree))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _one_step(kind)
        except Exception as error:
            print(f"# {name}: left out, {type(error).__name__}: {error}")
            continue
        found[name] = _quiet(kind)
        versions[package] = next((p.name.split("-")[1] for p in tree.glob("*.dist-info")), "")
    return found, versions


def _one_step(kind: Callable[[Setup], Plain]) -> None:
    model = torch.nn.Linear(4, 4)
    variant = kind(Setup(model, torch.optim.AdamW(model.parameters())))
    variant.before()
    loss = model(torch.randn(2, 4)).pow(2).mean()
    loss.backward()
    variant.backward_done(loss)
    variant.optimizer.step()
    variant.stepped(loss)
    variant.close()


def _quiet(kind: Callable[[Setup], Plain]) -> Callable[[Setup], Plain]:
    """What a package prints while it attaches is not ours to show."""

    def make(setup: Setup) -> Plain:
        with contextlib.redirect_stdout(io.StringIO()):
            return kind(setup)

    return make
