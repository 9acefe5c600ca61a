"""Readings of a card become samples; a stand-in takes the driver's place (see ``standin.py``)."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from healthcheck.testing import FakeTrainer, check_plugin, open_test_session, play

import healthcheck_nvml
from healthcheck_nvml import Plugin
from healthcheck_nvml.probe import NvmlProbe
from healthcheck_nvml.watcher import Watcher

_spec = importlib.util.spec_from_file_location("nvml_standin", Path(__file__).parent / "standin.py")
assert _spec is not None
assert _spec.loader is not None
standin = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(standin)
Driver, NVMLError, card, cuda, usual = (
    standin.Driver, standin.NVMLError, standin.card, standin.cuda, standin.usual
)  # fmt: skip


class TestPlugin(Plugin):
    """The plugin over a stand-in of the driver."""

    __test__ = False

    def __init__(self, driver: Any) -> None:
        self.probe = NvmlProbe(lambda: driver)


def watch(driver: Any, torch: Any, *names: str, rounds: int = 2, every: float = 0.01) -> Watcher:
    watcher = Watcher([f"nvml.{name}" for name in names], every, torch, lambda: driver).start()
    waited(lambda: watcher.rounds >= rounds or watcher.reason)
    watcher.stop()
    return watcher


def waited(until: Callable[[], Any]) -> None:
    limit = time.monotonic() + 10
    while not until():
        assert time.monotonic() < limit, "nothing was read"
        time.sleep(0.005)


def taken(watcher: Watcher) -> dict[tuple[int, str], float]:
    return {(device, name.removeprefix("nvml.")): value for device, name, value in watcher.take()}


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, "nvml") == []
    assert healthcheck_nvml.PACK.is_file()


# --- which card


def test_a_card_is_found_by_its_uuid_whatever_its_index() -> None:
    driver = Driver(card("GPU-aaaa-1", **usual(temperature=30)), card("GPU-bbbb-2", **usual(temperature=70)))
    watcher = watch(driver, cuda({"uuid": "bbbb-2"}), "temperature")
    assert taken(watcher) == {(0, "temperature"): 70.0}


def test_without_a_uuid_the_address_on_the_bus_counts() -> None:
    driver = Driver(card("GPU-a", "00000000:17:00.0"), card("GPU-b", "00000000:B3:00.0", **usual(temperature=66)))
    watcher = watch(driver, cuda({"pci": (0, 0xB3, 0)}), "temperature")
    assert taken(watcher) == {(0, "temperature"): 66.0}


def test_a_mig_instance_has_its_own_memory_and_the_heat_of_its_card() -> None:
    part = card("MIG-c0de-1", parent="GPU-aaaa-1", memory=5 * 2**30)
    driver = Driver(card("GPU-aaaa-1", **usual(temperature=71)), part)
    watcher = watch(driver, cuda({"uuid": "c0de-1"}), "temperature", "memory_used")
    assert taken(watcher) == {(0, "temperature"): 71.0, (0, "memory_used"): 5.0 * 2**30}


def test_all_cards_on_which_the_process_holds_memory_are_read_and_no_others() -> None:
    driver = Driver(*(card(f"GPU-{n}a", **usual(temperature=50 + n)) for n in range(3)))
    torch = cuda({"uuid": "0a", "memory": 0}, {"uuid": "1a"}, {"uuid": "2a"}, current=2)
    assert taken(watch(driver, torch, "temperature")) == {(0, "temperature"): 52.0, (1, "temperature"): 51.0}


def test_a_card_that_nvml_does_not_show_is_no_other_card() -> None:
    watcher = watch(Driver(card("GPU-aaaa-1", **usual())), cuda({"uuid": "ffff-9"}), "temperature")
    assert "NVML does not show CUDA device 0 (ffff-9" in watcher.reason
    assert watcher.take() == []


# --- readings


def test_readings_have_the_units_that_their_metrics_say() -> None:
    driver = Driver(card("GPU-1", **usual(reasons=0x20)))
    names = ("power", "clock_sm", "clock_share", "utilization", "throttled_thermal", "throttled_hardware", "energy")
    found = taken(watch(driver, cuda({"uuid": "1"}), *names))
    assert found == {
        (0, "power"): 512.0,
        (0, "clock_sm"): 1755.0,
        (0, "clock_share"): pytest.approx(1755 / 1980),
        (0, "utilization"): pytest.approx(0.97),
        (0, "throttled_thermal"): 1.0,
        (0, "throttled_hardware"): 0.0,
        (0, "energy"): 0.0,
    }


def test_several_readings_become_their_mean_their_highest_or_their_last() -> None:
    heat, power = iter([60, 80, 70, *[70] * 99]), iter([100_000, 300_000, *[200_000] * 99])
    energy = iter(range(5_000_000, 9_000_000, 1000))
    readings = usual(temperature=lambda: next(heat), power=lambda: next(power), energy=lambda: next(energy))
    watcher = watch(Driver(card("GPU-1", **readings)), cuda({"uuid": "1"}), "temperature", "power", "energy", rounds=3)
    found = taken(watcher)
    assert found[0, "temperature"] == 80.0
    assert found[0, "power"] == pytest.approx(200.0)
    assert found[0, "energy"] == watcher.rounds - 1  # joules since the first reading
    assert watcher.take() == []


def test_a_reading_that_the_card_does_not_give_is_missing_by_itself_and_asked_for_once() -> None:
    driver = Driver(card("GPU-1", temperature=50, reasons=NVMLError(4)))
    watcher = watch(driver, cuda({"uuid": "1"}), "temperature", "power", "throttled_thermal", rounds=4)
    assert taken(watcher) == {(0, "temperature"): 50.0}
    assert watcher.missing == {
        "nvml.power": "the card does not give it: Not Supported",
        "nvml.throttled_thermal": "the card does not give it: Insufficient Permissions",
    }
    assert driver.calls.count("power") == 1


def test_an_error_that_may_pass_leaves_out_one_reading_only() -> None:
    answers = iter([NVMLError(999), 40, *[40] * 99])

    def power() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer * 1000

    watcher = watch(Driver(card("GPU-1", **usual(power=power))), cuda({"uuid": "1"}), "power", rounds=3)
    assert taken(watcher) == {(0, "power"): 40.0}
    assert watcher.missing == {}


def test_memory_of_neighbours_is_not_available_where_this_process_is_not_listed() -> None:
    mine = usual()["processes"]
    shared = Driver(card("GPU-1", **usual(processes=[*mine, (1, 7 * 2**30)])))
    assert taken(watch(shared, cuda({"uuid": "1"}), "memory_others")) == {(0, "memory_others"): 7.0 * 2**30}
    container = Driver(card("GPU-1", **usual(processes=[(4242, 2**30)])))
    watcher = watch(container, cuda({"uuid": "1"}), "memory_others")
    assert "does not list this process" in watcher.missing["nvml.memory_others"]


def test_xid_errors_of_the_card_are_counted_and_those_of_programs_are_not() -> None:
    driver = Driver(card("GPU-1", **usual()))
    driver.xids = [45, 79]
    watcher = watch(driver, cuda({"uuid": "1"}), "xid")
    assert taken(watcher) == {(0, "xid"): 1.0}
    assert watcher.last_xid == 79


def test_errors_of_all_links_are_added_up_since_the_first_reading() -> None:
    fields = {("field", 91): 2, ("field", (161, 0)): 5, ("field", (161, 1)): 7, ("field", (163, 1)): 1}
    made = card("GPU-1", **usual())
    made["readings"] |= fields
    watcher = Watcher(["nvml.nvlink_errors"], 0.01, cuda({"uuid": "1"}), lambda: Driver(made)).start()
    waited(lambda: watcher.rounds >= 2)
    made["readings"]["field", (161, 0)] = 9
    waited(lambda: any(value == 4.0 for _, _, value in watcher.take()))
    watcher.stop()


def test_the_driver_is_given_back_at_the_end() -> None:
    driver = Driver(card("GPU-1", **usual()))
    watch(driver, cuda({"uuid": "1"}), "temperature")
    waited(lambda: driver.closed == 1)


# --- in a session


def trained(
    monkeypatch: pytest.MonkeyPatch, driver: Any, torch: Any, rules: Any = "nvml:cards", steps: int = 60, *, local: Path
) -> dict[str, Any]:
    """A run of some steps, each as long as three readings."""
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    plugin = TestPlugin(driver)
    monkeypatch.setattr(healthcheck_nvml, "Plugin", lambda: plugin)
    monkeypatch.setenv("HEALTHCHECK_NVML_EVERY", "0.05")
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "nvml")
    session = open_test_session(rules, plugins=[str(local)])
    trainer = FakeTrainer(session)
    for _ in range(steps):
        trainer.train_step(1.0)
        if plugin.probe.watcher is not None and not plugin.probe.watcher.reason:
            rounds = plugin.probe.watcher.rounds
            waited(lambda r=rounds: plugin.probe.watcher.rounds > r or plugin.probe.watcher.reason)  # type: ignore[misc]
    report: dict[str, Any] = trainer.finish()
    return report


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The plugin as ``-p nvml.py`` loads it: the same whether its distribution is installed or not."""
    path = tmp_path / "nvml.py"
    path.write_text(
        "import healthcheck_nvml\nfrom healthcheck import hookimpl\n_plugin = healthcheck_nvml.Plugin()\n"
        + "".join(f"{name} = _plugin.{name}\n" for name in dir(Plugin) if name.startswith("healthcheck_"))
    )
    return path


