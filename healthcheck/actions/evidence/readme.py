"""The text that goes with a bundle: what is in it, how to read it, what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from healthcheck.protocols import ActionContext
from healthcheck.verdicts import Alert

_CONTENTS = """
Contents of the batch: batch/index.json names file, shape and dtype of each tensor.
    import json, torch
    entry = json.load(open("batch/index.json"))[0]
    dtype = getattr(torch, entry["dtype"])      # bool was written as uint8
    tensor = torch.frombuffer(bytearray(open(entry["file"], "rb").read()), dtype=dtype).reshape(entry["shape"])
"""


def readme(alert: Alert, context: ActionContext, files: Mapping[str, str], left_out: Sequence[str]) -> str:
    """Plain text for the person who opens the folder, perhaps on a machine without torch."""
    lines = [
        f"Evidence of alert {alert.number}: {alert.rule}",
        "",
        f"{alert.message}" if alert.message else f"{alert.rule} fired",
        f"Fired at step {alert.fired_step:,}, seen at step {alert.detected_step:,}, rank {alert.rank}.",
    ]
    if context.before_update:
        lines.append("Weights and gradients were read before the update of that step.")
    elif context.event is not None:
        lines.append("Weights and gradients were read after the update of that step, unless it was skipped.")
    for name, value in alert.facts.items():
        lines.append(f"{name}: {value}")
    if alert.hint:
        lines += ["", f"To try: {alert.hint}"]
    lines += ["", "Files", *(f"  {name:<18} {what}" for name, what in files.items() if not name.startswith("batch/"))]
    if any(name.startswith("batch/") for name in files):
        lines.append(_CONTENTS.rstrip())
    if left_out:
        lines += ["", "Not here", *(f"  {entry}" for entry in left_out)]
    lines += [
        "",
        "Norms are L2 norms over the finite elements, nan where there are none. RNG states belong to the moment of the alert, after the batch was",
        "drawn. Nothing here needs unpickling; the environment is an allow-list and secrets in the command line are replaced.",
        "",
    ]
    return "\n".join(lines)
