"""The plugin as a local file, for machines on which its distribution is not installed: ``-p as_a_file.py``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from healthcheck_nvml import Plugin

_plugin = Plugin()
for _name in dir(_plugin):
    if _name.startswith("healthcheck_"):
        globals()[_name] = getattr(_plugin, _name)
