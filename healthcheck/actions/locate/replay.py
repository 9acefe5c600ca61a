"""Make a call of the model again, and leave the training as it was.

Put back afterwards: random number generators, buffers (batch norm's running statistics), modes, attributes
of modules, ``.grad``. The parameters are only read. What a forward pass appends to lists of its own, or
writes elsewhere, is not put back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from healthcheck.actions.locate.backward import BadOperation, trace_backward
from healthcheck.actions.locate.calls import Call
from healthcheck.actions.locate.forward import ForwardTrace, Frame
from healthcheck.actions.locate.ranges import is_real, tensors
from healthcheck.actions.locate.rng import RandomState


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
                raise CannotReplay(f"its forward pass speaks to other ranks ({function})")
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
