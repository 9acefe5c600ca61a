"""Each metric is written once: what the host calculates at once is what arrives late from a device.

Small trainings are played twice to all probes, with the same numbers: once on the CPU, once with a stand-in for a
device (see ``standin.py``), where nothing may be read and copies come two looks late. Both must say the same, and be
silent at the same steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from driver import Everything, View
from standin import LateMemory, NoReads, elsewhere
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Probe
from healthcheck.core.runinfo import RunFacts
from healthcheck.core.samples import Sample, series_name
from healthcheck.device.deferred import Deferred
from healthcheck.device.mailbox import StepMailbox
from healthcheck.instrument.gate import GATEABLE_METRICS
from healthcheck.probes import PROBES, healthcheck_register_probes

STEPS = 36

OF_THIS_MACHINE = {
    "memory", "memory-epochs", "memory-events", "memory-forecast", "host-memory", "live-tensors", "compilation",
    "step-time", "step-parts", "pace", "heartbeat", "own-cost", "kept-graphs",
}  # fmt: skip
"""Probes whose numbers are those of the process or the clock: they differ from run to run."""

READ_ON_THE_HOST = {
    "batch.targets", "batch.hash_repeat", "batch.one_label", "batch.pass_repeat", "batch.stale", "targets.one_class",
    "targets.ends_masked", "loss.of_actions", "grads.cleared", "grads.discarded", "loss.misbuilt", "modules.never_in_train",
    "updates.of_few_passes",
}  # fmt: skip
"""Metrics that need a look at a tensor before anything is calculated. On a device that would be a wait: they are absent
there, or less is found. (The number that a loss is divided by is on the host in any case, but the stand-in takes it for one of its own.)"""


@dataclass
class Play:
    """One training: what it does at each step, and the events that it emits."""

    emit: Callable[..., None]
    step: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def update(
        self,
        model: nn.Module,
        optimizer: Any,
        losses: list[Callable[[], torch.Tensor]],
        *,
        index: int = 0,
        **facts: Any,
    ) -> None:
        view = self.state.setdefault("view", View(model, facts.pop("optimizers", [optimizer])))
        clip, scale, batch = facts.pop("clip", None), facts.pop("loss_scale", None), facts.pop("batch", None)
        spoil = facts.pop("spoil", None)
        optimizer.zero_grad(set_to_none=self.step % 2 == 0)
        for make in losses:
            loss = make()
            known = {"loss_graph": loss.grad_fn, "optimizer_index": 0, "batch": batch}
            self.emit(EventKind.BATCH_READY, self.step, model=view, batch=batch, n_samples=16, dataset_size=64)
            self.emit(EventKind.LOSS, self.step, model=view, loss=loss.detach(), **known)
            loss.backward()
        if spoil is not None:
            spoil()
        self.emit(EventKind.BACKWARD_END, self.step, model=view, optimizer_index=index, loss_scale=scale)
        norm = nn.utils.clip_grad_norm_(list(model.parameters()), clip) if clip else None
        known = {
            "model": view, "optimizer": optimizer, "optimizer_index": index, "grad_norm": norm, "max_norm": clip,
            "loss_scale": scale, "clipped_scaled": False if clip else None,
            "clipped": list(model.parameters()) if clip else None, **facts,
        }  # fmt: skip
        self.emit(EventKind.BEFORE_UPDATE, self.step, **known)
        optimizer.step()
        self.emit(EventKind.AFTER_UPDATE, self.step, **known)
        self.emit(EventKind.STEP_END, self.step, **known)


def classifier(play: Play) -> None:
    """Clipped, with running statistics, a column that tells the label, and a NaN in one batch."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for play.step in range(1, STEPS + 1):
        x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
        x[:, 0] = y
        if play.step == 20:
            x[3, 2] = math.nan
        play.update(model, optimizer, [lambda x=x, y=y: F.cross_entropy(model(x), y)], clip=0.5, batch={"x": x, "y": y})


