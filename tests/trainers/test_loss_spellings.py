"""Every built-in probe, over the ways in which the same losses are written: none of them raises, and none is blinded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from healthcheck.assembly import plugin_host

HEAD = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    torch.manual_seed(0)
    tokens = nn.Embedding(20, 16, padding_idx=0)
    head = nn.Linear(16, 20)
    conv = nn.Conv2d(3, 5, 3, padding=1)
    dense = nn.Linear(8, 4)
    parts = nn.ModuleList([tokens, head, conv, dense])
    optimizer = torch.optim.SGD(parts.parameters(), 0.05)
    ids, image, x = torch.randint(1, 20, (8, 12)), torch.randn(8, 3, 6, 6), torch.randn(32, 8)
    ids[:, 7:] = 0
    wanted, pixels, y = (ids * 3) % 20, torch.randint(0, 5, (8, 6, 6)), torch.randint(0, 4, (32,))
    for i in range(12):
        optimizer.zero_grad()
"""

CLASSES = {
    "cross_entropy": "F.cross_entropy(dense(x), y)",
    "the module": "nn.CrossEntropyLoss()(dense(x), y)",
    "log_softmax over -1": "F.nll_loss(F.log_softmax(dense(x), dim=-1), y)",
    "log_softmax over 1": "F.nll_loss(dense(x).log_softmax(1), y)",
    "smoothed": "F.cross_entropy(dense(x), y, label_smoothing=0.1)",
    "weighted": "F.cross_entropy(dense(x), y, weight=torch.tensor([1.0, 2, 1, 1]))",
    "summed": "F.cross_entropy(dense(x), y, reduction='sum') / 32",
    "of each row": "F.cross_entropy(dense(x), y, reduction='none').mean()",
    "probabilities": "F.cross_entropy(dense(x), F.one_hot(y, 4).float())",
    "under autocast": "torch.autocast('cpu', torch.bfloat16)(lambda: F.cross_entropy(dense(x), y))()",
    "one row": "F.cross_entropy(dense(x[0]), y[0])",
    "all ignored but one": "F.cross_entropy(dense(x), torch.where(torch.arange(32) > 0, -100, y))",
    "by gather": "-dense(x).log_softmax(-1).gather(-1, y[:, None]).mean()",
    "by logsumexp": "(dense(x).logsumexp(1) - dense(x)[range(32), y]).mean()",
    "images": "F.cross_entropy(conv(image), pixels)",
    "images, over -3": "F.nll_loss(conv(image).log_softmax(-3), pixels)",
    "channels last": "F.cross_entropy(conv(image.to(memory_format=torch.channels_last)), pixels)",
    "images as rows": "F.cross_entropy(conv(image).permute(0, 2, 3, 1).reshape(-1, 5), pixels.reshape(-1))",
}

PADDED = {
    "cross_entropy of rows": "F.cross_entropy(head(tokens(ids)).view(-1, 20), wanted.view(-1))",
    "cross_entropy of (N, C, L)": "F.cross_entropy(head(tokens(ids)).transpose(1, 2), wanted)",
    "log_softmax over -1, then rows": "F.nll_loss(head(tokens(ids)).log_softmax(-1).view(-1, 20), wanted.view(-1))",
    "log_softmax over 2, then (N, C, L)": "F.nll_loss(head(tokens(ids)).log_softmax(2).transpose(1, 2), wanted)",
    "log_softmax over -2": "F.nll_loss(head(tokens(ids)).transpose(1, 2).log_softmax(-2), wanted)",
    "under autocast": (
        "torch.autocast('cpu', torch.bfloat16)"
        "(lambda: F.cross_entropy(head(tokens(ids)).flatten(0, 1), wanted.flatten()))()"
    ),
}

