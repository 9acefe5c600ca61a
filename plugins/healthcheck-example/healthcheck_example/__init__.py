"""What healthcheck sees of healthcheck-example: one function for each kind of thing that it adds.

Each is called once, when the plugin is loaded. Nothing here may import torch at module level:
`healthcheck check` asks for metrics on machines that do not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from healthcheck import Action, ConditionType, Probe, Reader, Report, hookimpl

from healthcheck_example.action import Touch
from healthcheck_example.condition import GROWN
from healthcheck_example.probe import WeightNorm
from healthcheck_example.reader import LogReader
from healthcheck_example.report import TableReport

PACKS = Path(__file__).parent / "packs"


@hookimpl
def healthcheck_register_probes(register: Callable[[Probe], None]) -> None:
    """Metric ``healthcheck_example.weight_norm``."""
    register(WeightNorm())


@hookimpl
def healthcheck_register_conditions(register: Callable[[ConditionType], None]) -> None:
    """Condition ``when: {healthcheck_example.grown: 10}``."""
    register(GROWN)


@hookimpl
def healthcheck_register_actions(register: Callable[[Action], None]) -> None:
    """Action ``then: [{healthcheck_example.touch: {path: FILE}}]``."""
    register(Touch())


@hookimpl
def healthcheck_register_reports(register: Callable[[Report], None]) -> None:
    """Kind of report ``--report healthcheck_example.table=FILE``."""
    register(TableReport())


@hookimpl
def healthcheck_register_readers(register: Callable[[Reader], None]) -> None:
    """Recorded runs whose first line is ``# healthcheck_example log``."""
    register(LogReader())


@hookimpl
def healthcheck_register_rulepacks(register: Callable[[str, str], None]) -> None:
    """Pack ``extends: ["healthcheck_example:starter"]``."""
    register("starter", str(PACKS / "starter.yaml"))