def test_a_hot_card_is_one_alert_and_a_card_at_work_is_none(monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    hot = Driver(card("GPU-1", **usual(reasons=0x40 | 0x08, temperature=90)))
    report = trained(monkeypatch, hot, cuda({"uuid": "1"}), steps=15, local=local)
    assert [(alert["rule"], alert["cause"]) for alert in report["alerts"]] == [("gpu-throttled", "hardware")]
    fine = trained(
        monkeypatch, Driver(card("GPU-1", **usual(reasons=0x04))), cuda({"uuid": "1"}), steps=15, local=local
    )
    assert fine["alerts"] == []
    assert {fine["rules"][rule]["verdict"] for rule in ("gpu-throttled", "gpu-xid", "gpu-shared")} == {"ok"}


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (cuda(), "no NVIDIA GPU in use"),
        (cuda({"uuid": "9"}), "NVML does not show CUDA device 0"),
    ],
)
def test_without_a_card_the_pack_does_not_apply_and_says_why(
    monkeypatch: pytest.MonkeyPatch, local: Path, torch: Any, reason: str
) -> None:
    report = trained(monkeypatch, Driver(), torch, steps=6, local=local)
    verdicts = {entry["verdict"] for rule, entry in report["rules"].items() if rule.startswith("gpu-")}
    assert verdicts == {"does not apply"}
    assert reason in report["rules"]["gpu-xid"]["reason"]


