"""A project of somebody else: a toy that trains, its rules, and how a failure of it reads."""

from __future__ import annotations

import pytest

TOY = """\
import pytest, torch


def train(lr=0.1, steps=40):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(16, 8)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model

"""


TOY_RULES = """\
version: 1
rules:
  loss-not-finite:
    metric: loss
    when: nonfinite
    severity: error
    then: [evidence, stop]
    explains: [grads-not-finite]
    message: "loss is {value}"
    hint: lower the learning rate
  grads-not-finite: {metric: grad_norm, when: nonfinite, severity: error}
"""


def block(result: pytest.RunResult, headline: str) -> list[str]:
    """The lines of a failure from its headline to the closing line."""
    lines = [str(line) for line in result.outlines]
    start = next(i for i, line in enumerate(lines) if line.startswith(headline))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("healthcheck: "))
    return lines[start : end + 1]
