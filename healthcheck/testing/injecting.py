"""The pytest fixture ``inject``: faults in the training of one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from healthcheck.faults.machine import FaultMachine
from healthcheck.faults.spec import fault, parse_fault

if TYPE_CHECKING:
    import pytest


def injector(node: pytest.Item) -> Iterator[Callable[..., None]]:
    """In place from the setup of the test, so that a watch that starts with its body wraps the faults.

    The value takes ``"nan-grad@3"``, or the kind and ``at=3``; further words as in
    :func:`healthcheck.faults.spec.fault` (``last``, ``amount``).
    """
    said: list[str] = []
    machine = FaultMachine(said.append).install()

    def inject(what: str, at: int | None = None, **more: Any) -> None:
        machine.add(parse_fault(what) if at is None and not more else fault(what, at or 1, **more))

    try:
        yield inject
    finally:
        machine.remove()
        said += machine.missed()
        if said:
            node.add_report_section("teardown", "healthcheck inject", "\n".join(said))
