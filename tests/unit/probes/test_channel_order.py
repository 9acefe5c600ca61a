"""Pictures whose channels lie between their pixels, beside others."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from healthcheck.probes.channel_order import _ratios, by_channels

LIMIT = 0.6


def smooth(channels: int = 3, rows: int = 8, size: int = 20) -> torch.Tensor:
    """Pictures whose channels differ in brightness, (rows, channels, size, size)."""
    given = torch.Generator().manual_seed(0)
    spots = torch.rand(rows, channels, 5, 5, generator=given)
    brightness = torch.linspace(1.0, 0.3, channels).roll(1).view(channels, 1, 1)
    return F.interpolate(spots, size=size, mode="bilinear") * brightness + brightness


def viewed(pictures: torch.Tensor) -> torch.Tensor:
    return pictures.movedim(1, -1).contiguous().view(pictures.shape)


@pytest.mark.parametrize("channels", [3, 4, 8])
def test_a_view_of_channels_last_is_seen(channels: int) -> None:
    assert float(by_channels(viewed(smooth(channels)), channels)) < LIMIT
    assert float(by_channels(smooth(channels), channels)) > 1


def test_signals_are_not_judged_since_a_season_may_be_as_long_as_they_have_channels() -> None:
    season = torch.sin(torch.arange(70) * 2 * torch.pi / 7).repeat(8, 7, 1)
    assert float(by_channels(season, 7)) < LIMIT
    signals, pictures = torch.nn.Conv1d(7, 2, 3), torch.nn.Conv2d(3, 2, 3)
    assert list(_ratios(signals(season).square().mean().grad_fn)) == []
    assert [float(ratio) < LIMIT for ratio in _ratios(pictures(viewed(smooth())).square().mean().grad_fn)] == [True]


def test_noise_flags_and_nothing_are_no_view() -> None:
    noise = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    symbols = F.one_hot(torch.arange(40) % 4, 4).float().T[None].repeat(8, 1, 1)
    assert float(by_channels(noise, 3)) > 0.9
    assert float(by_channels(symbols, 4)) == 1.0
    assert float(by_channels(torch.ones(8, 3, 9, 9), 3)) == 1.0
