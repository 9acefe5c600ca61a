"""The key ``explains``: known rules only, never itself, never in a circle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from healthcheck.errors import Problem
from healthcheck.rulelang.known import rule_hint
from healthcheck.rulelang.merge import SUGGESTIONS, Merged
from healthcheck.rulelang.quantities import shorten


def check_explains(merged: Merged, problems: list[Problem]) -> None:
    graph: dict[str, list[str]] = {}
    unknown = 0
    for draft in merged.rules.values():
        entry = draft.entries.get("explains")
        for i, other in enumerate(entry.value if entry is not None else ()):
            assert entry is not None
            where = (*entry.where, i)
            if other == draft.id:
                problems.append(entry.document.problem(where, "explains-itself", "a rule cannot explain itself"))
            elif other not in merged.rules:
                unknown += 1
                text = f'"{shorten(other)}" is not a rule'
                hint = rule_hint(other, merged.rules) if unknown < SUGGESTIONS else ""
                problems.append(entry.document.problem(where, "unknown-rule", text, suggestion=hint))
            else:
                graph.setdefault(draft.id, []).append(other)
    for ring in _rings(graph):
        entry = merged.rules[ring[0]].entries["explains"]
        text = f"rules explain each other in a circle: {' -> '.join([*ring, ring[0]])}"
        problems.append(entry.document.problem(entry.where, "explains-cycle", text))


def _rings(graph: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """One ring per cycle found, by depth-first search without recursion."""
    rings: list[list[str]] = []
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack: list[tuple[str, int]] = [(start, 0)]
        while stack:
            node, depth = stack.pop()
            del path[depth:]
            if node in path:
                rings.append(path[path.index(node) :])
                continue
            if node in done:
                continue
            path.append(node)
            following = graph.get(node, ())
            if following:
                stack.extend((other, depth + 1) for other in following)
        done.update(path)
        done.add(start)
    unique = {frozenset(ring): ring for ring in rings}
    return list(unique.values())
