"""A stand-in for traincheck: the marks that its evaluation wrote into programs, without effect."""

import sys
import types

instrumentor = types.ModuleType("traincheck.instrumentor")
tracer = types.ModuleType("traincheck.instrumentor.tracer")
instrumentor.meta_vars = {}  # type: ignore[attr-defined]
instrumentor.tracer = tracer  # type: ignore[attr-defined]
tracer.Instrumentor = object  # type: ignore[attr-defined]
tracer.DISABLE_WRAPPER = False  # type: ignore[attr-defined]
sys.modules["traincheck.instrumentor"] = instrumentor
sys.modules["traincheck.instrumentor.tracer"] = tracer


def annotate_stage(*args: object) -> None: ...
