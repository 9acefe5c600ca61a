"""Which names of ours a file uses that are not promised to last."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import healthcheck
from healthcheck import testing

PROMISED = {"healthcheck": set(healthcheck.__all__) | {"testing"}, "healthcheck.testing": set(testing.__all__)}


def private_uses(source: str, more: Mapping[str, set[str]] | None = None) -> list[str]:
    """What a file imports from us, or takes from ``healthcheck.``, that is no public name; ``more``: module -> names."""
    promised = PROMISED | dict(more or {})
    nodes = list(ast.walk(ast.parse(source)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found = [name for name in modules if name.split(".")[0] == "healthcheck" and name not in promised]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "healthcheck":
            names = {alias.name for alias in node.names} - promised.get(node.module or "", set())
            found += sorted(f"{node.module}.{name}" for name in names)
        elif isinstance(node, ast.Attribute) and "healthcheck" in modules and _is_us(node.value):
            found += [] if node.attr in promised["healthcheck"] else [f"healthcheck.{node.attr}"]
    return found


def _is_us(node: ast.expr) -> bool:
    """Whether it is the package: where a file imports it; else ``healthcheck`` may be the pytest fixture."""
    return isinstance(node, ast.Name) and node.id == "healthcheck"
