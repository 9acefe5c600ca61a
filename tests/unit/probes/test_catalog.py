"""What the probes declare: names, uniqueness, the table, and that torch stays out."""

from __future__ import annotations

import re
import subprocess
import sys

from healthcheck.extend.registry import Registry
from healthcheck.probes import PROBES, healthcheck_register_probes
from healthcheck.probes.catalog import metrics_table


def test_all_built_in_probes_register_through_the_public_hook() -> None:
    registry = Registry()
    healthcheck_register_probes(registry.adder("probes", "healthcheck"))
    assert len(registry.probes) == len(PROBES)
    assert {"loss", "grad_norm", "grad_norm[]", "lr", "time.step", "memory.host", "heartbeat"} <= set(registry.metrics)


def test_every_session_gets_its_own_probes() -> None:
    first, second = Registry(), Registry()
    for registry in (first, second):
        healthcheck_register_probes(registry.adder("probes", "healthcheck"))
    assert not {id(p) for p in first.probes.values()} & {id(p) for p in second.probes.values()}


def test_importing_the_probes_does_not_import_torch() -> None:
    """``healthcheck check`` reads what probes provide on machines without torch."""
    code = "import sys, healthcheck.probes, healthcheck.device.mailbox as m, healthcheck.probes.catalog; "
    code += "[p() for p in healthcheck.probes.PROBES]; m.StepMailbox(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_lists_every_metric_once_with_its_help() -> None:
    probes = [probe() for probe in PROBES]
    text, page = metrics_table(probes), metrics_table(probes, markdown=True)
    for probe in probes:
        for metric in probe.provides:
            name = metric.name + (f"[{','.join(metric.labels)}]" if metric.labels else "")
            assert len(re.findall(rf"^  {re.escape(name)}(?= )", text, re.M)) == 1, name
            assert page.count(f"| `{name}` |") == 1, name
            assert metric.help in text
            assert metric.help.endswith("."), name


def test_costs_and_needs_are_part_of_the_table() -> None:
    table = metrics_table([probe() for probe in PROBES])
    assert re.search(r"^  grad_norm\[parameter\] +device ", table, re.M)
    assert re.search(r"^  amp\.scale +device +amp ", table, re.M)
