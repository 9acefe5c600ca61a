"""``healthcheck plugins``: what is loaded, from where, and what each one adds; ``plugins new NAME`` writes one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healthcheck import __version__
from healthcheck.assembly import not_loaded_for_reading, plugin_host
from healthcheck.cli.options import add_format, add_plugin_option, print_json
from healthcheck.core.errors import UsageError
from healthcheck.extend.host import PluginHost, PluginInfo, plugin_name
from healthcheck.extend.registry import BUILTIN
from healthcheck.reports.tables import table_lines

NAME = "plugins"
HELP = "list loaded plugins and what each adds"

# The order in which a reader of the page for plugin authors meets them.
KINDS = (
    "probes",
    "metrics",
    "conditions",
    "actions",
    "reports",
    "readers",
    "packs",
    "trainers",
    "commands",
    "settings",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "healthcheck plugins [options]\n       healthcheck plugins new NAME [--dir FOLDER]"
    parser.add_argument("words", nargs="*", metavar="new NAME", help="write a new plugin with its tests")
    parser.add_argument(
        "--dir", default=".", metavar="FOLDER", help="where `new` makes the plugin's folder (default: here)"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also names of the built-ins, and each plugin's hooks"
    )
    add_plugin_option(parser)
    parser.add_argument("--strict-plugins", action="store_true", help="exit with 3 if a plugin was not loaded")
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    if args.words:
        return _new(args.words, args.dir)
    host, waiting = plugin_host(args.plugins), not_loaded_for_reading(args.plugins)
    if args.format == "json":
        print_json(_as_json(host) | {"configured": waiting})
    else:
        print("\n".join(_as_text(host, waiting, verbose=args.verbose)))
    return 3 if args.strict_plugins and host.failures else 0


def _new(words: list[str], parent: str) -> int:
    if words[0] != "new" or len(words) != 2:
        hint = f"; did you mean: healthcheck plugins new {words[0]}" if len(words) == 1 and words[0] != "new" else ""
        raise UsageError(f"healthcheck plugins: to write a plugin: healthcheck plugins new NAME{hint}")
    from healthcheck.cli.newplugin import package_name, write_plugin

    folder = write_plugin(words[1], Path(parent))
    print(
        f"{folder}: a plugin with a metric, a condition, an action, a rule pack, a report and a reader, each with a test"
    )
    print(f"  try it:      cd {folder} && pytest")
    print(
        f"  install it:  pip install -e {folder} && healthcheck plugins      (its name there: {package_name(words[1])})"
    )
    return 0


def added(host: PluginHost, owner: str) -> dict[str, list[str]]:
    """What one owner registered, by kind, in the usual order."""
    found = host.registry.of(owner)
    return {kind: sorted(found[kind]) for kind in KINDS if found.get(kind)}


def _others(host: PluginHost) -> list[PluginInfo]:
    return [info for info in host.infos if info.source != "built in"]


def _as_text(host: PluginHost, waiting: Sequence[str], *, verbose: bool) -> list[str]:
    built_in = added(host, BUILTIN)
    lines = [f"built in (healthcheck {__version__})"]
    if verbose:
        lines += _kinds(built_in)
    else:
        lines.append("  " + ", ".join(f"{len(names)} {kind}" for kind, names in built_in.items()) + "   (names: -v)")
    for info in _others(host):
        lines.append(f"{info.name}   {info.source}")
        adds = added(host, info.name)
        lines += _kinds(adds)
        # What it registers stands above by name; the rest of its hooks listen to the run.
        loop = [hook for hook in info.hooks if not hook.startswith("register_") and hook != "add_commands"]
        if loop:
            lines.append(f"  listens to: {', '.join(loop)}")
        elif not adds:
            lines.append("  adds nothing")
        if verbose and info.hooks:
            lines.append(f"  hooks: {', '.join(info.hooks)}")
    for where in waiting:
        lines.append(f"{plugin_name(where)}   {where} (pyproject.toml)")
        lines.append("  loads where code of this folder runs: run, test, pytest; here with -p")
    if not _others(host) and not host.failures and not waiting:
        lines.append("no other plugins; a local one: -p tools/my_plugin.py")
    for failure in host.failures:
        lines.append(f"NOT LOADED {failure.name}   {failure.source}")
        lines.append(f"  {failure.reason}")
    return lines


def _kinds(adds: dict[str, list[str]]) -> list[str]:
    return table_lines([f"{kind}:", ", ".join(names)] for kind, names in adds.items())


def _as_json(host: PluginHost) -> dict[str, Any]:
    return {
        "version": __version__,
        "built_in": added(host, BUILTIN),
        "plugins": [
            {"name": i.name, "source": i.source, "hooks": list(i.hooks), "adds": added(host, i.name)}
            for i in _others(host)
        ],
        "failures": [{"name": f.name, "source": f.source, "reason": f.reason} for f in host.failures],
    }
