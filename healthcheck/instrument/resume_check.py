"""Whether it is the same run that goes on after a resume, and loads of a state dict that change nothing."""

from __future__ import annotations

import math
import statistics
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.places import place_of
from healthcheck.probes.copies import signature

if TYPE_CHECKING:
    from healthcheck.instrument.machine import StepMachine
    from healthcheck.run.session import Session


def seen_loads(
    original: Callable[..., Any],
    watching: Callable[[], StepMachine | None],
    note: Callable[[StepMachine, Any], None],
) -> Callable[..., Any]:
    """``Module.load_state_dict`` that shows loads that fitted nowhere, and those of a module's own weights.

    :param watching: whom they are shown to; None while nobody watches.
    :param note: is called with every module that was loaded.
    """

    def load_state_dict(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        machine = watching()
        if machine is not None and machine.started:
            guarded(machine.session, _own_loaded, machine, module, state_dict)
        result = original(module, state_dict, *args, **kwargs)
        machine = watching()
        if machine is not None:
            guarded(machine.session, _loaded, machine, module, state_dict, result)
            guarded(machine.session, note, machine, module)
        return result

    return load_state_dict


def _loaded(machine: StepMachine, module: Any, state: Any, result: Any) -> None:
    """With ``strict=False`` torch returns the names that it could not place, and goes on."""
    machine.session.facts.loaded.add(module)
    missing, unexpected = getattr(result, "missing_keys", ()), getattr(result, "unexpected_keys", ())
    if missing and unexpected and len(unexpected) == len(state):
        words = f"{len(state):,} names like {unexpected[0]}, where {missing[0]} was wanted"
        machine.session.facts.loads.unmatched.append((weakref.ref(module), words))
        machine.session.facts.places.note_call("load", place_of(sys._getframe()))


LOOKED_AT = 8
"""Parameters that are compared with what is loaded into them, at even distances; and loads that wait to be said."""


def _own_loaded(machine: StepMachine, module: Any, state: Any) -> None:
    """``state_dict()`` hands out the tensors themselves: kept without a copy, they are trained on."""
    own = [(name, p) for name, p in module.named_parameters() if p.numel()]
    few = own[:: max(1, len(own) // LOOKED_AT)]
    if not few or not all(_same_memory(state.get(name), p) for name, p in few):
        return
    loads, modules = machine.session.facts.loads, [m for _, m in machine.view.named_modules()]
    words = f"{type(module).__name__}, {len(own):,} tensors"
    if any(m is module for m in modules):
        known = loads.own
    elif signature(module) in map(signature, modules):
        known = loads.copies
        machine.session.facts.loaded_themselves.add(module)
    else:
        return
    if len(known) < LOOKED_AT:
        known.append(words)
        machine.session.facts.places.note_call("load", place_of(sys._getframe()))


def _same_memory(value: Any, parameter: Any) -> bool:
    if type(getattr(value, "data", None)) is not type(parameter.data) or value.device != parameter.device:
        return False
    return value.device.type != "meta" and bool(value.data_ptr() == parameter.data_ptr() != 0)


# --------------------------------------------------------------------------------------------------
# Twenty steps after a resume: is it the same run that goes on?


BEFORE, AFTER = 50, 20
"""Losses compared: the median of so many before the checkpoint with that of the first ones after it."""
WORSE = 1.2
"""Loss after / before from which it is worth a look; the bound of the rule ``checkpoint-not-restored.loss-jump``."""
SETTLED = 2
"""Steps after a fault's step at which its values have certainly been judged."""


def normal_of(session: Session, optimizers: Iterable[Any]) -> dict[str, Any]:
    """What a resumed run is compared with: ``loss`` (median), ``lr``, ``scale``, ``optimizer_state``.

    Only host values that were judged already; None for what was not measured.
    """
    return {
        "loss": _loss(session, BEFORE),
        "lr": _last(session, "lr"),
        "scale": _last(session, "amp.scale"),
        "optimizer_state": any(remembers(optimizer) for optimizer in optimizers),
    }


def remembers(optimizer: Any) -> bool:
    """Whether an optimizer holds moments: after a load it does before its first step."""
    states = getattr(optimizer, "state", None) or {}
    return any(
        name != "step" and value is not None
        for state in states.values()
        if isinstance(state, Mapping)
        for name, value in state.items()
    )


class ResumeCheck:
    """Says once how the resumed run compares, and once that it got past the fault.

    :param step: the step after which the run goes on.
    :param normal: :func:`normal_of` at the checkpoint.
    :param stop: rule and step of the fault that ended the run before.
    """

    def __init__(self, session: Session, step: int, normal: Mapping[str, Any], stop: tuple[str, int] | None) -> None:
        self._session = session
        self._step = step
        self._normal = normal
        self._stop = stop if stop is not None and stop[1] > step else None
        self._optimizer_state: bool | None = None
        self._compared = False
        self._removers: list[Callable[[], None]] = []

    def listen(self) -> None:
        self._removers = [
            self._session.on("before_update", self._first_update),
            self._session.on("step_end", self._step_ends),
        ]

    def _first_update(self, event: Any) -> None:
        if self._optimizer_state is None:
            self._optimizer_state = remembers(event.optimizer)

    def _step_ends(self, event: Any) -> None:
        session = self._session
        if not self._compared and event.step > self._step + AFTER:  # the step before has been judged
            self._compared = True
            session.note(f"  resume check after {AFTER} steps: {self._comparison()}")
        if self._stop is not None and event.step >= self._stop[1] + SETTLED:
            rule, step = self._stop
            self._stop = None
            if not any(alert.rule == rule for alert in session.alerts):
                session.note(f"  step {step:,} passed without the fault ({rule})")
        if self._compared and self._stop is None:
            while self._removers:
                self._removers.pop()()

    def _comparison(self) -> str:
        doubts, parts = [], []
        loss, before = _loss(self._session, AFTER, self._step), self._normal.get("loss")
        if loss is not None and before is not None:
            parts.append(f"loss {loss:.3g} (was {before:.3g})")
            if before > 0 and loss > WORSE * before:
                doubts.append("the loss is higher than it was")
        for name, metric in (("lr", "lr"), ("loss scale", "amp.scale")):
            now, was = _last(self._session, metric), self._normal.get("scale" if metric == "amp.scale" else metric)
            if now is not None and was is not None:
                same = "same" if math.isclose(now, was, rel_tol=1e-6) else f"was {was:.6g}"
                parts.append(f"{name} {now:.6g} ({same})")
        if self._normal.get("optimizer_state") and self._optimizer_state is not None:
            parts.append(f"optimizer state {'present' if self._optimizer_state else 'MISSING'}")
            if not self._optimizer_state:
                doubts.append("the optimizer began without its moments: load its state_dict too")
        if not parts:
            return "nothing to compare"
        return f"{', '.join(parts)}: {'; '.join(doubts) or 'ok'}"


def _loss(session: Session, n: int, after: int = 0) -> float | None:
    values = [float(v) for s, v in session.history("loss") if s > after and math.isfinite(v)]
    chosen = values[:n] if after else values[-n:]
    return statistics.median(chosen) if chosen else None


def _last(session: Session, metric: str) -> float | None:
    values = session.history(metric, 1)
    return float(values[0][1]) if values and math.isfinite(values[0][1]) else None
