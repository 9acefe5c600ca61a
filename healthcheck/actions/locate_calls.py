"""Which calls of the model made a step, kept with the state of the random generators so that they can be made again;
and what is in their tensors, in numbers."""

from __future__ import annotations

import gc
import random
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from healthcheck.extend.guard import describe


@dataclass(slots=True)
class RandomState:
    """Torch's generators (CPU and the CUDA cards in use), Python's and NumPy's. Read without a wait."""

    cpu: Any
    cards: dict[int, Any]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        import torch

        cards: dict[int, Any] = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            cards = {torch.cuda.current_device(): torch.cuda.get_rng_state()}
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(), cards, random.getstate(), numpy.random.get_state() if numpy is not None else None
        )

    def restore(self) -> None:
        import torch

        torch.set_rng_state(self.cpu)
        for card, state in self.cards.items():
            torch.cuda.set_rng_state(state, card)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy")
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


# --------------------------------------------------------------------------------------------------
# Which calls of the model made a step, kept so that they can be made again.
#
# Watched is every module that is called outermost while gradients are enabled: the model, or each network of
# a trainer that calls several. A call is kept as references to its arguments, with the state of the random
# number generators and of autocast; nothing else is copied. Compiled regions are left alone: what
# ``torch.compile`` made of a module is watched from outside.


MAX_CALLS = 32
"""Calls kept of all steps together; a step of more micro-batches keeps its last ones."""
LATE_STEPS = 3
"""Values of a device come up to two steps late: so many steps are kept there, on the CPU only the last."""

