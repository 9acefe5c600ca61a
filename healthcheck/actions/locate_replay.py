"""Make a call of the model again, forward and backward, operation by operation, and leave the training as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.actions.locate_calls import Call, RandomState, Range, bad, is_real, range_of, ranges, tensors


@dataclass(slots=True, eq=False)
class Frame:
    """One call of one module."""

    name: str
    """Canonical name; empty for the outermost module."""
    kind: str
    """Its class."""
    depth: int
    inputs: list[Range]
    outputs: list[Range] = field(default_factory=list)
    inner: list[Frame] = field(default_factory=list)
    first_op: int = 0
    last_op: int = 0
    """Numbers that autograd gave to the operations inside: from ``first_op``, up to before ``last_op``."""

    def walk(self) -> Iterator[Frame]:
        yield self
        for frame in self.inner:
            yield from frame.walk()


@dataclass(slots=True)
class Origin:
    """Where values stopped being finite. The fault is the module's own, or in its code beside the modules it calls."""

    frame: Frame
    after: Frame | None = None
    """The module call before, whose output is finite."""
    before: Frame | None = None
    """In the module's own code ahead of this call, whose input is not finite."""

    @property
    def whole(self) -> bool:
        """Whether the module as such is meant: nothing smaller was seen inside it."""
        return not self.frame.inner


class ForwardTrace:
    """Hooks on every module of ``root`` while it is replayed. Reads every output, so it waits for the device.

    :param names: module id -> canonical name.
    :param tick: called at every module; raises when time is up.
    """

    def __init__(self, root: Any, names: Mapping[int, str], tick: Callable[[], None]) -> None:
        self.root = root
        self.names = names
        self.tick = tick
        self.top: Frame | None = None
        self.over = False
        """True once the backward pass runs: activation checkpointing calls modules again there."""
        self._open: list[Frame] = []
        self._handles: list[Any] = []

    def __enter__(self) -> ForwardTrace:
        for name, module in self.root.named_modules():
            try:
                began = module.register_forward_pre_hook(
                    self._began(self.names.get(id(module), name)), with_kwargs=True
                )
                self._handles += [began, module.register_forward_hook(self._ended)]
            except RuntimeError:  # a scripted part takes no hooks: it shows as code of the module around it
                continue
        return self

    def __exit__(self, *_: Any) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _began(self, name: str) -> Callable[..., None]:
        def began(module: Any, arguments: Any, keywords: Any) -> None:
            if self.over:
                return
            self.tick()
            frame = Frame(name, type(module).__name__, len(self._open), ranges((arguments, keywords)))
            frame.first_op = _next_op()
            if self._open:
                self._open[-1].inner.append(frame)
            elif self.top is None:
                self.top = frame
            self._open.append(frame)

        return began

    def _ended(self, module: Any, arguments: Any, output: Any) -> None:
        if self.over or not self._open:
            return
        frame = self._open.pop()
        frame.last_op = _next_op()
        frame.outputs = ranges(output)


def _next_op() -> int:
    import torch

    return int(torch._C._autograd._get_sequence_nr())


def origin(frame: Frame) -> Origin | None:
    """The first place from which non-finite values reached the output of ``frame``; None if that is finite.

    What a later module made finite again does not count: masks of minus infinity are taken in by a softmax.
    """
    if bad(frame.outputs) is None:
        return None
    suspect: Origin | None = None
    last: Frame | None = None
    for inner in frame.inner:
        taken_in = bad(inner.inputs) is not None
        if bad(inner.outputs) is None:
            if taken_in:
                suspect = None
        elif suspect is None:
            suspect = Origin(frame, after=last, before=inner) if taken_in else _inside(inner, last)
        last = inner
    return suspect or Origin(frame, after=last)


def _inside(inner: Frame, last: Frame | None) -> Origin:
    found = origin(inner)
    assert found is not None, "its output is not finite"
    if found.after is None and found.before is None:
        found.after = last
    return found


def frame_of(op: int, top: Frame) -> Frame:
    """The innermost module call during which autograd recorded this operation."""
    inside = [frame for frame in top.walk() if frame.first_op <= op < frame.last_op]
    return max(inside, key=lambda frame: frame.depth, default=top)


# --------------------------------------------------------------------------------------------------
# The backward pass of a replayed call, operation by operation: where gradients stop being finite.


