"""Tests that need a CUDA or ROCm device: skipped without one, marked ``gpu``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def watch() -> Iterator[Callable[..., Any]]:
    """``healthcheck.watch`` without console and record, closed at the end; its own errors fail the test."""
    import healthcheck

    loops: list[Any] = []

    def start(*given: Any, **options: Any) -> Any:
        loop = healthcheck.watch(*given, console=False, record=False, **options)
        loops.append(loop)
        return loop

    yield start
    for loop in loops:
        loop.close()
        assert [e["error"] + e.get("traceback", "") for e in loop.session.internal_errors] == []
        assert [e.to_json() for e in loop.session.dispatch.errors] == []
