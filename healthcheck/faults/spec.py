"""Which faults there are, and how they are written: ``nan-grad@120``, ``spike@120..125``, ``hang@120:45s``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from healthcheck.core.errors import UsageError
from healthcheck.core.text import suggest
from healthcheck.rulelang.quantities import QuantityError, duration_or_none, parse_quantity

FOREVER = 2**63


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    name: str
    help: str
    length: int = 1
    """Steps that it lasts unless a number is given; ``FOREVER`` to the end of the run."""
    amount: float = 0.0
    """What ``:AMOUNT`` changes: a factor, seconds or bytes; 0 where there is nothing to change."""
    unit: str = ""
    """``s``, ``bytes`` or ``x`` (a factor), for the help and the reading of the amount."""


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("nan-loss", "the loss is NaN"),
        Kind("nan-grad", "one gradient element is NaN after the backward pass"),
        Kind("nan-weight", "one weight is NaN after the update"),
        Kind("nan-input", "one element of the model's input is NaN"),
        Kind("spike", "the loss is 100 times what it was", length=3, amount=100.0, unit="x"),
        Kind("slow-divergence", "the loss grows by 1 % a step", length=FOREVER, amount=1.01, unit="x"),
        Kind("freeze", "one tensor stops moving", length=FOREVER),
        Kind("lr-zero", "the learning rate is 0", length=FOREVER),
        Kind("no-zero-grad", "zero_grad() does nothing, gradients pile up", length=FOREVER),
        Kind("leak", "tensors are kept, 4 MiB a step", length=FOREVER, amount=4 * 2.0**20, unit="bytes"),
        Kind("slow-data", "each batch comes 0.2 s late", length=FOREVER, amount=0.2, unit="s"),
        Kind("hang", "the step does not end for 10 minutes", amount=600.0, unit="s"),
        Kind("scaler-overflow", "gradients overflow under a GradScaler", length=40),
    )
}

_SPEC = re.compile(r"(?P<name>[a-z-]+)@(?P<first>[\d_,]+)(?:\.\.(?P<last>[\d_,]+))?(?::(?P<amount>\S+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one run: in steps ``first`` to ``last``, counted from 1."""

    kind: str
    first: int
    last: int
    amount: float = 0.0

    def covers(self, step: int) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        return f"{self.kind}@{self.first}"


def fault(kind: str, step: int, *, last: int | None = None, amount: float | None = None) -> Fault:
    """A fault from its parts.

    Raises ``UsageError`` for an unknown kind (with a suggestion) or a step below 1.
    """
    known = KINDS.get(kind)
    if known is None:
        hint = suggest(kind, KINDS)
        raise UsageError(f'there is no fault "{kind}"; {hint + " " if hint else ""}there are: {", ".join(KINDS)}')
    if step < 1:
        raise UsageError(f"{kind}@{step}: steps count from 1")
    if last is None:
        last = FOREVER if known.length == FOREVER else step + known.length - 1
    if last < step:
        raise UsageError(f"{kind}@{step}..{last}: the last step comes before the first")
    if amount is not None and not known.amount:
        raise UsageError(f"{kind} takes no amount")
    return Fault(kind, step, last, known.amount if amount is None else amount)


def parse_fault(text: str) -> Fault:
    """``nan-grad@120``, ``spike@120..125``, ``spike@120:50``, ``hang@120:45s``, ``leak@1:16MiB``.

    Raises ``UsageError``.
    """
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        known = suggest(text.split("@")[0], KINDS)
        raise UsageError(
            f"{text!r} is not a fault and a step; write for instance nan-grad@120" + (f" ({known})" if known else "")
        )
    amount = None
    if found["amount"] is not None:
        amount = _amount(found["name"], found["amount"])
    last = _step(found["last"]) if found["last"] else None
    return fault(found["name"], _step(found["first"]), last=last, amount=amount)


def parse_faults(given: Iterable[str], *, option: str) -> list[Fault]:
    """All faults of a command line; raises ``UsageError`` with all mistakes."""
    faults, wrong = [], []
    for text in given:
        try:
            faults.append(parse_fault(text))
        except UsageError as error:
            wrong.append(f"{option}: {error}")
    if wrong:
        raise UsageError("\n".join(wrong))
    return faults


def _step(text: str) -> int:
    return int(re.sub(r"[_,]", "", text) or 0)


def _amount(name: str, text: str) -> float:
    unit = KINDS[name].unit if name in KINDS else ""
    try:
        seconds = duration_or_none(text) if unit == "s" else None
        value = seconds if seconds is not None else parse_quantity(text.removesuffix("x") if unit == "x" else text)
    except QuantityError as error:
        raise UsageError(f"{name}: {error}") from None
    if value <= 0:
        raise UsageError(f"{name}: {text} must be above 0")
    return float(value)