def test_a_reading_that_is_missing_takes_its_rule_with_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch, local: Path
) -> None:
    container = Driver(card("GPU-1", **usual(events=NVMLError(3))))
    report = trained(monkeypatch, container, cuda({"uuid": "1"}), steps=15, local=local)
    assert report["rules"]["gpu-xid"]["verdict"] == "does not apply"
    assert report["rules"]["gpu-xid"]["reason"] == "the card does not give it: Not Supported"
    assert report["rules"]["gpu-shared"]["verdict"] == "ok"


def test_no_rule_no_thread(monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    driver = Driver(card("GPU-1", **usual()))
    rules = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"above": 5}}}}
    trained(monkeypatch, driver, cuda({"uuid": "1"}), rules, steps=3, local=local)
    assert driver.calls == []


# --- the pack


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        ({"nvml.ecc_uncorrected": "0 x5, 1 x3"}, {"gpu-memory-errors": [6], "gpu-memory-errors.uncorrected": [6]}),
        ({"nvml.remap_pending": "0 x3, 1 x3"}, {"gpu-memory-errors": [4], "gpu-memory-errors.remap-pending": [4]}),
        ({"nvml.xid": "0 x5, 1 x3"}, {"gpu-xid": [6]}),
        ({"nvml.throttled_thermal": "0 x20, 1 x20"}, {"gpu-throttled": [26], "gpu-throttled.thermal": [26]}),
        ({"nvml.throttled_thermal": "0 x20, 1 x3, 0 x30"}, {}),
        ({"nvml.throttled_power": "1 x100"}, {}),
        ({"nvml.utilization": "0.02 x80"}, {"gpu-idle": [60]}),
        ({"nvml.utilization": "0.0 x20, 0.95 x80"}, {}),
        ({"nvml.nvlink_errors": "0 x5, 3, 7, 12 x40"}, {}),
        ({"nvml.nvlink_errors": "0 x5, 150, 400"}, {"gpu-link-errors": [6], "gpu-link-errors.nvlink": [6]}),
        ({"nvml.ecc_uncorrected": "0 x50", "nvml.xid": "0 x50", "nvml.memory_others": "1e6 x50"}, {}),
    ],
)
def test_the_rules_fire_at_faults_and_not_at_their_healthy_twins(
    series: dict[str, str], fires: dict[str, list[int]], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", "nvml")
    assert play("nvml:cards", series, plugins=[str(local)]).fired == fires
