"""FSDP2: all-gathers are issued ahead, in the order in which modules really run.

By itself FSDP2 prefetches one module in the backward pass, in the reverse order of the forward pass, and relies on the host
running ahead in the forward pass. Here the order of the first step is recorded, and set with the public
``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``
(https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck import Event, Session, UsageError, hookimpl

FSDP_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "prefetch": {"type": "integer", "minimum": 1, "description": "Modules that are gathered ahead (default 1)."},
        "display": {"type": "boolean", "description": "Print the recorded order (default false)."},
        "unshard_on_step": {
            "type": "boolean",
            "description": "Begin to gather the root when a batch has come, before the forward pass (default false).",
        },
        "allocate_memory_from_process_group_for_comm": {
            "type": "boolean",
            "description": "Have buffers of collectives allocated by the process group (default false; NCCL only).",
        },
    },
}


class FSDPPrefetch:
    """Record the order of one step, set prefetching by it, watch whether it stays, and undo all at the end.

    :param prefetch: how many modules are gathered ahead. 1 overlaps as FSDP2 does by itself, but is issued earlier; more need
        the memory of so many unsharded modules.
    :param display: print the order.
    :param unshard_on_step: begin to gather the root as soon as a batch has come.
    :param allocate_memory_from_process_group_for_comm: as FSDP2's method of that name.
    :param models: modules to look for FSDP modules in; by default those whose forward pass comes first.

    Values do not change: the same collectives run earlier. Raises ``UsageError`` for ``prefetch`` below 1.
    """

    name = "performance-fsdp"

    def __init__(
        self,
        prefetch: int = 1,
        display: bool = False,
        *,
        unshard_on_step: bool = False,
        allocate_memory_from_process_group_for_comm: bool = False,
        models: Iterable[Any] = (),
    ) -> None:
        if prefetch < 1:
            raise UsageError(f"prefetch must be at least 1, got {prefetch}")
        self.prefetch, self.display = prefetch, display
        self.unshard_on_step = unshard_on_step
        self.allocates = allocate_memory_from_process_group_for_comm
        self.models = list(models)
        self.names: dict[Any, str] = {}
        """FSDP modules -> their names."""
        self.forward: list[Any] = []
        """The order of the first step; empty before its end."""
        self.backward: list[Any] = []
        self.changed = 0
        """Steps whose order was another one."""
        self.set_up = False
        self._roots: list[Any] = []
        self._now: list[Any] = []
        self._back: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._session: Session | None = None
        self._gathers = False
        """Whether somebody has asked for the roots to be gathered."""

    @hookimpl
    def healthcheck_configure(self, session: Session) -> None:
        self._session = session
        self._undo += [session.on("step_end", self._step_over), session.on("train_end", lambda event: self.undo())]
        if self.unshard_on_step:
            self._undo.append(session.on("batch_ready", lambda event: self.gather()))
        if self.models:
            self._found(self.models)
        else:
            self._look_for_models()

    def _look_for_models(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        handle: Any = register_module_forward_pre_hook(lambda module, args: self._first_call(module, handle))
        self._undo.append(handle.remove)

    def _first_call(self, module: Any, handle: Any) -> None:
        if module.training and self._found([module]):
            handle.remove()  # per-module hooks take over; a compiled region never sees this one
            self._now.extend(root for root in self._roots if root is module)

    def _found(self, models: Sequence[Any]) -> bool:
        from torch.distributed.fsdp import FSDPModule

        for model in models:
            for name, module in model.named_modules():
                if isinstance(module, FSDPModule) and module not in self.names:
                    self.names[module] = _plain(name) or "(root)"
        if not self.names:
            return False
        inner = {id(other) for module in self.names for other in module.modules() if other is not module}
        self._roots = [module for module in self.names if id(module) not in inner]
        for module in self.names:
            if self.allocates:
                module.set_allocate_memory_from_process_group_for_comm(True)
            self._undo.append(module.register_forward_pre_hook(self._hear).remove)
            self._undo.append(module.register_forward_hook(self._hear_output).remove)
        return True

    # -- one step -----------------------------------------------------------------------

    def _hear(self, module: Any, args: Any) -> None:
        if module.training and (not self._now or module is not self._now[-1]):
            self._now.append(module)

    def _hear_output(self, module: Any, args: Any, output: Any) -> None:
        if self.set_up or not module.training:
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, m=module: self._back.append(m))

    def gather(self) -> None:
        """Begin to gather the roots, before their forward pass: for loops that do not show us their batches."""
        self._gathers = True
        for root in self._roots if self.set_up else ():
            root.unshard(async_op=True)

    def _step_over(self, event: Event) -> None:
        order, self._now = _once(self._now), []
        if not order:
            return
        if self.unshard_on_step and not self._gathers and event.step > 1:
            self._gathers = True
            self._say(
                "unshard_on_step has no effect: this loop does not show its batches; call gather() of the tool before each step"
            )
        if not self.set_up:
            self.forward, self.backward = order, _once(self._back)
            self._back = []
            self._set()
        elif order != self.forward:
            self._say_change(order, event.step)

    def _set(self) -> None:
        for order, method in (
            (self.forward, "set_modules_to_forward_prefetch"),
            (self.backward, "set_modules_to_backward_prefetch"),
        ):
            for i, module in enumerate(order):
                # The first fills the window, each of the others adds one to it: nothing is asked for twice.
                ahead = order[1 : 1 + self.prefetch] if i == 0 else order[i + self.prefetch : i + self.prefetch + 1]
                getattr(module, method)(ahead)
        self.set_up = True
        if self.display:
            self._say(self.text())

    def _say_change(self, order: Sequence[Any], step: int) -> None:
        self.changed += 1
        if self._session is not None:
            self._session.log({"performance.fsdp_order_changes": float(self.changed)})
        if self.changed > 1:
            return
        pairs = enumerate(zip(order, self.forward, strict=False))
        at = next((i for i, (a, b) in pairs if a is not b), min(len(order), len(self.forward)))
        now, first = (self.names[o[at]] if at < len(o) else "nothing" for o in (order, self.forward))
        self._say(
            f"FSDP modules run in another order at step {step:,}: place {at + 1} is {now}, in the first step it was {first}; "
            "what is prefetched then is gathered too early or in vain"
        )

    def _say(self, text: str) -> None:
        if self._session is not None:
            for line in text.splitlines():
                self._session.note(line)

    def text(self) -> str:
        """The recorded order, a line for each module."""
        lines = [f"FSDP prefetch {self.prefetch}: {len(self.forward)} modules forward, {len(self.backward)} backward"]
        for title, order in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"  {title}: " + " > ".join(self.names[module] for module in order))
        return "\n".join(lines)

    def undo(self) -> None:
        """Prefetch as FSDP2 does by itself, and hear of nothing any more. Safe to call twice."""
        while self._undo:
            self._undo.pop()()
        if self.set_up:
            self.set_up = False
            for module in self.names:
                module.set_modules_to_forward_prefetch([])
                module.set_modules_to_backward_prefetch([])
                if self.allocates:
                    module.set_allocate_memory_from_process_group_for_comm(False)

    def findings(self) -> dict[str, dict[str, Any]]:
        """For the report."""
        if not self.forward:
            return {}
        rows = [
            {"pass": title, "place": i, "module": self.names[module]}
            for title, order in (("forward", self.forward), ("backward", self.backward))
            for i, module in enumerate(order, start=1)
        ]
        text = self.text().splitlines()[0] + (f"; {self.changed} steps had another order" if self.changed else "")
        return {"performance.fsdp": {"text": text, "rows": rows}}

    @hookimpl
    def healthcheck_performance(
        self, session: Session, performance: dict[str, Any]
    ) -> Mapping[str, Mapping[str, Any]] | None:
        return self.findings()


def _plain(name: str) -> str:
    return ".".join(
        part for part in name.split(".") if part not in ("_orig_mod", "module", "_checkpoint_wrapped_module")
    )


def _once(order: Iterable[Any]) -> list[Any]:
    """Each module at its first place: micro-batches and recomputation run them again."""
    return list(dict.fromkeys(order))


def _tensors(value: Any) -> Iterable[Any]:
    if hasattr(value, "register_hook"):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
