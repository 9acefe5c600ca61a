"""A whole plugin: copy this folder, rename it, and replace the parts one by one.

The functions below are all that healthcheck sees. Each is called once, when the plugin is
loaded, and registers one thing; the things themselves have a file each. Nothing here imports
torch, because ``healthcheck check`` asks for metrics on machines that do not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from healthcheck import hookimpl
from healthcheck.protocols import Action, ConditionType, Probe
from healthcheck_example.action import Touch
from healthcheck_example.condition import GROWN
from healthcheck_example.probe import WeightNorm

PACKS = Path(__file__).parent / "packs"


@hookimpl
def healthcheck_register_probes(register: Callable[[Probe], None]) -> None:
    """Metric ``example.weight_norm``."""
    register(WeightNorm())


@hookimpl
def healthcheck_register_conditions(register: Callable[[ConditionType], None]) -> None:
    """Condition ``when: {example.grown: 10}``."""
    register(GROWN)


@hookimpl
def healthcheck_register_actions(register: Callable[[Action], None]) -> None:
    """Action ``then: [{example.touch: {path: FILE}}]``."""
    register(Touch())


@hookimpl
def healthcheck_register_rulepacks(register: Callable[[str, str], None]) -> None:
    """Pack ``extends: [example:weights]``."""
    register("weights", str(PACKS / "weights.yaml"))
