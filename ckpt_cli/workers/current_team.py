"""The team that this process belongs to, and its device.

A process is its own team, unless ``ckpt_cli.worker`` has made it a member of a larger one. Commands
pass ``team()`` to the engine, and ``device()`` for its per-byte work; only the lead prints.

The figures of all workers are ``launch`` in the JSON of a command (fields may be added)::

    {"n_workers": int, "n_hosts": int, "balance": float,
     "workers": [{"rank": int, "host": str, "read_bytes": int, "written_bytes": int,
                  "seconds": float}],
     "launcher": str, "backend": str, "device": str, "restarts": int,
     "n_meetings": int, "collective_bytes": int, "store_bytes": int,
     "device_work": [{"work": str, "is_on_device": bool, "reason": str,
                      "cpu_bytes_per_s": int | null, "device_bytes_per_s": int | null}]}

``collective_bytes`` counts the bytes that all workers together sent each other at meetings,
``store_bytes`` those that they exchanged with the store (presence and progress); neither includes
tensor data. ``device_work`` is present with ``--device``: where the lead did each kind of per-byte
work, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from core.engine.team.protocol import ALONE, Figures, Team, summarize_figures
from core.files.syscalls import default_memory_bytes

if TYPE_CHECKING:
    from core.engine.device.device import Device

_team: Team = ALONE
_device: Device | None = None
_facts: Callable[[], dict[str, object]] = dict
_n_cores: int | None = None
_n_local = 1


def team() -> Team:
    """Return the team of this process."""
    return _team


def device() -> Device | None:
    """Return the device of this process; None for the CPU path."""
    return _device


def worker_threads() -> int | None:
    """Return the default number of threads of a worker: one per core, but at least 2.

    Returns None if the process works alone, or the launcher does not set the number of workers per
    host.
    """
    return None if _n_cores is None else min(max(_n_cores, 2), 64)


def default_memory() -> int:
    """Return the memory limit of this process in bytes unless the user gives one.

    The workers of a host share what a single process may use.
    """
    return default_memory_bytes(_n_local)


def launch_of(figures: Sequence[Figures]) -> dict[str, object]:
    """Return ``{"launch": …}`` for a command's JSON.

    Returns {} for a process that works alone without a device.

    Args:
        figures: the workers' figures, gathered at the lead; empty for a process that works alone.
    """
    if not figures and _device is None:
        return {}
    launch = {**(summarize_figures(figures) if figures else {}), **_facts()}
    if _device is not None:
        from core.engine.calibration.choice import decisions

        launch["device_work"] = [asdict(decision) for decision in decisions(_device)]
    return {"launch": launch}


def join(
    team: Team,
    device: Device | None = None,
    *,
    facts: Callable[[], dict[str, object]] = dict,
    n_cores: int | None = None,
    n_local: int = 1,
) -> None:
    """Make this process a member of a team, before its command runs.

    Args:
        device: device for the per-byte work of this process, from
            ``core.engine.device.device.device_named``; None for the CPU.
        facts: returns the fields that ``launch_of`` adds to the workers' figures.
        n_cores: number of the host's cores that this worker may use; None if unknown.
        n_local: number of workers on the host.
    """
    global _team, _device, _facts, _n_cores, _n_local
    _team = team
    _device = device
    _facts = facts
    _n_cores = n_cores
    _n_local = n_local
