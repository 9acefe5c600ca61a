"""Two networks that play against each other, on the same side and on two, with a critic that is held and one that is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from healthcheck.core.events import EventKind
from healthcheck.probes.game import GameProbe

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BCE = F.binary_cross_entropy_with_logits


def critic_of(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer, *behind: nn.Module) -> nn.Sequential:
    return nn.Sequential(wrap(nn.Linear(2, 8)), nn.ReLU(), wrap(nn.Linear(8, 1)), *behind)


def play(
    critics: Loss,
    makers: Callable[[torch.Tensor], torch.Tensor],
    *,
    critic: nn.Sequential | None = None,
    again: bool = False,
    clamp: bool = False,
    penalty: bool = False,
    apart: bool = False,
    steps: int = 42,
) -> Watched:
    """A small game; ``again``: the maker draws anew for its own turn, ``apart``: real and made have a pass of their own."""
    torch.manual_seed(0)
    maker, critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), critic or critic_of()
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (maker, critic)]
    both = nn.ModuleDict({"maker": maker, "critic": critic})
    view, watched = View(both, optimizers), Watched([GameProbe()])

    def turn(step: int, index: int, *losses: torch.Tensor) -> None:
        optimizers[index].zero_grad()
        for loss in losses:
            watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train")
            loss.backward()
        optimizers[index].step()
        watched.emit(
            EventKind.AFTER_UPDATE, step, model=view, optimizer=optimizers[index], optimizer_index=index, phase="train"
        )

    for step in range(1, steps + 1):
        real, made = torch.randn(16, 2), maker(torch.randn(16, 3))
        if apart:
            turn(step, 1, BCE(critic(real), torch.ones(16, 1)), BCE(critic(made.detach()), torch.zeros(16, 1)))
        else:
            loss = critics(critic(real), critic(made.detach()))
            if penalty:
                mixed = ((real + made.detach()) / 2).requires_grad_()
                [slope] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
                loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
            turn(step, 1, loss)
        if clamp:
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.1, 0.1)
        turn(step, 0, makers(critic(maker(torch.randn(16, 3)) if again else made)))
    assert not any(module._forward_hooks for module in both.modules())
    return watched


def to(target: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda score: BCE(score, torch.full_like(score, target))


def squares(real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(real, torch.ones_like(real)) + F.mse_loss(made, torch.zeros_like(made))


GAMES: dict[str, tuple[Loss, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "labels": (lambda real, made: to(1)(real) + to(0)(made), to(1), to(0)),
    "smoothed labels": (lambda real, made: (to(0.9)(real) + to(0.1)(made)) / 2, to(0.9), to(0.1)),
    "Wasserstein": (lambda real, made: made.mean() - real.mean(), lambda s: -s.mean(), lambda s: s.mean()),
    "hinge": (lambda real, made: F.relu(1 - real).mean() + F.relu(1 + made).mean(), lambda s: -s.mean(), lambda s: s.mean()),
    "squares": (squares, lambda s: F.mse_loss(s, torch.ones_like(s)), lambda s: F.mse_loss(s, torch.zeros_like(s))),
    "softplus": (
        lambda real, made: F.softplus(-real).mean() + F.softplus(made).mean(),
        lambda s: F.softplus(-s).mean(),
        lambda s: F.softplus(s).mean(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("game", GAMES)
def test_a_generator_on_the_critics_side_is_told_and_one_that_plays_against_it_is_not(game: str, again: bool) -> None:
    critics, against, along = GAMES[game]
    assert play(critics, along, again=again).last("loss.same_side") == 1
    assert set(play(critics, against, again=again).values("loss.same_side")) == {0.0}


def test_real_and_made_in_two_passes_are_one_turn() -> None:
    critics, against, along = GAMES["labels"]
    assert play(critics, along, apart=True).last("loss.same_side") == 1
    assert set(play(critics, against, apart=True).values("loss.same_side")) == {0.0}


def test_a_critic_that_nothing_holds_is_told() -> None:
    critics, against, _ = GAMES["Wasserstein"]
    assert play(critics, against, again=True).values("loss.critic_unbound") == [1]


@pytest.mark.parametrize("how", ["clamp", "penalty", "norm", "sigmoid", "labels"])
def test_a_critic_that_something_holds_is_not(how: str) -> None:
    critics, against, _ = GAMES["labels" if how == "labels" else "Wasserstein"]
    critic = {"norm": critic_of(spectral_norm), "sigmoid": critic_of(lambda layer: layer, nn.Sigmoid())}.get(how)
    watched = play(critics, against, again=True, critic=critic, clamp=how == "clamp", penalty=how == "penalty")
    assert 1 not in watched.values("loss.critic_unbound")
