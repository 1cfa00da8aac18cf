"""The team that this process belongs to: of one, unless ``ckpt_cli.worker`` has joined it to others.

Verbs pass ``team()`` to the engine, and ``device()`` for its per-byte work; only the lead prints. What all workers did
is ``launch`` in the JSON of a verb (fields may be added)::

    {"n_workers": int, "n_hosts": int, "balance": float, "workers": [{"rank": int, "host": str, "read_bytes": int,
     "written_bytes": int, "seconds": float}], "launcher": str, "backend": str, "device": str, "restarts": int,
     "n_meetings": int, "collective_bytes": int, "store_bytes": int, "device_work": [{"work": str, "is_on_device": bool,
     "reason": str, "cpu_bytes_per_s": int | null, "device_bytes_per_s": int | null}]}

``collective_bytes`` are what all workers together sent one another at meetings, ``store_bytes`` what went to and from
the store (who is there, and how far); no byte of a tensor is among them. ``device_work`` is there with ``--device``:
where the lead did which kind of per-byte work, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from core.device.device import Device
from core.team.protocol import ALONE, Figures, Team, summarize_figures

_team: Team = ALONE
_device: Device | None = None
_facts: Callable[[], dict[str, object]] = dict
_n_cores: int | None = None


def team() -> Team:
    """The team of this process."""
    return _team


def device() -> Device | None:
    """The device of this process; None for the CPU path."""
    return _device


def worker_threads() -> int | None:
    """How many threads a worker starts that was not told: one for each of its cores, but no fewer than 2.

    None where the process works alone, or the launcher does not say how many workers share a host.
    """
    return None if _n_cores is None else min(max(_n_cores, 2), 64)


def launch_of(figures: Sequence[Figures]) -> dict[str, object]:
    """``{"launch": …}`` for a verb's JSON, at the lead; nothing where a process works alone, without a device.

    Args:
        figures: of the workers; none of one that works alone.
    """
    if not figures and _device is None:
        return {}
    return {"launch": {**(summarize_figures(figures) if figures else {}), **_facts(), **_device_work()}}


def _device_work() -> dict[str, object]:
    if _device is None:
        return {}
    from core.calibration.choice import decisions

    return {"device_work": [asdict(one) for one in decisions(_device)]}


def join(
    found: Team,
    device: Device | None = None,
    *,
    facts: Callable[[], dict[str, object]] = dict,
    n_cores: int | None = None,
) -> None:
    """Makes this process one of a team, before its verb runs.

    Args:
        device: where it does its per-byte work, see ``core.device.device.device_named``.
        facts: what ``launch_of`` says of the team beside the workers' figures.
        n_cores: this worker's share of its host's cores; None if that is not known.
    """
    global _team, _device, _facts, _n_cores
    _team = found
    _device = device
    _facts = facts
    _n_cores = n_cores
