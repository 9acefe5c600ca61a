"""What one test asks for: its marker, the command line, the ini file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.dispatch import suggest
from healthcheck.pytesting.failure import HealthCheckFailed

if TYPE_CHECKING:
    import pytest

MARKER = "healthcheck"


@dataclass(slots=True)
class Wanted:
    """Arguments of ``@pytest.mark.healthcheck``; unset ones come from the command line, then the ini file."""

    rules: Any = None
    """Path (from the test's folder, else the root folder), pack, dict, YAML text, or a list of these."""
    profile: str | None = None
    fail_on: str | None = None
    max_steps: int | None = None
    """Training ends after so many steps."""
    observe: bool = False
    off: Sequence[str] = ()
    only: Sequence[str] = ()
    set: Sequence[str] = ()
    mute: Sequence[str] = ()
    plugins: Sequence[str] = ()
    metrics: Sequence[str] = ()
    """Metrics to collect for ``healthcheck.series`` beside those that rules ask for."""
    settings: dict[str, Any] = field(default_factory=dict)
    reference: Any = None
    """Measures to compare with the reference file; see :mod:`healthcheck.pytesting.reference`."""


def wanted_by(item: pytest.Item) -> Wanted:
    """The options of one test. Raises ``HealthCheckFailed`` for a marker that cannot be read."""
    given: dict[str, Any] = {}
    for mark in reversed(list(item.iter_markers(MARKER))):  # the closest wins
        if mark.args:
            raise HealthCheckFailed(
                f"@pytest.mark.healthcheck takes keywords only, not {mark.args[0]!r}; write rules={mark.args[0]!r}"
            )
        given |= mark.kwargs
    known = Wanted.__dataclass_fields__
    for name in given:
        if name not in known:
            hint = suggest(name, known)
            raise HealthCheckFailed(
                f'@pytest.mark.healthcheck has no argument "{name}"; {hint + " " if hint else ""}there are: {", ".join(known)}'
            )
    wanted = Wanted(**given)
    config = item.config
    if wanted.rules is not None:
        wanted.rules = _near(wanted.rules, [item.path.parent, config.rootpath])
    elif config.getoption("healthcheck_rules"):
        wanted.rules = _near(config.getoption("healthcheck_rules"), [config.invocation_params.dir])
    elif config.getini("healthcheck_rules"):
        wanted.rules = _near(config.getini("healthcheck_rules"), [config.rootpath])
    for name in ("profile", "fail_on"):
        if getattr(wanted, name) is None:
            setattr(
                wanted, name, config.getoption(f"healthcheck_{name}") or config.getini(f"healthcheck_{name}") or None
            )
    wanted.plugins = [*config.getoption("healthcheck_plugin"), *_listed(wanted.plugins)]
    for name in ("off", "only", "set", "mute", "metrics"):
        setattr(wanted, name, _listed(getattr(wanted, name)))
    return wanted


def runs_setting(config: pytest.Config) -> dict[str, Any]:
    """Where records of tests go: ``HEALTHCHECK_RUNS``, else pytest's cache folder, which git ignores already."""
    cache = getattr(config, "cache", None)
    if os.environ.get("HEALTHCHECK_RUNS") or cache is None:
        return {}
    return {"runs": str(cache.mkdir("healthcheck")), "keep": 100}


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _near(rules: Any, folders: Sequence[Path]) -> Any:
    """Relative paths as those files that exist beside the test, else below the root."""
    if isinstance(rules, (list, tuple)):
        return [_near(entry, folders) for entry in rules]
    if isinstance(rules, Path) or (isinstance(rules, str) and rules.endswith((".yaml", ".yml")) and "\n" not in rules):
        for folder in folders:
            if (folder / rules).is_file():
                return str(folder / rules)
    return str(rules) if isinstance(rules, Path) else rules