NUMBERS = {
    "mse": "F.mse_loss(dense(x), x[:, :4])",
    "mse of one row": "F.mse_loss(dense(x[0]), x[0, :4])",
    "mse of a scalar": "F.mse_loss(dense(x).mean(), torch.tensor(1.0))",
    "mse that broadcasts": "F.mse_loss(dense(x)[:, :1], x[:, 0])",
    "mse that broadcasts the other way": "F.mse_loss(dense(x)[:, 0], x[:, :1])",
    "difference squared": "((dense(x) - x[:, :4]) ** 2).mean()",
    "l1": "F.l1_loss(dense(x), x[:, :4])",
    "smooth l1": "F.smooth_l1_loss(dense(x), x[:, :4])",
    "huber": "F.huber_loss(dense(x), x[:, :4])",
    "binary with logits": "F.binary_cross_entropy_with_logits(dense(x), (x[:, :4] > 0).float())",
    "binary": "F.binary_cross_entropy(dense(x).sigmoid(), (x[:, :4] > 0).float())",
    "divergence": "F.kl_div(dense(x).log_softmax(-1), x[:, :4].softmax(-1), reduction='batchmean')",
    "cosine": "(1 - F.cosine_similarity(dense(x), x[:, :4])).mean()",
    "triplet": "F.triplet_margin_loss(dense(x), x[:, :4], x[:, 4:])",
    "contrastive": "F.cross_entropy(F.normalize(dense(x), dim=-1) @ F.normalize(dense(x), dim=-1).T, torch.arange(32))",
    "distances": "torch.cdist(dense(x), x[:, :4]).mean()",
    "norms": "(dense(x) - x[:, :4]).norm(dim=-1).mean()",
    "sparse product": "torch.sparse.mm(x.to_sparse(), dense.weight.T).square().mean()",
    "embedding bag": "F.embedding_bag(ids, tokens.weight).square().mean()",
    "einsum": "torch.einsum('bi,oi->bo', x, dense.weight).square().mean()",
    "nested": "torch.nested.nested_tensor([x[:3], x[3:8]]).to_padded_tensor(0.0).sum() * 0 + dense(x).square().mean()",
}


def every_metric() -> dict[str, Any]:
    names = [name.replace("[]", "[*]") for name in plugin_host().registry.metrics]
    return {
        "version": 1,
        "rules": {f"r{i}": {"metric": name, "when": {"above": 1e300}} for i, name in enumerate(names)},
    }


@pytest.mark.slow
@pytest.mark.parametrize("loss", [*CLASSES.values(), *PADDED.values(), *NUMBERS.values()])
@pytest.mark.filterwarnings("ignore")
def test_no_probe_fails_however_a_loss_is_written(play: Callable[..., Any], loss: str) -> None:
    played = play(f"{HEAD}        ({loss}).backward(); optimizer.step()\n", rules=every_metric(), listen=False)

    assert played.session.dispatch.errors == []
    assert played.session.step == 12


@pytest.mark.parametrize("loss", PADDED.values(), ids=PADDED)
def test_padding_in_the_loss_is_counted_however_the_loss_is_written(play: Callable[..., Any], loss: str) -> None:
    rules = {"version": 1, "rules": {"r": {"metric": "targets.padding", "when": {"above": 1e300}}}}
    played = play(f"{HEAD}        ({loss}).backward(); optimizer.step()\n", rules=rules)

    assert played.samples["targets.padding"][0] == pytest.approx(32 / 96, abs=0.09)


@pytest.mark.parametrize("loss", [text for name, text in CLASSES.items() if "image" not in name][:6])
def test_how_much_answers_differ_is_seen_however_the_loss_is_written(play: Callable[..., Any], loss: str) -> None:
    rules = {"version": 1, "rules": {"r": {"metric": "predictions.spread", "when": {"above": 1e300}}}}
    played = play(f"{HEAD}        ({loss}).backward(); optimizer.step()\n", rules=rules)

    assert played.samples["predictions.spread"][0] == pytest.approx(0.56, abs=0.2)
