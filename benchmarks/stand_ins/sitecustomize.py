"""For `benchmarks/public_scripts.py`: public scripts run short, seeded, and without packages that only draw or log.

PUBLIC_STEPS ends a script, as if it had come to its end, after so many updates. PUBLIC_CPU lets one that asks for CUDA train on the CPU,
and gives old NumPy names back.
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

if os.environ.get("PUBLIC_CPU"):
    import numpy
    import torch

    def stays(thing: typing.Any, *args: object, **kwargs: object) -> typing.Any:
        return thing

    def on_cpu(to: typing.Any) -> typing.Any:
        def moved(thing: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            given = ["cpu" if str(value).startswith("cuda") else value for value in args]
            return to(thing, *given, **{k: "cpu" if k == "device" else v for k, v in kwargs.items()})

        return moved

    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = stays  # type: ignore[assignment, method-assign]
        kind.to = on_cpu(kind.to)  # type: ignore[method-assign]
    for name in ("synchronize", "reset_max_memory_allocated", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    numpy.Inf = numpy.inf  # type: ignore[attr-defined]
