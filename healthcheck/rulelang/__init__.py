"""Rule files -> compiled rules. Needs neither torch nor a running training.

Start with :func:`healthcheck.rulelang.compile.load_rules`; what comes out is described in
:mod:`healthcheck.rulelang.rule`. PyYAML and jsonschema are imported only when a file is read.
"""

from __future__ import annotations
