"""For `benchmarks/public_scripts.py`: public scripts run short, seeded, and without packages that only draw or log.

PUBLIC_STEPS ends a script, as if it had come to its end, after so many updates.
"""

import dataclasses
import os
import random
import sys
import types
import typing

if os.environ.get("PUBLIC_STEPS"):
    import numpy
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    left = [int(os.environ["PUBLIC_STEPS"])]

    def count(optimizer: object, args: object, kwargs: object) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise SystemExit(0)

    register_optimizer_step_post_hook(count)

    class SummaryWriter:
        """Of torch.utils.tensorboard, without tensorboard."""

        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def __getattr__(self, name: str) -> typing.Any:
            return lambda *args, **kwargs: None

    sys.modules["torch.utils.tensorboard"] = tensorboard = types.ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]

    def cli(kind: typing.Any) -> typing.Any:
        """Of tyro: `--name value` into a dataclass."""
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        values = {}
        for field in dataclasses.fields(kind):
            text = given.get("--" + field.name.replace("_", "-"))
            if text is not None:
                read = type(field.default)
                values[field.name] = text == "True" if read is bool else read(text)
        return kind(**values)

    sys.modules["tyro"] = tyro = types.ModuleType("tyro")
    tyro.cli = cli  # type: ignore[attr-defined]
