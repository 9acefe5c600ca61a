"""A backend that nobody here has tried: no memory is told, and nothing raises."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from healthcheck.probes.catalog import availability
from healthcheck.probes.memory import MemoryProbe
from healthcheck.probes.memory_readings import TorchDevice


class Elsewhere(TorchDevice):
    """As on a machine whose accelerator torch knows by a name of its own."""

    @property
    def kind(self) -> str:
        return "elsewhere"


def test_its_memory_is_no_data_and_not_that_of_the_process() -> None:
    device = Elsewhere()
    assert device.statistics() == {}
    assert device.capacity_bytes() is None
    device.release_cached()


def test_the_table_says_so() -> None:
    told = {m.key: availability(m, "other backend") for m in MemoryProbe.provides}
    assert {key: text for key, text in told.items() if not key.startswith(("memory.host", "memory.live"))} == {
        key: "no data" for key in told if not key.startswith(("memory.host", "memory.live"))
    }
