"""Whether a trainer lets an action do something, and the words when it does not."""

from __future__ import annotations

from healthcheck.protocols import Controls


def why_unable(controls: Controls, control: str) -> str:
    """Empty if ``control`` (``skip_update``, ``checkpoint``, ...) exists here, else the adapter's reason."""
    capabilities = controls.capabilities
    if control in capabilities.controls:
        return ""
    return capabilities.gaps.get(control) or f"{capabilities.trainer} offers no {control.replace('_', ' ')}"