def regression(play: Play) -> None:
    """In half precision, accumulated, with targets out of reach and an infinite gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).bfloat16()
    model.register_parameter("stuck", nn.Parameter(torch.zeros(3).bfloat16()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def spoil() -> None:
        if play.step == 15:
            model[0].weight.grad[0, 0] = math.inf

    for play.step in range(1, STEPS + 1):
        xs = [torch.randn(16, 8).bfloat16() for _ in range(3)]
        losses = [lambda x=x: F.mse_loss(model(x).squeeze(1).float(), 300 * x.float().sum(1)) / 3 for x in xs]
        play.update(model, optimizer, losses, batch={"x": xs[0]}, spoil=spoil)


def scaled(play: Play) -> None:
    """Under a loss scale that a fused optimizer takes out itself and that makes it skip now and then."""
    torch.manual_seed(2)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for play.step in range(1, STEPS + 1):
        x = torch.randn(12, 6)
        optimizer.grad_scale = torch.tensor(4.0)
        optimizer.found_inf = torch.tensor(float(play.step in (1, 2, 9, 10, 11)))
        scale = torch.tensor(0.5 if play.step > 5 else 8.0)
        play.state["held_back"] = {0: torch.tensor(float(play.step % 7 == 0))}
        play.update(model, optimizer, [lambda x=x: 4 * model(x).square().mean()], loss_scale=scale, skipped=None)


def zero_gradients(play: Play) -> None:
    """All gradients are zero for a while, then those of the last layer alone."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spoil() -> None:
        for parameter in model.parameters() if play.step < 12 else model[1].parameters():
            parameter.grad.zero_()

    for play.step in range(1, STEPS + 1):
        x = torch.randn(16, 4)
        play.update(model, optimizer, [lambda x=x: model(x).square().mean()], spoil=spoil)


def autoencoder(play: Play) -> None:
    """Variational: with a divergence from a prior in its loss. Its weights are put back every tenth step."""
    torch.manual_seed(4)
    encoder, decoder = nn.Linear(10, 6), nn.Linear(3, 10)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(x: torch.Tensor) -> torch.Tensor:
        mean, logvar = encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (logvar / 2).exp()
        divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()
        return F.mse_loss(decoder(code), x) + divergence

    for play.step in range(1, STEPS + 1):
        x = torch.randn(16, 10)
        before = [p.detach().clone() for p in model.parameters()]
        play.update(model, optimizer, [lambda x=x: loss(x)])
        if play.step % 10 == 4:
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), before, strict=True):
                    parameter.copy_(old)


def adversaries(play: Play) -> None:
    """Two networks take turns; the discriminator's loss goes to nothing."""
    torch.manual_seed(5)
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleList([one, other])
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (one, other)]
    play.state["view"] = View(model, optimizers)
    for play.step in range(1, STEPS + 1):
        x = torch.randn(16, 4)
        fade = 1.0 / play.step**3
        play.update(one, optimizers[0], [lambda x=x: one(x).square().mean() * play.step])
        play.update(other, optimizers[1], [lambda x=x, fade=fade: other(x).square().mean() * fade], index=1)


def language(play: Play) -> None:
    """A model of the next token, some of whose targets are padding; its embedding is tied to its output."""
    torch.manual_seed(6)
    embedding, output = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20, bias=False)
    output.weight = embedding.weight
    model = nn.ModuleList([embedding, output])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for play.step in range(1, STEPS + 1):
        tokens = torch.randint(1, 20, (8, 17))
        tokens[:, 12:] = 0
        read, wanted = tokens[:, :-1], tokens[:, 1:]

        def loss(read: torch.Tensor = read, wanted: torch.Tensor = wanted) -> torch.Tensor:
            return F.cross_entropy(output(embedding(read)).flatten(0, 1), wanted.flatten())

        play.update(model, optimizer, [loss], batch={"input_ids": read, "labels": wanted})


def contrastive(play: Play) -> None:
    """Vectors compared by their distances, until they collapse; a new optimizer takes over halfway."""
    torch.manual_seed(7)
    model = nn.Linear(6, 4)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for play.step in range(1, STEPS + 1):
        if play.step == 25:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            play.state["view"] = View(model, [optimizer])
        x, other = torch.randn(16, 6), torch.randn(16, 6)
        play.update(model, optimizer, [lambda x=x, y=other: (model(x) - model(y)).norm(dim=1).mean()])


