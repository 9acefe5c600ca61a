"""Training in float8 through torchao, and its health: largest values, scales, what is cut off and what is lost.

Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433; scales are dynamic, as in torchao's recipes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from healthcheck import Cost, Demand, Event, EventKind, Metric, Sample, Session, UsageError, compile_log, hookimpl

from healthcheck_performance.profiling import compiles

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FLOAT8_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "recipe": {"enum": list(RECIPES), "description": "torchao's recipe of scales (default tensorwise)."},
        "modules": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "description": "Names or globs of linear layers to convert (default: all whose sizes are multiples of 16).",
        },
        "except": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "description": "Names or globs of those not to.",
        },
        "emulate": {
            "type": "boolean",
            "description": "Compute in high precision on rounded values, on any device: for tests, slow (default false).",
        },
        "pad": {"type": "boolean", "description": "Pad inner dimensions that are no multiple of 16 (default false)."},
        "fsdp_all_gather": {"type": "boolean", "description": "Gather weights in float8 under FSDP2 (default false)."},
    },
}
CAPABLE = (8, 9)
"""Compute capability from which on cards multiply float8 numbers."""


class Float8:
    """Convert linear layers for training in float8, before the first step.

    :param recipe: one of :data:`RECIPES`.
    :param modules: names or globs of layers to convert; empty: all that fit.
    :param exclude: names or globs of layers to leave as they are.
    :param history: how many largest values are kept of each tensor, for whoever asks (``history``).
    :param emulate: round values as float8 does and multiply in high precision. On any device, slow, for tests.

    Parameters stay the same objects, so that optimizers that hold them go on. Weights that are sharded already cannot be
    converted: do it before ``fully_shard``.
    """

    name = "performance-float8"

    def __init__(
        self,
        *,
        recipe: str = "tensorwise",
        modules: Sequence[str] = (),
        exclude: Sequence[str] = (),
        emulate: bool = False,
        pad: bool = False,
        fsdp_all_gather: bool = False,
        history: int = 1024,
    ) -> None:
        if recipe not in RECIPES:
            raise UsageError(f'float8 has no recipe "{recipe}"; there are {", ".join(RECIPES)}')
        self.recipe, self.modules, self.exclude = recipe, list(modules), list(exclude)
        self.emulate, self.pad, self.fsdp_all_gather = emulate, pad, fsdp_all_gather
        self.converted: list[str] = []
        """Names of the layers that were converted."""
        self.history: dict[tuple[str, str], deque[tuple[int, float]]] = {}
        """(layer, tensor) -> the last largest values that a rule has looked at, as (step, value)."""
        self._kept = history
        self._undo: list[Callable[[], None]] = []

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._session = session
        self._undo.append(session.on("samples", self._samples))
        if self.converted:
            self._undo.append(session.on("train_end", lambda event: self.undo()))
            return
        handle: Any = register_module_forward_pre_hook(lambda module, args: self._first_call(module, handle))
        self._undo += [handle.remove, session.on("train_end", lambda event: self.undo())]

    def _samples(self, step: int, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.metric == AMAX.name:
                key = (dict(sample.labels)["module"], dict(sample.labels)["tensor"])
                self.history.setdefault(key, deque(maxlen=self._kept)).append((sample.step, float(sample.value)))

    def undo(self) -> None:
        """Look for no more models. Layers stay converted."""
        while self._undo:
            self._undo.pop()()

    def _first_call(self, module: Any, handle: Any) -> None:
        import torch

        if not module.training or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        handle.remove()
        self.convert(module)
        self._session.note(f"float8 ({self.text()}): {len(self.converted)} linear layers of {type(module).__name__}")

    def text(self) -> str:
        return f"{self.recipe}{', emulated' if self.emulate else ''}"

    def check(self, devices: Iterable[Any]) -> None:
        """Raises ``UsageError`` where torchao or the hardware is missing: before training, not at the first product."""
        import torch

        if importlib.util.find_spec("torchao") is None:
            raise UsageError("float8 needs torchao: pip install 'healthcheck-performance[float8]'")
        if self.emulate:
            return
        for device in devices:
            if device.type != "cuda":
                raise UsageError(
                    f"float8: the model is on {device.type}, which has no float8 arithmetic; it needs a card of compute capability "
                    f"{CAPABLE[0]}.{CAPABLE[1]} or later (H100, L40S). For a test: emulate: true, which is slow"
                )
            capability = torch.cuda.get_device_capability(device)
            if capability < CAPABLE and torch.version.hip is None:
                raise UsageError(
                    f"float8: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, float8 needs "
                    f"{CAPABLE[0]}.{CAPABLE[1]} or later. For a test: emulate: true, which is slow"
                )

    def convert(self, model: Any) -> Any:
        """Convert the layers of a model in place; returns it.

        Raises ``UsageError`` where the hardware has no float8, nothing fits, or weights are sharded already.
        """
        self.check({p.device for p in model.parameters()})
        float8 = importlib.import_module("torchao.float8")
        given = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        changes = {
            "emulate": self.emulate,
            "pad_inner_dim": self.pad,
            "enable_fsdp_float8_all_gather": self.fsdp_all_gather,
        }
        from dataclasses import replace

        config = replace(given, **changes)
        target = getattr(model, "_orig_mod", model)
        self.converted = []
        converted = float8.convert_to_float8_training(target, config=config, module_filter_fn=self._wanted)
        if not self.converted:
            wanted = f" among {', '.join(self.modules)}" if self.modules else ""
            raise UsageError(
                f"float8: no linear layer of {type(target).__name__}{wanted} can be converted; sizes must be multiples of 16"
                " (or pad: true)"
            )
        return model if target is not model else converted

    def _wanted(self, module: Any, name: str) -> bool:
        import torch

        if not isinstance(module, torch.nn.Linear):
            return False
        if self.modules and not any(fnmatch(name, pattern) for pattern in self.modules):
            return False
        if any(fnmatch(name, pattern) for pattern in self.exclude):
            return False
        rows, columns = module.weight.shape
        if not self.pad and (rows % 16 or columns % 16):
            return False
        if type(module.weight.data).__name__ == "DTensor":
            raise UsageError(f"float8: {name}.weight is sharded already; convert before fully_shard")
        self.converted.append(name)
        return True

    @hookimpl
    def healthcheck_performance(
        self, session: Session, performance: dict[str, Any]
    ) -> Mapping[str, Mapping[str, Any]] | None:
        if not self.converted:
            return {}
        rows = [{"module": name} for name in self.converted]
        return {
            "performance.float8": {"text": f"{len(rows)} linear layers train in float8 ({self.text()})", "rows": rows}
        }


# --------------------------------------------------------------------------- health

_FAMILY = ("module", "tensor")
AMAX = Metric(
    "performance.float8_amax", "Largest absolute value of what a float8 layer casts.", cost=Cost.DEVICE, labels=_FAMILY
)
SCALE = Metric(
    "performance.float8_scale",
    "What it is multiplied by before the cast (the smallest of all rows).",
    cost=Cost.DEVICE,
    labels=_FAMILY,
)
SATURATED = Metric(
    "performance.float8_saturated",
    "Share of values that are beyond the largest float8 number after scaling and are cut off.",
    "fraction",
    Cost.DEVICE,
    labels=_FAMILY,
)
UNDERFLOW = Metric(
    "performance.float8_underflow",
    "Share of values other than zero that become zero in float8.",
    "fraction",
    Cost.DEVICE,
    labels=_FAMILY,
)


class Float8Probe:
    """What float8 layers cast: input and weight in the forward pass, the gradient of the output in the backward pass.

    Measured with hooks in steps that a rule looks at, with the scale that torchao computes from the same values. Under
    ``torch.compile`` hooks would change what is compiled: then only weights are measured.
    """

    name = "performance-float8-health"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_START, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (AMAX, SCALE, SATURATED, UNDERFLOW)

    def __init__(self) -> None:
        self._found: list[tuple[str, str, Any, Any]] = []
        self._handles: list[Any] = []
        self._layers: list[tuple[str, Any]] | None = None
        self._start = compile_log()

    def plan(self, demand: Demand) -> None:
        """Models may have been converted since."""
        self._layers = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        if event.kind is EventKind.STEP_START:
            if not self._handles and self._due(demand, event.step):
                self._listen(event)
            return ()
        samples = self._take(event, demand) if self._due(demand, event.step) else []
        self._forget()
        if self._due(demand, event.step + 1):  # a script may announce its step only after the forward pass
            self._listen(event)
        return samples

    def close(self) -> None:
        self._forget()

    def _due(self, demand: Demand, step: int) -> bool:
        return any(demand.due(metric.key, step) for metric in self.provides)

    def _forget(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._found = []

    def _listen(self, event: Event) -> None:
        if event.model is None:
            return
        if self._layers is None:
            self._layers = [(n, m) for n, m in event.model.named_modules() if type(m).__name__ == "Float8Linear"]
        if not self._layers or compiles(event.model, self._start):
            return
        for name, module in self._layers:
            self._handles.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Callable[..., None]:
        def hear(module: Any, args: Any, output: Any) -> None:
            if not module.training:
                return
            self._found.append((name, "input", args[0].detach(), module.config.cast_config_input))
            if getattr(output, "requires_grad", False):
                output.register_hook(
                    lambda gradient: self._found.append(
                        (name, "grad_output", gradient.detach(), module.config.cast_config_grad_output)
                    )
                )

        return hear

    def _take(self, event: Event, demand: Demand) -> list[Sample]:
        found, samples = list(self._found), []
        for name, module in self._layers or ():
            found.append((name, "weight", module.weight.detach(), module.config.cast_config_weight))
        seen: dict[tuple[str, str], Any] = {}
        for name, tensor, value, config in found:  # the last micro-batch of a step is the one that is measured
            seen[name, tensor] = (value, config)
        for (name, tensor), (value, config) in seen.items():
            labels = (("module", name), ("tensor", tensor))
            for metric, number in measure(value, config).items():
                if demand.due(metric.key, event.step):
                    samples.append(Sample(metric.name, event.step, number, labels))
        return samples


def measure(value: Any, config: Any) -> dict[Metric, Any]:
    """Largest value, scale, share cut off and share lost of one tensor, as 0-dim tensors on its device.

    :param config: torchao's ``CastConfig``: which float8 type, and a scale for the whole tensor or for each row.
    """
    import torch

    value = value.to_local() if hasattr(value, "to_local") else value
    if not value.numel() or config.target_dtype is None:
        return {}
    type_ = torch.finfo(config.target_dtype)
    size = value.abs().float()
    by_row = config.scaling_granularity.name == "AXISWISE"
    amax = size.amax(dim=-1, keepdim=True) if by_row else size.amax()
    scale = type_.max / amax.clamp(min=1e-12)
    scaled = size * scale
    cast = (value.float() * scale).clamp(-type_.max, type_.max).to(config.target_dtype)
    lost = (cast.float() == 0) & (size > 0)
    return {
        AMAX: amax.amax(),
        SCALE: scale.amin(),
        SATURATED: (scaled > type_.max * (1 + 2**-4)).float().mean(),
        UNDERFLOW: lost.float().mean(),
    }
