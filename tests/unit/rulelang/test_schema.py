"""The schema: one shipped draft-07 file that says all that editors show."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import healthcheck.rulelang
from healthcheck.core.protocols import ConditionType
from healthcheck.extend.host import PluginHost
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.schema import FILE, build_schema, dump_schema, shipped_schema

SHIPPED = Path(healthcheck.rulelang.__file__).parent / FILE


def built_ins() -> Registry:
    from healthcheck.assembly import BUILTINS

    host = PluginHost()
    host.load_builtins(importlib.import_module(name) for name in BUILTINS)
    return host.registry


def test_the_shipped_file_is_what_the_built_ins_declare() -> None:
    """After a change: HEALTHCHECK_UPDATE_GOLDEN=1 pytest tests/unit/rulelang/test_schema.py"""
    text = dump_schema(build_schema(built_ins()))
    if os.environ.get("HEALTHCHECK_UPDATE_GOLDEN", "") not in ("", "0"):
        SHIPPED.write_text(text, encoding="utf-8")
    assert SHIPPED.read_text(encoding="utf-8") == text


def test_it_is_a_valid_draft_07_schema_without_remote_references() -> None:
    from jsonschema import Draft7Validator

    schema = shipped_schema()
    Draft7Validator.check_schema(schema)
    assert schema["$schema"].startswith("http://json-schema.org/draft-07")
    for reference in _values(schema, "$ref"):
        assert reference.startswith("#/definitions/")
        assert reference.rpartition("/")[2] in schema["definitions"]


def test_one_of_is_never_used() -> None:
    """`oneOf` answers a typo with "not valid under any of the given schemas"."""
    assert list(_values(shipped_schema(), "oneOf")) == []
    assert list(_values(shipped_schema(), "anyOf")) == []


def test_every_key_that_a_person_may_write_has_a_description() -> None:
    schema = shipped_schema()
    bare = []
    for where, properties in _properties(schema, ""):
        bare += [f"{where}.{name}" for name, sub in properties.items() if not sub.get("description")]
    assert bare == []


def test_a_plugins_condition_and_action_are_merged_in() -> None:
    registry = built_ins()
    registry.adder("conditions", "acme")(ConditionType("acme.odd", {"type": "object"}, lambda o, r: None, help="Odd."))

    class Page:
        """Call somebody."""

        name = "acme.page"
        stage = "observe"
        options_schema: ClassVar[dict[str, Any]] = {"properties": {"who": {"type": "string"}}}

        def run(self, alert: Any, context: Any) -> Any: ...

    registry.adder("actions", "acme")(Page())
    definitions = build_schema(registry)["definitions"]
    assert definitions["condition"]["properties"]["acme.odd"]["description"] == "Odd."
    assert set(definitions["action"]["properties"]["acme.page"]["properties"]) == {"who", "after"}
    assert "acme.page" in definitions["actionName"]["enum"]


def test_the_schema_alone_accepts_every_good_file() -> None:
    """What the editor underlines and what `check` refuses must be the same."""
    from jsonschema import Draft7Validator
    from language import registry

    from healthcheck.rulelang.loader import load_file

    validator = Draft7Validator(build_schema(registry()))
    good = sorted((Path(__file__).parents[2] / "rulefile" / "good").glob("*.yaml"))
    assert good
    for path in good:
        assert [e.message for e in validator.iter_errors(load_file(path).data)] == [], path.name


def _values(node: Any, key: str) -> Iterator[Any]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, (str, list)):
                yield value
            yield from _values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)


def _properties(node: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "properties" and isinstance(value, dict):
                yield where, value
            yield from _properties(value, f"{where}/{name}")


@pytest.mark.parametrize("word", ["condition", "rule", "settings", "profile", "mute"])
def test_unknown_keys_are_closed_off_everywhere(word) -> None:
    assert shipped_schema()["definitions"][word]["additionalProperties"] is False
