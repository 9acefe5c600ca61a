"""Gradients where Megatron keeps them: in ``main_grad`` buffers, not on ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from healthcheck.events import Event, EventKind, ModelView

if TYPE_CHECKING:
    from healthcheck.session import Session


class _WithMainGrad:
    """A parameter as probes see it, with its buffer as its gradient (often of a wider type than its own)."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Any:
        buffer = getattr(self._parameter, "main_grad", None)
        return buffer if buffer is not None else self._parameter.grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)


class MainGradView:
    """Implements :class:`healthcheck.events.ModelView` over another one, with gradients from ``main_grad``.

    Read after the update, where clipping has been applied in place; on one rank, the buffer of a
    distributed optimizer holds reduced values for this rank's own part only.
    """

    def __init__(self, view: ModelView) -> None:
        self._view = view
        self._known: dict[int, _WithMainGrad] = {}

    def named_parameters(self) -> Sequence[tuple[str, Any]]:
        named = self._view.named_parameters()
        if len(self._known) > len(named):
            self._known.clear()
        return [(name, self._known.setdefault(id(p), _WithMainGrad(p))) for name, p in named]

    def named_modules(self) -> Sequence[tuple[str, Any]]:
        return self._view.named_modules()

    def optimizers(self) -> Sequence[Any]:
        return ()

    @property
    def has_gradients(self) -> bool:
        return any(p.requires_grad and p.grad is not None for _, p in self.named_parameters())


def show_gradients(session: Session, view: MainGradView, step: int, norm: Any, limit: float | None) -> None:
    """Gradients are still in their buffers after the update: one late look at them."""
    if session.wants(EventKind.BACKWARD_END) and view.has_gradients:
        session.emit(Event(EventKind.BACKWARD_END, step, model=view, grad_norm=norm, max_norm=limit))
