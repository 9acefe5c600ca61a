"""Two optimizers with losses of their own: who has won."""

from __future__ import annotations

import pytest
import torch
from driver import Everything, Watched
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.game import LossBalanceProbe


class Game:
    """Feeds losses of two optimizers in turn; the values come from the test."""

    def __init__(self) -> None:
        self.watched = Watched([LossBalanceProbe()], Everything())
        self.sides = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2)]
        self.step = 0

    def play(self, *losses: float | torch.Tensor) -> list[float]:
        """One step; what the probe said of it."""
        self.step += 1
        before = len(self.watched.values("loss.one_sided"))
        for index, given in enumerate(losses):
            loss = torch.as_tensor(given)
            self.watched.emit(EventKind.LOSS, self.step, loss=loss.detach(), loss_graph=loss.grad_fn)
            self.watched.emit(EventKind.BEFORE_UPDATE, self.step, optimizer=self.sides[index], optimizer_index=index)
        return self.watched.values("loss.one_sided")[before:]

    @property
    def starved(self) -> float:
        return self.watched.last("loss.starved")


def test_a_loss_that_grows_while_the_other_is_gone_is_told_in_times_of_its_first_size() -> None:
    game = Game()
    for _ in range(20):
        assert set(game.play(1.4, 0.7)) <= {0.0}
    for _ in range(60):
        said = game.play(0.001, 7.0)
    assert abs(said[-1] - 10) < 0.1


def test_two_losses_that_both_fall_are_no_game_that_is_lost() -> None:
    game = Game()
    said = [value for step in range(100) for value in game.play(1.4 * 0.95**step, 0.7 * 0.95**step)]
    assert said
    assert max(said) < 1


def test_losses_that_begin_below_zero_are_passed_over() -> None:
    game = Game()
    said = [value for step in range(100) for value in game.play(-0.1 * step, 0.7 + step)]
    assert set(said) == {0.0}


def test_a_run_with_one_optimizer_is_not_told_of() -> None:
    game = Game()
    assert [game.play(1.0) for _ in range(30)] == [[]] * 30


def test_a_loss_that_is_not_finite_is_left_to_the_rule_on_losses() -> None:
    game = Game()
    for _ in range(20):
        game.play(1.4, 0.7)
    assert set(game.play(float("nan"), float("inf"))) <= {0.0}


def test_a_saturating_loss_that_ends_at_zero_from_below_is_told_once_the_other_has_won() -> None:
    game = Game()
    for _ in range(20):
        game.play(1.4, -0.7)
    assert game.starved == 0
    for _ in range(60):
        game.play(0.001, -0.0001)
    assert game.starved == 1


def test_a_loss_that_began_near_zero_or_stays_below_it_starves_nobody() -> None:
    for ends, begins in ((0.0001, -0.02), (-0.7, -0.7)):
        game = Game()
        for _ in range(20):
            game.play(1.4, begins)
        for _ in range(60):
            game.play(0.001, ends)
        assert game.starved == 0


def distance(size: float, targets: torch.Tensor) -> torch.Tensor:
    """A mean squared error of that size."""
    return F.mse_loss((targets + size**0.5).requires_grad_() * 1.0, targets)


@pytest.mark.parametrize(("targets", "told"), [(torch.arange(8.0), 0.0), (torch.ones(8), 10.0)])
def test_a_critic_that_fits_its_values_has_not_won_but_a_discriminator_with_one_label_has(
    targets: torch.Tensor, told: float
) -> None:
    game = Game()
    for _ in range(20):
        game.play(distance(1.4, targets), 0.7)
    said: list[float] = []
    for _ in range(60):
        said += game.play(distance(0.001, targets), 7.0)
    assert said[-1] == pytest.approx(told, abs=0.1)


def test_one_answer_is_given_in_a_step_and_no_update_is_lost_between_them() -> None:
    game, twin = Game(), Game()
    for _ in range(30):
        assert game.play(1.4, 0.7) == twin.play(1.4, 0.7) == [0.0]
    for turn in range(60):
        said = game.play(0.001, 7.0)
        twin.play(0.001, 7.0 if turn % 2 else 3.5)
    assert said == [pytest.approx(10, abs=0.1)]
    assert 5 < twin.watched.last("loss.one_sided") < 10
