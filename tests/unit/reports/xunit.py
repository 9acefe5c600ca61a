"""Validates a document against ``xunit.xsd``: as much of XML Schema as that file uses, and no more."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

XS = "{http://www.w3.org/2001/XMLSchema}"
SCHEMA = ET.parse(Path(__file__).with_name("xunit.xsd")).getroot()
ELEMENTS = {element.attrib["name"]: element for element in SCHEMA.findall(f"{XS}element")}
PATTERNS = {
    kind.attrib["name"]: kind.find(f".//{XS}pattern").attrib["value"]  # type: ignore[union-attr]
    for kind in SCHEMA.findall(f"{XS}simpleType")
}


def mistakes(text: str) -> list[str]:
    """Everything that the schema does not allow; empty for a valid document."""
    root = ET.fromstring(text)
    if root.tag not in ("testsuites", "testsuite"):
        return [f"the root is {root.tag}"]
    return list(_element(root, root.tag))


def _element(element: ET.Element, where: str):
    known = ELEMENTS.get(element.tag)
    if known is None:
        yield f"{where}: no such element"
        return
    if known.get("type") == "xs:string":
        if len(element) or element.attrib:
            yield f"{where}: text only"
        return
    kind = known.find(f"{XS}complexType")
    assert kind is not None
    attributes = {a.attrib["name"]: a for a in kind.findall(f"{XS}attribute")}
    for name, value in element.attrib.items():
        if name not in attributes:
            yield f"{where}: no attribute {name}"
        elif attributes[name].attrib["type"] in PATTERNS and not re.fullmatch(
            PATTERNS[attributes[name].attrib["type"]], value
        ):
            yield f"{where}: {name}={value!r}"
    for name, attribute in attributes.items():
        if attribute.get("use") == "required" and name not in element.attrib:
            yield f"{where}: {name} is missing"
    allowed = {child.attrib["ref"] for child in kind.iter(f"{XS}element")}
    text = (element.text or "") + "".join(child.tail or "" for child in element)
    if kind.get("mixed") != "true" and text.strip():
        yield f"{where}: text {text.strip()[:20]!r}"
    for child in element:
        if child.tag not in allowed:
            yield f"{where}: {child.tag} is not allowed here"
        yield from _element(child, f"{where}/{child.tag}")
