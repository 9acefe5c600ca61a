"""Plugins for commands that look at rules: those that could not be loaded are said once, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from healthcheck.plugins import PluginHost


def loaded_host(plugins: Sequence[str]) -> PluginHost:
    """Built-ins, installed plugins and local ones; a failed one costs a line, not the command."""
    from healthcheck.assembly import plugin_host

    host = plugin_host(plugins)
    for failure in host.failures:
        print(f"healthcheck: {failure}", file=sys.stderr)
    return host