def policy(play: Play) -> None:
    """Answers weighted by their advantages, which are zero now and then."""
    torch.manual_seed(8)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for play.step in range(1, STEPS + 1):
        x, action = torch.randn(16, 6), torch.randint(0, 5, (16, 4))
        advantage = torch.randn(16, 4) * (play.step % 5 != 0)

        def loss(
            x: torch.Tensor = x, action: torch.Tensor = action, advantage: torch.Tensor = advantage
        ) -> torch.Tensor:
            scores = model(x).log_softmax(-1).gather(1, action)
            return -((scores - scores.detach()).exp() * advantage).mean()

        play.update(model, optimizer, [loss])


def denoiser(play: Play) -> None:
    """Finds noise in data of ten times its size; a copy of it is written to, evaluated and does not follow."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12))
    copied = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    facts = play.state["run"] = RunFacts()
    facts.set_to_eval[copied] = 2
    for play.step in range(1, STEPS + 1):
        noise = torch.randn(32, 12)
        noisy = 10 * torch.randn(32, 12) + noise
        play.update(model, optimizer, [lambda x=noisy, y=noise: F.mse_loss(model(x), y).sqrt()])
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.copy_(parameter.clone())
    play.emit(EventKind.TRAIN_END, STEPS, model=play.state["view"])


def rare(play: Play) -> None:
    """Ten labels with a yes or no each, few of them yes."""
    torch.manual_seed(10)
    model = nn.Linear(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for play.step in range(1, STEPS + 1):
        x, y = torch.randn(32, 8), (torch.rand(32, 10) < 0.05).float()
        play.update(model, optimizer, [lambda x=x, y=y: F.binary_cross_entropy_with_logits(model(x), y)])


def evaluated(play: Play) -> None:
    """A classifier that is evaluated on a class which it has never seen."""
    torch.manual_seed(11)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for play.step in range(1, STEPS + 1):
        x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
        play.update(model, optimizer, [lambda x=x, y=y: F.cross_entropy(model(x), y)])
        if play.step % 9 == 0:
            answered = torch.tensor([[1.0, 9, 0, 0], [0, 1, 0, 9], [9, 0, 1, 0], [0, 0, 10, 0]])
            for counts in (torch.tensor([3.0, 2.0, 2.0, 3.0]), answered):
                play.emit(EventKind.EVAL_END, play.step, label_counts=counts, phase="eval")


def attending(play: Play) -> None:
    """Attention by hand whose mask fills in a zero, and a loss with weights for classes."""
    torch.manual_seed(12)
    read, head = nn.Linear(6, 18), nn.Linear(6, 3)
    model = nn.ModuleList([read, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.tensor([0.8, 0.15, 0.05])

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        query, key, value = read(x).chunk(3, -1)
        hidden = torch.ones(5, 5).triu(1).bool()
        seen = (query @ key.transpose(1, 2)).masked_fill(hidden, 0.0).softmax(-1)
        return F.cross_entropy(head((seen @ value).mean(1)), y, weight=weights)

    for play.step in range(1, STEPS + 1):
        x, y = torch.randn(64, 5, 6), torch.multinomial(weights, 64, replacement=True)
        play.update(model, optimizer, [lambda x=x, y=y: loss(x, y)])


def clamped(play: Play) -> None:
    """Outputs are clamped before the loss, and a copy of the model gets gradients that no optimizer applies."""
    torch.manual_seed(13)
    model = nn.Linear(6, 2)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for play.step in range(1, STEPS + 1):
        x, y = torch.randn(16, 6), torch.rand(16, 2)
        play.update(
            model, optimizer, [lambda x=x, y=y: F.mse_loss(model(x).clamp(0, 1), y) + copied(x).square().mean()]
        )


def sequences(play: Play) -> None:
    """Rows of different lengths, answered from their last position."""
    torch.manual_seed(14)
    embedding, time, output = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 3)
    model = nn.ModuleList([embedding, time, output])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for play.step in range(1, STEPS + 1):
        ids = torch.randint(1, 20, (16, 5)) * (torch.arange(5) < torch.randint(1, 6, (16, 1)))
        y = torch.randint(0, 3, (16,))
        play.update(
            model, optimizer, [lambda ids=ids, y=y: F.cross_entropy(output(time(embedding(ids)).tanh()[:, -1]), y)]
        )


PLAYS = [
    classifier, regression, scaled, zero_gradients, autoencoder, adversaries, language, contrastive, policy, denoiser, rare,
    evaluated, attending, clamped, sequences,
]  # fmt: skip


def played(
    play: Callable[[Play], None],
    mailbox: StepMailbox,
    guard: Any,
    see: Callable[[Sample], None] = lambda sample: None,
) -> dict[str, list[tuple[int, float]]]:
    """All series of one training.

    :param see: is shown each sample as its probe made it.
    """
    demand, samples = Everything(), list[Sample]()
    made_for_a_session = list[Probe]()
    healthcheck_register_probes(made_for_a_session.append)
    probes = [probe for probe in made_for_a_session if probe.name not in OF_THIS_MACHINE]
    state: dict[str, Any] = {"user_state": {}}
    for probe in probes:
        getattr(probe, "plan", lambda demand: None)(demand)

    def emit(kind: EventKind, step: int, **facts: Any) -> None:
        known = {"user_state": state["user_state"], "held_back": state.get("held_back"), "run": state.get("run")}
        event = Event(kind, step, **known, **facts)
        with torch.no_grad(), guard():
            made = [s for probe in probes if kind in probe.listens_to for s in probe.sample(event, demand)]
            for sample in made:
                see(sample)
            mailbox.post(step, made)
            samples.extend(mailbox.ready())

    play(Play(emit, state=state))
    samples += mailbox.drain()
    for probe in probes:
        getattr(probe, "close", lambda: None)()
    found: dict[str, list[tuple[int, float]]] = {}
    for sample in samples:
        assert type(sample.value) is float, sample
        found.setdefault(series_name(sample.metric, sample.labels), []).append((sample.step, sample.value))
    return found


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None: ...


@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
def test_every_metric_is_the_same_on_the_host_and_late(
    play: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = played(play, StepMailbox(), _Nothing)
    elsewhere(monkeypatch)
    late = played(play, StepMailbox(memory=LateMemory(looks=2)), NoReads)
    metrics = {name.partition("[")[0] for name in host}
    assert {"loss", "loss.best", "grad_norm", "lr", "update_ratio", "params.unmoved", "grads.zero"} <= metrics
    assert set(late) - set(host) == set()
    for name, series in host.items():
        if name.partition("[")[0] in READ_ON_THE_HOST:
            continue
        assert name in late, name
        assert [step for step, _ in late[name]] == [step for step, _ in series], name
        values = [value for _, value in series]
        assert [value for _, value in late[name]] == pytest.approx(values, rel=1e-5, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("play", [classifier, regression, scaled], ids=lambda play: play.__name__)
def test_what_a_gate_compares_on_the_device_is_the_number_that_arrives(
    play: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the micro-batches, the norm without clipping and loss scale."""
    elsewhere(monkeypatch)
    seen: list[tuple[str, Any, Deferred]] = []

    def see(sample: Sample) -> None:
        if sample.metric in GATEABLE_METRICS and isinstance(sample.value, Deferred):
            seen.append((sample.metric, sample.value.on_device(), sample.value))

    played(play, StepMailbox(memory=LateMemory()), NoReads, see)
    assert {"loss", "grad_norm"} <= {metric for metric, _, _ in seen}
    for metric, on_device, value in seen:
        assert float(on_device) == pytest.approx(value.value(), rel=1e-5, nan_ok=True), metric


def test_the_plays_show_what_is_deferred() -> None:
    """Nearly all metrics that a device may have, so that the comparison above is one."""
    seen: set[str] = set()
    for play in PLAYS:
        seen |= {name.partition("[")[0] for name in played(play, StepMailbox(), _Nothing)}
    wanted = {metric.name for kind in PROBES for metric in kind.provides if metric.cost.value == "device"}
    wanted -= {
        name for name in wanted if name.startswith("ranks.")
    }  # several processes: tests/trainers/test_rank_faults.py
    # Its convention has to be read first; an evaluation, a router and an image have tests of their own.
    exempt = {"batch.targets", "eval.inputs_spread", "eval.targets_apart", "experts.idle", "inputs.pixel_scale"}
    # So have padding, positions without marks, pictures of several channels, and terms without gradients.
    exempt |= {"attention.to_padding", "attention.positions_alike", "inputs.by_channels", "loss.gradientless"}
    assert wanted - seen == exempt
