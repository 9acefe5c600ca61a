"""``healthcheck plugins new NAME``: write a distribution whose tests pass at once.

The files beside this module are its templates: ``@NAME@`` is the distribution, ``@PACKAGE@`` the
package, which is also the plugin's name and the prefix of all that it adds.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from healthcheck import __version__
from healthcheck.core.errors import UsageError
from healthcheck.extend.registry import BUILTIN

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"


def package_name(name: str) -> str:
    """``acme-health`` -> ``acme_health``. Raises ``UsageError`` for a name that cannot be one."""
    package = re.sub(r"[-.]+", "_", name).lower()
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*", name):
        raise UsageError(
            f'"{name}" is no name for a distribution: letters, digits and single dashes, such as acme-health'
        )
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or package in (BUILTIN, "torch", "pytest"):
        raise UsageError(
            f'"{name}" would be imported as {package}, which is taken; choose another name, such as {name}-health'
        )
    return package


def plugin_files(name: str) -> dict[str, str]:
    """The files of the distribution ``name``: path in its folder -> text. Raises ``UsageError`` for a bad name."""
    values = {"@NAME@": name, "@PACKAGE@": package_name(name), "@VERSION@": __version__}
    files = {}
    for template in sorted(TEMPLATES.rglob(f"*{SUFFIX}")):
        path = template.relative_to(TEMPLATES).as_posix().removesuffix(SUFFIX).replace("PACKAGE", values["@PACKAGE@"])
        files[path] = _filled(template.read_text(encoding="utf-8"), values)
    return files


def write_plugin(name: str, parent: Path) -> Path:
    """Write the folder ``parent/name``; returns it.

    Raises ``UsageError`` for a bad name, a folder that exists, or a place that cannot be written.
    """
    files = plugin_files(name)
    folder = parent / name
    if folder.exists():
        raise UsageError(f"{folder} exists already; nothing was written")
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} could not be written: {error.strerror}") from None
    return folder


def _filled(text: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text