@dataclass(frozen=True, slots=True)
class BadOperation:
    """The first operation whose incoming gradients are finite and whose outgoing ones are not."""

    name: str
    """``sqrt``, ``native_layer_norm``."""
    number: int
    """As autograd counts operations in the forward pass."""
    reached: list[Range]
    """Gradients that arrived at its output."""
    made: list[Range]
    """Gradients that it made for its inputs."""


def trace_backward(
    outputs: Sequence[Any], gradients: Sequence[Any], leaves: Sequence[Any], tick: Callable[[], None]
) -> tuple[BadOperation | None, bool]:
    """Differentiate again without touching any ``.grad``; ``(first bad operation, whether a leaf got a bad gradient)``.

    :param outputs: tensors with the graph of the replayed forward pass.
    :param gradients: what came back to each of them in the step.
    :param leaves: tensors to differentiate with respect to.
    """
    import torch

    found: list[BadOperation] = []
    handles = [node.register_hook(_watch(node, found, tick)) for node in _nodes(outputs)]
    try:
        made = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    hit = any(bool((~torch.isfinite(_values(g))).any()) for g in made if g is not None and is_real(g))
    return (found[0] if found else None), hit


def _nodes(outputs: Sequence[Any]) -> list[Any]:
    """All operations behind these tensors, each once."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    nodes = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        waiting += [after for after, _ in node.next_functions if after is not None]
    return nodes


def _watch(node: Any, found: list[BadOperation], tick: Callable[[], None]) -> Callable[[Any, Any], None]:
    name, number = node.name(), node._sequence_nr()

    def look(made: Any, reached: Any) -> None:
        if found:
            return
        tick()
        out = [range_of(g, f"[{i}]") for i, g in enumerate(made) if g is not None and is_real(g)]
        if bad(out) is None:
            return
        came = [range_of(g, f"[{i}]") for i, g in enumerate(reached) if g is not None and is_real(g)]
        if bad(came) is None:
            found.append(BadOperation(_plain(name), number, came, out))

    return look


def _plain(name: str) -> str:
    """``SqrtBackward0`` -> ``sqrt``, ``NativeLayerNormBackward0`` -> ``native_layer_norm``."""
    stem = name.split("::")[-1].rstrip("0123456789").removesuffix("Backward")
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(stem))


def _values(gradient: Any) -> Any:
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return gradient.coalesce().values() if gradient.is_sparse else gradient


# --------------------------------------------------------------------------------------------------
# Make a call of the model again, and leave the training as it was.
#
# Put back afterwards: random number generators, buffers (batch norm's running statistics), modes, attributes
# of modules, ``.grad``. The parameters are only read. What a forward pass appends to lists of its own, or
# writes elsewhere, is not put back.


class CannotReplay(Exception):
    """Why, in words."""


class OutOfTime(BaseException):
    """Time is up. No ``except Exception`` of a forward pass swallows it."""


class Deadline:
    """:meth:`tick` raises :class:`OutOfTime` after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def tick(self) -> None:
        if time.monotonic() > self._ends:
            raise OutOfTime


class Replayed:
    """What was seen of one call."""

    def __init__(self, top: Frame) -> None:
        self.top = top
        self.arrived: Any = None
        """First gradient that came back to the output not finite, as it was kept."""
        self.operation: BadOperation | None = None
        self.came_again = True
        """False where the output was not finite in the step and is now."""
        self.backward = ""
        """Why the backward pass was not replayed; empty if it was."""


def original(module: Any) -> Any:
    """The module inside ``torch.compile``'s, DDP's and DataParallel's wrappers."""
    for _ in range(8):
        kind = type(module).__name__
        if kind == "OptimizedModule":
            module = module._orig_mod
        elif kind in ("DistributedDataParallel", "DataParallel"):
            module = module.module
        else:
            break
    return module


def replay(call: Call, names: dict[int, str], tick: Callable[[], None]) -> Replayed:
    """Run the call forward and, if all stays finite, backward. Raises :class:`CannotReplay`, :class:`OutOfTime`."""
    import torch

    outer = call.module()
    if outer is None:
        raise CannotReplay("the module that was called is gone")
    if call.overwritten:
        raise CannotReplay("the script has written the next batch over this one already")
    root = original(outer)
    _refuse_shards(root)
    with contextlib.ExitStack() as around:
        around.enter_context(_untouched(root, call.training))
        around.enter_context(torch.enable_grad())
        around.enter_context(torch.compiler.set_stance("force_eager"))
        for kind, dtype in call.autocast.items():
            around.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        if _ranks() > 1:
            around.enter_context(_no_collectives())
        trace = around.enter_context(ForwardTrace(root, names, tick))
        call.random.restore()
        try:
            output = root(*call.arguments, **call.keywords)
        except torch.OutOfMemoryError as error:
            raise CannotReplay("there is no memory left for another forward pass") from error
        except CannotReplay:
            raise
        except Exception as error:
            raise CannotReplay(f"its forward pass raised {type(error).__name__}: {_line(error)}") from error
        trace.over = True
        assert trace.top is not None
        seen = Replayed(trace.top)
        if not any(one.bad for one in trace.top.outputs):
            seen.came_again = all(bool(finite) for finite in call.finite.values())
            if seen.came_again:
                _backward(call, output, root, seen, tick)
        return seen


