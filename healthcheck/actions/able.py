"""Whether a trainer lets an action do something, and the words when it does not."""

from __future__ import annotations

from healthcheck.protocols import Controls


def why_unable(controls: Controls, control: str) -> str:
    """Empty if ``control`` (``skip_update``, ``checkpoint``, ...) exists here, else the adapter's reason."""
    capabilities = controls.capabilities
    if control in capabilities.controls:
        return ""
    return capabilities.gaps.get(control) or f"{capabilities.trainer} offers no {control.replace('_', ' ')}"


def size(amount: float) -> str:
    """Bytes in words: ``812 MiB``, ``21.4 GiB``."""
    if abs(amount) >= 2**30:
        return f"{amount / 2**30:.1f} GiB"
    return f"{amount / 2**20:.0f} MiB" if abs(amount) >= 2**20 else f"{amount / 2**10:.0f} KiB"