MAX_CHECKED = 2**22
"""Values of an output that is looked at in every step, on its device and without a wait."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of an outermost module."""

    module: weakref.ref[Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    random: RandomState
    autocast: dict[str, Any]
    """Device type -> dtype, where autocast was on."""
    training: bool
    whole: bool = True
    """False while its keywords are not known yet."""
    written: list[tuple[Any, int]] = field(default_factory=list)
    """Tensors of the arguments with torch's count of writes to them."""
    step: int = 0
    """0 until its update is seen."""
    gradients: dict[int, Any] = field(default_factory=dict)
    """Number of an output tensor -> the gradient that came back to it."""
    finite: dict[int, Any] = field(default_factory=dict)
    """Number of an output tensor -> whether it was finite, as a tensor on its device; not for very large ones."""
    left_out: int = 0
    """Bytes of such gradients that were not kept, being too large."""

    @property
    def on_device(self) -> bool:
        return any(tensor.device.type != "cpu" for tensor, _ in self.written)

    @property
    def overwritten(self) -> bool:
        """Whether the script has written other data into the arguments since."""
        return any(tensor._version != count for tensor, count in self.written)

    def take(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        self.arguments = tuple(_detached(value) for value in arguments)
        self.keywords = {name: _detached(value) for name, value in keywords.items()}
        found = tensors((self.arguments, self.keywords))
        self.written = [(tensor, tensor._version) for _, tensor in found if not tensor.is_inference()]


class Calls:
    """Listens to modules for one session. Its hooks never raise into the training.

    :param keep: most bytes of output gradients that are kept, all calls together.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.kept: list[Call] = []
        self.paused = False
        self.error = ""
        """Why nothing is kept any more."""
        self._open: list[Call | None] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._finder: Any = None
        self._looking = True

    # -- what the session tells -------------------------------------------------------

    def look(self, *, again: bool = False) -> None:
        """Find the modules that are called outermost, from the next call until the end of a step with some."""
        if not self._looking or self._finder is not None or self._open or "torch" not in sys.modules:
            return
        from torch.nn.modules.module import register_module_forward_pre_hook

        # Torch warns of global hooks when a compiled module is called. This one is gone before it compiles.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        if not again:
            self._watch_compiled(_compiled_in_place())
        self._finder = register_module_forward_pre_hook(self._found)

    def step_ends(self, step: int) -> None:
        """The calls so far belong to this step (announced before its update); those of older steps are let go."""
        self._open.clear()  # a forward pass that was interrupted never ended
        fresh = [call for call in self.kept if not call.step]
        for call in fresh:
            call.step = step
        if fresh:
            self._looking = False
            self._stop_looking()
        late = LATE_STEPS if any(call.on_device for call in self.kept) else 1
        self.kept = [call for call in self.kept if call.step > step - late]

    def of(self, step: int) -> list[Call]:
        return [call for call in self.kept if call.step == step]

    def close(self) -> None:
        self._looking = False
        self._stop_looking()
        while self._handles:
            self._handles.pop().remove()
        self.kept.clear()

    # -- hooks ------------------------------------------------------------------------

    def _stop_looking(self) -> None:
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    def _found(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """A module is called outermost. The global hook goes before its forward runs, and is back afterwards."""
        if _not_a_call_of_training():
            return
        self._stop_looking()
        if module in self._known:
            return  # its own hooks follow
        try:
            self._known.add(module)
            ended = module.register_forward_hook(self._ended, with_kwargs=True, always_call=True)
            began = module.register_forward_pre_hook(self._began, with_kwargs=True)
        except Exception:  # a scripted module takes no hook
            return
        self._handles += [began, ended]
        # Torch has chosen the hooks of this call already, `_began` is not among them. The keywords come with `_ended`.
        self._open_call(module, arguments, {}, whole=False)

    def _began(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not _not_a_call_of_training():
            self._open_call(module, arguments, keywords, whole=True)

    def _watch_compiled(self, modules: Iterable[Any]) -> None:
        """Calls of what ``module.compile()`` compiled in place pass its hooks by: stand before the compiled code."""
        import torch

        for module in modules:
            compiled = vars(module).get("_compiled_call_impl")
            if compiled is None or module in self._known:
                continue
            self._known.add(module)

            def call(*given: Any, module: Any = module, compiled: Any = compiled, **named: Any) -> Any:
                if not torch.compiler.is_compiling():
                    self._stop_looking()
                self._began(module, given, named)
                output = None
                try:
                    output = compiled(*given, **named)
                finally:
                    self._ended(module, given, named, output)
                return output

            module._compiled_call_impl = call
            self._handles.append(_PutBack(module, compiled))

    def _open_call(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], *, whole: bool) -> None:
        call = None
        if not self.paused and not self.error and not any(self._open):
            try:
                call = Call(weakref.ref(module), (), {}, RandomState.now(), _autocast(), module.training, whole)
                call.take(arguments, keywords)
            except Exception as error:
                self.error = describe(error)
                call = None
        self._open.append(call)

    def _ended(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if _not_a_call_of_training() or not self._open:
            return
        call = self._open.pop()
        if call is not None and output is not None:
            try:
                if not call.whole:
                    call.take(arguments, keywords)
                    call.whole = True
                self._await_gradients(call, output)
                self.kept = [*self.kept, call][-MAX_CALLS:]
            except Exception as error:
                self.error = describe(error)
        if self._looking:
            self.look(again=True)

    def _await_gradients(self, call: Call, output: Any) -> None:
        for number, (_, tensor) in enumerate(tensors(output)):
            if tensor.requires_grad and tensor.grad_fn is not None and is_real(tensor):
                if tensor.numel() <= MAX_CHECKED:
                    call.finite[number] = tensor.detach().isfinite().all()
                tensor.register_hook(lambda gradient, number=number: self._keep(call, number, gradient))

    def _keep(self, call: Call, number: int, gradient: Any) -> None:
        size = gradient.numel() * gradient.element_size()
        used = sum(g.numel() * g.element_size() for kept in self.kept for g in kept.gradients.values())
        if used + size > self.keep:
            call.left_out += size
        else:
            call.gradients[number] = gradient.detach()


def _compiled_in_place() -> list[Any]:
    """All living modules on which ``compile()`` was called. Asks the class of an object, never a proxy itself."""
    import torch

    kinds: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = torch.nn.Module in kind.__mro__
        if kinds[kind] and vars(thing).get("_compiled_call_impl") is not None:
            found.append(thing)
    return found


@dataclass(frozen=True, slots=True)
class _PutBack:
    module: Any
    compiled: Any

    def remove(self) -> None:
        if vars(self.module).get("_compiled_call_impl") is not None:
            self.module._compiled_call_impl = self.compiled


def _not_a_call_of_training() -> bool:
    """Inside a compiled region, without gradients, or recomputed during a backward pass."""
    import torch

    if torch.compiler.is_compiling():
        return True
    return not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1


def _autocast() -> dict[str, Any]:
    import torch

    kinds = ["cpu"]
    if torch.accelerator.is_available():
        kinds.append(torch.accelerator.current_accelerator().type)
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}


def _detached(value: Any) -> Any:
    """The same data without the graph behind it, which a kept call must not keep alive."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad) if value.requires_grad else value
    if type(value) in (list, tuple):
        return type(value)(_detached(item) for item in value)
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return value


# --------------------------------------------------------------------------------------------------
# What is in a tensor, in numbers: how many values are not finite, and the range of those that are.


MAX_TENSORS = 16
"""Tensors looked at in one input or output: a cache of hundreds is not walked."""


@dataclass(frozen=True, slots=True)
class Range:
    """One floating point tensor. ``low`` and ``high`` are of its finite values, None if it has none."""

    place: str
    """Where in the arguments or the output: ``attention_mask``, ``[0]``; empty for a lone tensor."""
    shape: tuple[int, ...]
    dtype: str
    bad: int
    nan: int
    low: float | None
    high: float | None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def absmax(self) -> float | None:
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    def counts(self) -> str:
        """``12 of 64 values NaN in float16``."""
        kind = "NaN" if self.nan == self.bad else "infinite" if not self.nan else "NaN or infinite"
        return f"{self.bad:,} of {self.numel:,} values {kind} in {self.dtype}"


def ranges(value: Any) -> list[Range]:
    """The floating point and complex tensors inside a value. Waits for the device."""
    return [range_of(tensor, place) for place, tensor in tensors(value) if is_real(tensor)]


def bad(found: list[Range]) -> Range | None:
    """The first of them that holds a non-finite value."""
    return next((one for one in found if one.bad), None)


def widest(found: list[Range]) -> Range | None:
    """That of the largest magnitude."""
    known = [one for one in found if one.absmax is not None]
    return max(known, key=lambda one: one.absmax or 0.0, default=None)


def is_real(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def range_of(tensor: Any, place: str = "") -> Range:
    """Numbers of one tensor; float8 is widened, complex numbers count as two reals, sparse ones by their values."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    with torch.no_grad():
        flat = tensor.detach()
        if hasattr(flat, "to_local"):
            flat = flat.to_local()
        if flat.layout is not torch.strided:
            flat = flat.coalesce().values() if flat.is_sparse else flat.to_dense()
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        if not flat.numel():
            return Range(place, shape, dtype, 0, 0, None, None)
        if flat.element_size() == 1:
            flat = flat.float()
        wide = torch.float32 if flat.device.type == "mps" else torch.float64
        finite = torch.isfinite(flat)
        low_end = torch.where(finite, flat, float("inf")).amin()
        high_end = torch.where(finite, flat, float("-inf")).amax()
        numbers = (finite.sum(), flat.isnan().sum(), low_end, high_end)
        read = torch.stack([number.to(wide) for number in numbers]).tolist()
    good, nan, low, high = int(read[0]), int(read[1]), read[2], read[3]
    return Range(place, shape, dtype, flat.numel() - good, nan, low if good else None, high if good else None)


def tensors(value: Any) -> Iterator[tuple[str, Any]]:
    """``(place, tensor)`` inside nested mappings, sequences and dataclasses; the first :data:`MAX_TENSORS`."""
    import torch

    left = MAX_TENSORS

    def walk(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal left
        if isinstance(value, torch.Tensor):
            if left > 0:
                left -= 1
                yield place, value
        elif depth > 6 or left <= 0:
            return
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(item, f"{place}.{key}" if place else str(key), depth + 1)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                yield from walk(item, f"{place}[{i}]", depth + 1)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                name = f"{place}.{field.name}" if place else field.name
                yield from walk(getattr(value, field.name), name, depth + 1)

    return walk(value, "", 0)
