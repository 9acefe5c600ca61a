"""Every toy fault and control, ours and the shared ones, run as a user would run it, scored from its report.json.

A fault is found if a cause that answers for one of its detectors fires in the stated range, and
nothing above info fires before the fault begins; a control is passed if nothing above info fires.
Index i of faults.yaml is step i + 1. Which causes answer for which word: ``detectors.yaml``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.alerts import Kind

HERE = Path(__file__).resolve().parent
OWN = HERE / "own" / "faults.yaml"
SHARED = HERE.parents[2] / "shared" / "faults"
"""Not part of the repository; where it is missing, only our own set runs."""
SEEDS = tuple(int(seed) for seed in os.environ.get("HEALTHCHECK_TEST_SEEDS", "0").split(","))
"""Seed 0 in every run of the suite; `make faults` takes 0, 1 and 2."""
WIDE = "HEALTHCHECK_TEST_SEEDS" in os.environ
"""Whether the wide set runs, too: scripts of ours of which the suite can do without."""
FALSE_ALARMS: dict[str, str] = {}
"""Healthy scripts of ours that our rules still complain of."""
OF_THE_MACHINE = ("throughput", "memory")
"""Fault classes that depend on what else the machine does; such a script gets a second chance."""

pytestmark = pytest.mark.slow


def entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / "faults.yaml"
    if not path.exists():
        return []
    listed = yaml.safe_load(path.read_text())["entries"]
    return [{**entry, "folder": folder} for entry in listed if WIDE or not entry.get("wide")]


def lookalikes() -> list[dict[str, Any]]:
    """Healthy scripts that resemble a fault; what each is, its first line says."""
    return [
        {"id": path.stem, "script": path.name, "kind": "control", "folder": path.parent, "looks_like": "a fault"}
        for path in sorted((HERE / "lookalikes").glob("**/*.py" if WIDE else "*.py"))
    ]


ENTRIES = [*entries(SHARED), *entries(HERE / "own"), *lookalikes()]
DETECTORS: dict[str, list[str]] = yaml.safe_load((HERE / "detectors.yaml").read_text())


@dataclass(frozen=True)
class Fired:
    """One cause above info, of an alert or beside its first one."""

    rule: str
    cause: str
    index: int

    def answers_for(self, words: list[str]) -> bool:
        return any({self.rule, f"{self.rule}.{self.cause}"} & set(DETECTORS[word]) for word in words)


def causes(alert: dict[str, Any]) -> list[Fired]:
    """All causes of one alert above info, each with the step at which it fired."""
    first = {"cause": alert.get("cause", ""), "fired_step": alert.get("cause_step", alert["fired_step"])}
    found = [{**first, "severity": alert["severity"]}, *alert.get("also", ())]
    return [Fired(alert["rule"], f["cause"], f["fired_step"] - 1) for f in found if f["severity"] != "info"]


def watch(
    run: Callable[..., Any], entry: dict[str, Any], seed: int, folder: Path
) -> tuple[list[Fired], dict[str, Any]]:
    """Run one script under the default rules; its alerts above info and the whole report."""
    report_file = folder / "report.json"
    done = run("run", "--report", f"json={report_file}", entry["folder"] / entry["script"], "--seed", seed, timeout=600)
    assert report_file.exists(), f"no report; exit {done.returncode}\n{done.stderr[-3000:]}"
    report = json.loads(report_file.read_text())
    assert report["exit_code"] == done.returncode, done.stderr[-3000:]
    return [fired for alert in report["alerts"] for fired in causes(alert)], report


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(entry, seed, id=f"{entry['id']}-seed{seed}")
        for entry in ENTRIES
        if entry["kind"] == kind
        for seed in SEEDS
    ]


@pytest.mark.parametrize(("entry", "seed"), cases("fault"))
def test_a_fault_is_found_in_its_range_and_not_before(
    entry: dict[str, Any], seed: int, healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    first, last = entry["alarm"]["first"], entry["alarm"]["last"]
    for _ in range(2 if entry.get("fault_class") in OF_THE_MACHINE else 1):
        fired, _report = watch(healthcheck_warm, entry, seed, tmp_path)
        early = [f for f in fired if f.index < entry["healthy_until"]]
        found = [f for f in fired if first <= f.index <= last and f.answers_for(entry["detectors"])]
        if found and not early:
            break
    assert not early, f"false alarm before {entry['healthy_until']}: {early}"
    if not found and "missed" in entry:
        pytest.xfail(f"known miss: {entry['missed']}")
    assert found, f"expected one of {entry['detectors']} in {first}..{last}; fired: {fired}"


@pytest.mark.parametrize(("entry", "seed"), cases("control"))
def test_a_healthy_script_that_looks_suspicious_stays_quiet(
    entry: dict[str, Any], seed: int, healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    fired, report = watch(healthcheck_warm, entry, seed, tmp_path)
    if fired and entry["id"] in FALSE_ALARMS:
        pytest.xfail(f"known false alarm: {FALSE_ALARMS[entry['id']]}")
    assert not fired, f"{entry['id']} looks like {entry['looks_like']}"
    assert report["exit_code"] == 0
    # An info may stand there: on a busy machine even a look at a toy takes its part of the time.
    assert report["verdict"] == ("warned" if report["alerts"] else "ok")


def test_every_detector_word_is_mapped() -> None:
    words = {word for entry in ENTRIES for word in entry.get("detectors", ())}
    assert words <= set(DETECTORS)


def test_every_detector_names_causes_that_exist() -> None:
    known = load_rules_for(host=plugin_host(), rules="healthcheck:strict")
    names = {rule.id for rule in known.rules} | {cause.id for cause in known.causes}
    assert {name for listed in DETECTORS.values() for name in listed} <= names


def test_a_fact_that_is_listed_with_a_twin_is_what_its_fault_is_expected_to_set_off() -> None:
    facts = {c.id for c in load_rules_for(host=plugin_host(), rules="healthcheck:strict").causes if c.kind is Kind.FACT}
    twins = yaml.safe_load((HERE.parents[1] / "benchmarks" / "twins.yaml").read_text())
    listed = {entry["script"]: entry["detectors"] for entry in yaml.safe_load(OWN.read_text())["entries"]}
    assert set(twins) <= facts
    for cause, (fault, twin) in twins.items():
        names = {name for word in listed[Path(fault).name] for name in DETECTORS[word]}
        assert {cause, cause.partition(".")[0]} & names, f"{fault} is not expected to set off {cause}"
        assert (HERE / fault).is_file()
        assert (HERE / twin).is_file()


def test_every_script_of_ours_is_run() -> None:
    listed = [entry["script"] for entry in yaml.safe_load(OWN.read_text())["entries"]]
    assert sorted(path.name for path in (HERE / "own").glob("*.py")) == sorted(listed)
