"""Who trains what: frozen by mistake, in no optimizer, in the optimizer of another model."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from driver import Loop, View, Watched
from torch import nn
from torch.utils.checkpoint import checkpoint

from healthcheck.core.events import EventKind
from healthcheck.probes.labels import in_groups
from healthcheck.probes.movement import MovementProbe
from healthcheck.probes.wiring import OPTIMIZER_PATIENCE, PATIENCE, WiringProbe


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.lora_B(self.lora_A(x))


class Net(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def trained(model: nn.Module, steps: int = 30, params=None, **options) -> Watched:
    watched = Watched([WiringProbe()])
    params = [p for p in model.parameters() if p.requires_grad] if params is None else params
    loop = Loop(watched, model, torch.optim.SGD(params, lr=0.01), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.run(steps, lambda: model(torch.randn(4, 8)).pow(2).mean())
    return watched


def test_checkpointing_that_cuts_the_graph_is_named_by_pattern() -> None:
    watched = trained(Net(reentrant=True))
    assert watched.of("params.no_gradient")[0] == (PATIENCE, 6.0)
    facts = watched.facts("params.no_gradient")
    assert "3 of 3 tensors like *.lora_A.weight" in facts["which"]
    assert "3 of 3 tensors like *.lora_B.weight" in facts["which"]
    assert facts["frozen"] == "6 frozen on purpose: ignored"
    assert facts["never"] == "6 never got one"


def test_adapters_that_train_and_what_is_frozen_on_purpose_are_silent() -> None:
    watched = trained(Net(reentrant=False))
    assert set(watched.values("params.no_gradient")) == {0.0}
    assert set(watched.values("params.not_in_optimizer")) == {0.0}
    assert set(watched.values("params.optimizer_orphans")) == {0.0}


def test_a_frozen_backbone_given_to_the_optimizer_is_silent() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2))
    watched = trained(model, params=list(model.parameters()))
    assert {
        v for name in ("no_gradient", "not_in_optimizer", "optimizer_orphans") for v in watched.values(f"params.{name}")
    } == {0.0}


def test_heads_that_take_turns_are_silent() -> None:
    body, one, two = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)
    model = nn.ModuleList([body, one, two])
    watched = Watched([WiringProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01))
    for n in range(30):
        loop.one(lambda n=n: (one if n % 2 else two)(body(torch.randn(4, 8))).pow(2).mean())
    assert set(watched.values("params.no_gradient")) == {0.0}


def test_experts_that_are_drawn_at_random_are_silent_also_one_that_starves_but_not_what_takes_no_turns() -> None:
    body, experts, neck = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(4)), nn.Linear(8, 8)
    draw = torch.Generator().manual_seed(0)
    watched = Watched([WiringProbe()])
    model = nn.ModuleDict({"body": body, "experts": experts, "neck": neck})
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01))

    def once(chosen: int, *, through_neck: bool) -> torch.Tensor:
        hidden = body(torch.randn(4, 8))
        return experts[chosen](neck(hidden) if through_neck else hidden).pow(2).mean()

    for n in range(300):
        chosen = int(torch.randint(0, 4 if n < 100 else 3, (1,), generator=draw))
        loop.one(lambda chosen=chosen, n=n: once(chosen, through_neck=n < 240))
        if n == 239:
            assert set(watched.values("params.no_gradient")) == {0.0}
    assert watched.last("params.no_gradient") == 2
    assert "neck.weight" in watched.facts("params.no_gradient")["which"]


def test_the_optimizer_of_a_model_that_was_built_again_holds_orphans() -> None:
    old, new = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    watched = trained(new, params=list(old.parameters()))
    assert watched.of("params.optimizer_orphans")[0] == (PATIENCE, 4.0)
    assert watched.facts("params.optimizer_orphans")["twins"].startswith("4 tensors of the same shapes")
    assert watched.of("params.not_in_optimizer")[0] == (OPTIMIZER_PATIENCE, 4.0)


def test_an_old_model_that_is_still_alive_is_an_orphan_too() -> None:
    """A module scan finds both; only the twin tells which one runs."""
    both = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
    watched = Watched([WiringProbe()])
    loop = Loop(watched, both, torch.optim.SGD(both[0].parameters(), lr=0.1))
    loop.run(10, lambda: both[1](torch.randn(4, 8)).pow(2).mean())
    assert watched.last("params.optimizer_orphans") == 2


@pytest.mark.parametrize("held", [False, True])
def test_the_tensors_of_a_layer_that_was_replaced_in_the_middle_are_orphans_unless_the_new_ones_are_held(
    held: bool,
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    watched = Watched([WiringProbe()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop = Loop(watched, model, optimizer)
    loss = lambda: model(torch.randn(4, 8)).pow(2).mean()  # noqa: E731
    loop.run(20, loss)
    assert watched.last("params.optimizer_orphans") == 0
    model[1] = nn.Linear(8, 8)
    if held:
        optimizer.add_param_group({"params": list(model[1].parameters())})
    loop.view = View(model, [optimizer])
    loop.run(20, loss)
    assert watched.last("params.optimizer_orphans") == (0 if held else 2)


def test_an_unused_part_of_the_model_is_no_orphan() -> None:
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(8, 2))
    watched = Watched([WiringProbe()])
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1)).run(
        10, lambda: model[0](torch.randn(4, 8)).pow(2).mean()
    )
    assert watched.last("params.no_gradient") == 2
    assert watched.last("params.optimizer_orphans") == 0


@pytest.mark.parametrize("uses", ["mean of the tokens", "pooler", "detached head"])
def test_a_pooler_of_transformers_that_no_loss_uses_is_silent_and_other_parts_are_not(uses: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes))
    model = nn.ModuleDict({"bert": bert, "head": nn.Linear(16, 2)})
    watched = Watched([WiringProbe(), MovementProbe()])

    def loss() -> torch.Tensor:
        given = bert(torch.randint(0, 20, (2, 4)))
        taken = given.pooler_output if uses == "pooler" else given.last_hidden_state.mean(1)
        return taken.pow(2).mean() if uses == "detached head" else model["head"](taken).pow(2).mean()

    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1)).run(10, loss)
    assert watched.last("params.no_gradient") == (2 if uses == "detached head" else 0)
    assert watched.last("params.unmoved") == (2 if uses == "detached head" else 0)


def test_the_second_optimizer_of_a_gan_may_come_late() -> None:
    """Its tensors get gradients and are in no optimizer that has stepped yet."""
    critic, generator = nn.Linear(8, 1), nn.Linear(4, 8)
    both = nn.ModuleList([critic, generator])
    watched = Watched([WiringProbe()])
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, generator))
    loop = Loop(watched, both, mine)
    for n in range(40):
        if n == 10:
            loop.view = View(both, [mine, other])
        loop.one(lambda: critic(generator(torch.randn(4, 4))).mean())
        if n >= 10:
            loop.one(lambda: critic(generator(torch.randn(4, 4))).mean(), optimizer=other, index=1, advance=False)
    assert set(watched.values("params.not_in_optimizer")) == {0.0}


def test_a_replaced_optimizer_and_its_model_can_be_freed() -> None:
    model = nn.Linear(8, 2)
    probe = WiringProbe()
    watched = Watched([probe])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(6, lambda m=model: m(torch.randn(4, 8)).mean())
    gone = weakref.ref(model.weight)
    other = nn.Linear(8, 2)
    later = torch.optim.SGD(other.parameters(), lr=0.1)
    watched.emit(EventKind.BEFORE_UPDATE, 7, model=View(other, [later]), optimizer=later)
    watched.samples.clear()
    del model, loop
    gc.collect()
    assert gone() is None


def test_names_are_grouped() -> None:
    names = [f"blocks.{n}.attn.lora_{k}.weight" for n in range(12) for k in "AB"]
    assert in_groups(names, names) == "12 of 12 tensors like *.lora_A.weight, 12 of 12 tensors like *.lora_B.weight"
    assert in_groups(["head.bias"], [*names, "head.bias"]) == "head.bias"
    assert in_groups(["0.weight", "2.weight"], ["0.weight", "2.weight", "4.weight"]) == "2 of 3 tensors like *.weight"


def test_an_optimizer_that_trains_nothing_holds_orphans_even_if_no_module_is_known() -> None:
    old, new = nn.Linear(8, 2), nn.Linear(8, 2)
    watched = Watched([WiringProbe()])
    loop = Loop(watched, None, torch.optim.SGD(old.parameters(), lr=0.1))
    loop.run(10, lambda: new(torch.randn(4, 8)).pow(2).mean())
    assert watched.last("params.optimizer_orphans") == 2
