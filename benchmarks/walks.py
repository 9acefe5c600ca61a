"""Walks through the package, counted: how many of our functions and files a reader passes.

python benchmarks/walks.py            # a table: the key `for:`
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import healthcheck
from healthcheck.assembly import plugin_host
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.merge import Draft, Entry
from healthcheck.rulelang.rule import Hold

WRITTEN, COMPILED = "3 of 5", Hold(3, 5)
RULE = f"version: 1\nrules:\n  spike: {{metric: loss, when: {{above: 5}}, for: {WRITTEN}}}\n"
ROOT = os.path.dirname(healthcheck.__file__) + os.sep


def functions_of_for() -> list[tuple[str, str]]:
    """Functions that have the value of ``for:`` in their hands on its way from a file to the engine: (file, name).

    A one-rule file is compiled under ``sys.setprofile``. A function counts if an argument or its result is the
    value (what PyYAML read, the text, the compiled form), or the key or rule that it stands in (see
    :func:`_carries`); whole files and rule sets, in which it is one value among all others, do not. The walk ends
    where the compiled ``Rule`` is made, which is what the engine gets.
    """
    registry = plugin_host().registry
    found: dict[tuple[str, str], None] = {}
    arrived = False

    def profile(frame: FrameType, event: str, result: Any) -> None:
        nonlocal arrived
        code = frame.f_code
        if event == "call" and frame.f_locals.get("hold") == COMPILED and "key_origins" in frame.f_locals:
            arrived = arrived or code.co_name == "__init__"
        if arrived or not code.co_filename.startswith(ROOT):
            return
        if event == "call":
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals.get(name) for name in given]
        elif event == "return":
            values = [result]
        else:
            return
        if any(map(_carries, values)):
            name = getattr(code, "co_qualname", code.co_name)  # qualified from Python 3.11 on
            found[code.co_filename[len(ROOT) :], name] = None

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yaml"
        path.write_text(RULE, encoding="utf-8")
        sys.setprofile(profile)
        try:
            load_rules(path, registry=registry)
        finally:
            sys.setprofile(None)
    assert arrived
    return list(found)


def _carries(thing: Any) -> bool:
    """Whether a thing is the value of ``for:``, or the key, map or draft of a rule with it."""
    if isinstance(thing, (tuple, list)):
        return any(map(_carries, thing))
    if isinstance(thing, Draft):
        thing = thing.entries
    if isinstance(thing, Mapping):
        thing = thing.get("for")
    if isinstance(thing, Entry):
        return _carries(thing.value)
    if type(thing).__module__.startswith("yaml."):  # an event or node of PyYAML
        thing = getattr(thing, "value", None)
    return thing in (WRITTEN, COMPILED)


def main() -> None:
    walk = functions_of_for()
    files = dict.fromkeys(file for file, _ in walk)
    print(f"for:  {len(walk)} functions in {len(files)} files before the engine")
    for file in files:
        print(f"  {file}: {', '.join(name for place, name in walk if place == file)}")


if __name__ == "__main__":
    main()
