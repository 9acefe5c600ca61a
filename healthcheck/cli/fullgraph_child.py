"""One run of a script for ``healthcheck doctor --fullgraph``: so many steps under a compile test. A process of its own.

python -m healthcheck.cli.fullgraph_child {explain|whole} STEPS OUT.json SCRIPT [ARG...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from healthcheck.cli.doctor_child import EnoughSteps, leave, run_as_main
from healthcheck.instrument.fullgraph import CompileTest, Modules
from healthcheck.probes.compilation import compile_log


def main() -> None:
    mode, steps, out, script, *arguments = sys.argv[1:]
    from torch.optim.optimizer import register_optimizer_step_post_hook

    test = CompileTest(fullgraph=mode == "whole", whole_model=True)
    test.install()
    made = 0

    def stepped(*_: Any) -> None:
        nonlocal made
        made += 1
        if made >= int(steps):
            raise EnoughSteps

    register_optimizer_step_post_hook(stepped)
    failed = ""
    try:
        run_as_main(script, arguments)
    except EnoughSteps:
        pass
    except Exception as error:
        if not type(error).__module__.startswith("torch._dynamo"):
            raise
        failed = str(error)
    log, model = compile_log(), Modules(test.modules)
    content = {
        "steps": made,
        "compiled": test.compiled,
        "chosen": test.chosen,
        "failed": _short(failed),
        "graph_breaks": [
            {"place": one.place(model), "file": one.file, "line": one.line, "reason": one.reason, "change": one.advice}
            for one in log.graph_breaks
        ],
        "recompiles": [
            {"place": one.place(model), "file": one.file, "line": one.line, "guard": one.guard, "change": one.advice}
            for one in log.recompiles
        ],
    }
    Path(out).write_text(json.dumps(content), encoding="utf-8")
    leave()


def _short(text: str) -> str:
    """The first line of Dynamo's message, and the line of the user that it ends with."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = [line for line in lines if line.startswith('File "') and f"{os.sep}torch{os.sep}" not in line]
    return ", ".join([*lines[:1], *places[-1:]])


if __name__ == "__main__":
    main()
