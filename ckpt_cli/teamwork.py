"""The team that this process belongs to: of one, unless ``ckpt_cli.worker`` has joined it to others.

Verbs pass ``team()`` to the engine, and only the lead prints.
"""

from __future__ import annotations

from core.team import ALONE, Team

_team: Team = ALONE


def team() -> Team:
    """The team of this process."""
    return _team


def join(found: Team) -> None:
    """Makes this process one of a team, before its verb runs."""
    global _team
    _team = found