def _backward(call: Call, output: Any, root: Any, seen: Replayed, tick: Callable[[], None]) -> None:
    """Differentiate from the gradients that came back to the outputs in the step.

    Where one output is computed from another, what came back to the inner one is counted twice. That
    changes the size of gradients, not where they stop being finite.
    """
    import torch

    numbered = [tensor for _, tensor in tensors(output)]
    kept = [(numbered[i], g) for i, g in sorted(call.gradients.items()) if i < len(numbered)]
    kept = [(tensor, g) for tensor, g in kept if tensor.requires_grad and tensor.shape == g.shape]
    if not kept:
        seen.backward = (
            f"the gradients of its output take {call.left_out / 2**20:.0f} MiB and were not kept (option keep_mib)"
            if call.left_out
            else "no gradient came back to its output"
        )
        return
    seen.arrived = next((g for _, g in kept if not bool(torch.isfinite(g).all())), None)
    if seen.arrived is not None:
        return
    inputs = [t for _, t in tensors((call.arguments, call.keywords)) if t.requires_grad]
    leaves = [*(p for p in root.parameters() if p.requires_grad), *inputs]
    try:
        operation, hit = trace_backward([t for t, _ in kept], [g for _, g in kept], leaves, tick)
    except torch.OutOfMemoryError:
        seen.backward = "there was no memory for it"
    except RuntimeError as error:
        seen.backward = f"it raised {type(error).__name__}: {_line(error)}"
    else:
        seen.operation = operation if hit else None


@contextlib.contextmanager
def _untouched(root: Any, training: bool) -> Iterator[None]:
    """Give the modules copies of their buffers and put back all that a forward pass sets on them."""
    now = RandomState.now()
    modules = list(root.modules())
    attributes = [(module, dict(vars(module))) for module in modules]
    buffers = [(module, dict(module._buffers)) for module in modules]
    copies: dict[int, Any] = {}
    try:
        for module, held in buffers:
            for name, buffer in held.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            if vars(module).get("_compiled_call_impl") is not None:
                module._compiled_call_impl = None
        if root.training is not training:
            root.train(training)
        yield
    finally:
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)
        for module, held in attributes:
            vars(module).clear()
            vars(module).update(held)
        now.restore()


def _refuse_shards(root: Any) -> None:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in root.modules()):
        raise CannotReplay("the model is sharded (FSDP): a forward pass needs all ranks")
    if any(hasattr(parameter, "to_local") for parameter in root.parameters()):
        raise CannotReplay("the model is sharded (DTensor): a forward pass needs all ranks")


def _ranks() -> int:
    import torch

    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def _no_collectives() -> Any:
    """A mode in which operations between ranks are refused: the others do not take part."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Alone(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if "c10d" in function.namespace:
                raise CannotReplay(f"its forward pass communicates with other ranks ({function})")
            return function(*arguments, **(keywords or {}))

    return Alone()


def nonfinite_weights(root: Any, names: dict[int, str]) -> list[tuple[str, int, int]]:
    """``(name, values not finite, values)`` of the parameters that hold any."""
    import torch

    named = [(name, p) for name, p in root.named_parameters() if is_real(p) and p.numel()]
    if not named:
        return []
    with torch.no_grad():
        by_device: dict[Any, list[int]] = {}
        for i, (_, p) in enumerate(named):
            by_device.setdefault(p.device, []).append(i)
        counts: dict[int, int] = {}
        for places in by_device.values():
            sums = [(~torch.isfinite(named[i][1].detach())).sum() for i in places]
            counts |= dict(zip(places, torch.stack(sums).tolist(), strict=True))
    return [(names.get(id(p), name), counts[i], p.numel()) for i, (name, p) in enumerate(named) if counts[i]]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
