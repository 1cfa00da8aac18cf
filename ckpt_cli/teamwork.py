"""The team that this process belongs to: of one, unless ``ckpt_cli.worker`` has joined it to others.

Verbs pass ``team()`` to the engine, and ``device()`` for its per-byte work; only the lead prints.
"""

from __future__ import annotations

from core.device import Device
from core.team import ALONE, Team

_team: Team = ALONE
_device: Device | None = None


def team() -> Team:
    """The team of this process."""
    return _team


def device() -> Device | None:
    """The device of this process; None for the CPU path."""
    return _device


def join(found: Team, device: Device | None = None) -> None:
    """Makes this process one of a team, before its verb runs.

    Args:
        device: where it does its per-byte work, see ``core.device.device_named``.
    """
    global _team, _device
    _team = found
    _device = device
