"""The performance callbacks of Dream Trainer's documentation, as thin classes over the tools of this package.

Each goes into a ``CallbackCollection`` of Dream Trainer, beside or without our ``HealthCheckCallback`` (which is added where
it is missing), or into ``callbacks=[...]`` of :func:`healthcheck.watch`. What becomes of every parameter, and the test that
runs it, is in docs/how-to/performance-callbacks.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from healthcheck import PluginError, Session, UsageError, current, hookimpl
from healthcheck.trainers.dream import HealthCheckCallback, callback_class

from healthcheck_performance.compiling import GraphBreakLog
from healthcheck_performance.float8 import Float8
from healthcheck_performance.monitors import Analyzer, CompileTimes, Memory, Reporter, Throughput, Warmup
from healthcheck_performance.prefetch import FSDPPrefetch
from healthcheck_performance.profiling import DriveProfiler
from healthcheck_performance.tolerance import FaultTolerance, FaultToleranceParameters

__all__ = [
    "AutoAnalyzer",
    "CompilationMonitor",
    "FaultToleranceCallback",
    "FaultToleranceParameters",
    "FindGraphBreaksCallback",
    "Fp8Quantization",
    "MemoryProfiler",
    "OptimizeFSDP",
    "PerformanceReporter",
    "ProfileCallback",
    "ThroughputMonitor",
    "WarmupCallback",
]


class _Thin(callback_class()):  # type: ignore[misc]
    """Hands one tool to the session that watches the trainer."""

    _dependency: Any = object

    def __init__(self, tool: Any) -> None:
        self.tool = tool
        self._joined = False

    def pre_fit(self) -> None:
        """Somebody has to watch: our callback joins the collection where it is missing."""
        collection = self.trainer.callbacks
        if not any(type(one).__name__ == "HealthCheckCallback" for one in collection.values()):
            collection.append(HealthCheckCallback())

    def pre_train_step(self, batch: Any, batch_idx: int) -> None:
        if not self._joined:
            self._joined = True
            session = current()
            if session is not None:
                join(session, self.tool)

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        """As a callback of ``healthcheck.watch``, where there is no trainer."""
        self._joined = True
        join(session, self.tool)


def join(session: Session, tool: Any) -> None:
    """Register a tool, and the package itself where it is not installed as a plugin: profiles go into its report."""
    try:
        session.register(importlib.import_module("healthcheck_performance"), "healthcheck_performance")
    except PluginError:  # it is there
        pass
    session.register(tool)


class ProfileCallback(_Thin):
    """Run a ``torch.profiler.profile`` of yours with the training, on its own schedule, with its own handler.

    :param profiler: the profiler.
    :param memory_snapshot_enabled: as in Dream Trainer 0.3.0: record the history of CUDA's allocator.
    :param memory_snapshot_max_entries: how many events of it.
    :param memory_snapshot_output_dir: where ``memory_snapshot.pickle`` goes at the end.
    """

    def __init__(
        self,
        profiler: Any,
        *,
        memory_snapshot_enabled: bool = False,
        memory_snapshot_max_entries: int = 100_000,
        memory_snapshot_output_dir: str | None = None,
    ) -> None:
        super().__init__(DriveProfiler(profiler))
        self.profiler = profiler
        self._snapshot = memory_snapshot_enabled
        self._entries, self._folder = memory_snapshot_max_entries, memory_snapshot_output_dir or "."

    def pre_train_step(self, batch: Any, batch_idx: int) -> None:
        if self._snapshot and not self._joined:
            self._record(self._entries)
        super().pre_train_step(batch, batch_idx)

    def post_fit(self) -> None:
        import os

        import torch

        if self._snapshot and torch.cuda.is_available():
            os.makedirs(self._folder, exist_ok=True)
            torch.cuda.memory._dump_snapshot(os.path.join(self._folder, "memory_snapshot.pickle"))
            self._record(None)

    def _record(self, entries: int | None) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        if entries is None:
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            torch.cuda.memory._record_memory_history(max_entries=entries)


class FindGraphBreaksCallback(_Thin):
    """Write every graph break with its line and what to change.

    Dream Trainer's ends the process after the first step that it looks at; this one lets the training go on, writes the file
    at that step and again at the end, with recompilations and compile time.

    :param log_file: the file.
    :param skip: steps whose compilations do not count.
    :param fullgraph: compile with ``fullgraph=True``: the first graph break raises.
    """

    def __init__(self, log_file: str = "graph_breaks.log", skip: int = 0, fullgraph: bool = False) -> None:
        super().__init__(GraphBreakLog(log_file, skip, fullgraph))
        self._undo: Callable[[], None] | None = None

    def pre_launch(self) -> None:
        """Before the trainer compiles."""
        if self.tool.fullgraph:
            from healthcheck_performance.compiling import ask_for_fullgraph

            self._undo = ask_for_fullgraph()

    def post_fit(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


class OptimizeFSDP(_Thin):
    """Prefetch FSDP2 modules in the order of the first step.

    :param prefetch: modules gathered ahead.
    :param display: print the order.
    :param unshard_on_step: of version 0.3.0, there true by default: begin to gather the root before the forward pass.
    :param allocate_memory_from_process_group_for_comm: of version 0.3.0.

    Raises ``UsageError`` for ``prefetch`` below 1.
    """

    def __init__(
        self,
        prefetch: int = 1,
        display: bool = False,
        *,
        allocate_memory_from_process_group_for_comm: bool = False,
        unshard_on_step: bool = False,
    ) -> None:
        super().__init__(
            FSDPPrefetch(
                prefetch,
                display,
                unshard_on_step=unshard_on_step,
                allocate_memory_from_process_group_for_comm=allocate_memory_from_process_group_for_comm,
            )
        )

    def pre_train_step(self, batch: Any, batch_idx: int) -> None:
        if not self._joined:
            self.tool.models = list(self.trainer.named_models().values())
        super().pre_train_step(batch, batch_idx)
        if self.tool.unshard_on_step:
            self.tool.gather()


class Fp8Quantization(_Thin):
    """Train linear layers in float8 through torchao.

    :param enabled: false does nothing.
    :param amax_history_len: emulated. torchao's scales are dynamic: each is made of the tensor that it scales, so that no
        history of largest values enters it. It is the number of steps over which ``amax_history`` keeps them for you.
    :param amax_compute_algo: ``most_recent`` is what dynamic scaling does. ``max``, delayed scaling by the largest of the
        history, is refused: torchao has removed it (0.8).
    :param model_to_recipe: of version 0.3.0: model -> recipe; by default ``tensorwise`` for all models.
    :param emulate: ours: compute in high precision on rounded values, on any device. For tests, slow.

    Raises ``UsageError`` for what torchao does not have, and before training where the hardware has no float8.
    """

    def __init__(
        self,
        enabled: bool = True,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "most_recent",
        *,
        model_to_recipe: Mapping[str, Any] | None = None,
        emulate: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        if amax_compute_algo == "max":
            raise UsageError(
                'amax_compute_algo="max" is delayed scaling, which torchao has removed in 0.8: its scales are made of each tensor '
                'itself, as "most_recent" says'
            )
        if amax_compute_algo != "most_recent":
            raise UsageError(f'amax_compute_algo="{amax_compute_algo}" is not one of most_recent, max')
        if amax_history_len < 1:
            raise UsageError(f"amax_history_len must be at least 1, got {amax_history_len}")
        self.enabled, self.amax_history_len = enabled, amax_history_len
        self.recipes = dict(model_to_recipe) if model_to_recipe is not None else None
        self.emulate, self.modules = emulate, list(modules)
        super().__init__(self._tool("tensorwise"))

    def _tool(self, recipe: Any) -> Float8:
        name = str(getattr(getattr(recipe, "recipe", recipe), "value", getattr(recipe, "recipe", recipe)))
        if name == "inference":
            raise UsageError("the recipe inference is no training: use torchao.quantization on the model itself")
        return Float8(recipe=name, modules=self.modules, emulate=self.emulate, history=self.amax_history_len)

    def post_configure(self) -> None:
        """Before sharding and compiling, where the trainer announces it."""
        self._convert()

    def pre_fit(self) -> None:
        super().pre_fit()
        self._convert()

    def _convert(self) -> None:
        if not self.enabled or self.tool.converted:
            return
        for name, model in self.trainer.named_models().items():
            recipe = "tensorwise" if self.recipes is None else self.recipes.get(name)
            if recipe is not None:
                tool = self._tool(recipe)
                tool.convert(model)
                self.tool.converted = [*self.tool.converted, *tool.converted]

    def pre_train_step(self, batch: Any, batch_idx: int) -> None:
        if self.enabled:
            super().pre_train_step(batch, batch_idx)

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        if self.enabled:
            super().healthcheck_configure(session)

    @property
    def amax_history(self) -> dict[tuple[str, str], list[tuple[int, float]]]:
        """``(layer, tensor)`` -> largest absolute values as (step, value), the last ``amax_history_len`` of them.

        As far as a rule looks at them (the pack does, every ten steps).
        """
        return {key: list(kept) for key, kept in self.tool.history.items()}


class FaultToleranceCallback(_Thin):
    """Train on when replica groups die, through torchft.

    :param config: :class:`FaultToleranceParameters`.

    Gradients are averaged over the groups before each update, which is made if all that are there have come so far.
    """

    def __init__(self, config: FaultToleranceParameters) -> None:
        super().__init__(_Nothing())
        self.config = config
        self.tolerance = FaultTolerance(config)
        self._asked = False

    def pre_fit(self) -> None:
        super().pre_fit()
        if not self.config.enable:
            return
        models, optimizers = self.trainer.named_models(), self.trainer.named_optimizers()
        if len(optimizers) != 1:
            raise UsageError(
                f"FaultToleranceCallback: {len(optimizers)} optimizers; groups can agree on one update a step"
            )
        import torch

        self.tolerance.start(torch.nn.ModuleDict(models), next(iter(optimizers.values())))

    def pre_train_step(self, batch: Any, batch_idx: int) -> None:
        super().pre_train_step(batch, batch_idx)
        if self.config.enable and not self._asked:
            self._asked = True
            self.tolerance.step_begins()

    def pre_optimizer_step(self, model: Any, optimizer: Any) -> None:
        if not self.config.enable:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.tolerance.average(parameters)
        if not self.tolerance.commits():
            for parameter in parameters:  # an optimizer leaves parameters without a gradient as they are
                parameter.grad = None

    def post_optimizer_step(self, model: Any, optimizer: Any) -> None:
        self._asked = False

    def post_fit(self) -> None:
        self.tolerance.shutdown()


class _Nothing:
    """A tool that listens to nothing: the metrics come from a probe of the plugin."""

    name = "performance-fault-tolerance"

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        return


class ThroughputMonitor(_Thin):
    """Samples per second after ``warmup_steps`` steps.

    :param warmup_steps: steps that do not count.
    """

    def __init__(self, warmup_steps: int = 10) -> None:
        super().__init__(Throughput(warmup_steps))


class CompilationMonitor(_Thin):
    """Compile time and graph breaks by function (``compile_times``, ``graph_breaks``)."""

    def __init__(self) -> None:
        super().__init__(CompileTimes())

    @property
    def compile_times(self) -> dict[str, float]:
        return dict(self.tool.compile_times)

    @property
    def graph_breaks(self) -> dict[str, str]:
        return dict(self.tool.graph_breaks)


class MemoryProfiler(_Thin):
    """Memory every ``profile_every`` steps, in ``memory_profile.json``.

    :param profile_every: steps between two readings.
    """

    def __init__(self, profile_every: int = 100) -> None:
        super().__init__(Memory(profile_every))

    @property
    def memory_stats(self) -> list[dict[str, float]]:
        return list(self.tool.stats)


class PerformanceReporter(_Thin):
    """Write ``performance_report.txt`` at the end."""

    def __init__(self) -> None:
        super().__init__(Reporter())


class AutoAnalyzer(_Thin):
    """Say once what the run is bound by: compute, memory, communication, host or data.

    :param at: ours: steps before the few that are profiled.
    """

    def __init__(self, at: int = 30) -> None:
        super().__init__(Analyzer(at))

    @property
    def verdict(self) -> Any:
        """The :class:`healthcheck_performance.Verdict`; None before it is known."""
        return self.tool.verdict


class WarmupCallback(_Thin):
    """Callbacks behind it neither measure nor profile in the first ``steps`` steps.

    :param steps: how many.
    """

    def __init__(self, steps: int = 100) -> None:
        super().__init__(Warmup(steps))
