"""The checkpoint engine: opens, converts, reshards and verifies training checkpoints.

As a Python interface: ``core.open``, ``convert``, ``reshard``, ``merge``, ``validate``, ``diff``,
``inspect`` and ``prune`` (``docs/guide/python.md``). To read the engine, start at
``docs/explanation/architecture.md``, or at ``core.verbs.convert.run``. The names that this module
exports are imported when they are first used, so that ``import core`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from core.version import __version__ as __version__

if TYPE_CHECKING:
    from core.api.checkpoint import OpenCheckpoint as OpenCheckpoint
    from core.api.checkpoint import open as open
    from core.api.tensor import LazyTensor as LazyTensor
    from core.api.verbs import convert as convert
    from core.api.verbs import diff as diff
    from core.api.verbs import inspect as inspect
    from core.api.verbs import merge as merge
    from core.api.verbs import prune as prune
    from core.api.verbs import reshard as reshard
    from core.api.verbs import validate as validate
    from core.engine.catalog.catalog import Catalog as Catalog
    from core.errors import CheckpointingException as CheckpointingException
    from core.formats.format import Format as Format
    from core.opening.open import Checkpoint as Checkpoint
    from core.opening.open import open_checkpoint as open_checkpoint
    from core.verbs.convert.job import Job as Job
    from core.verbs.convert.job import Report as Report
    from core.verbs.convert.job import TopologyChange as TopologyChange

_MODULES = {
    "Catalog": "core.engine.catalog.catalog",
    "Checkpoint": "core.opening.open",
    "CheckpointingException": "core.errors",
    "Format": "core.formats.format",
    "Job": "core.verbs.convert.job",
    "LazyTensor": "core.api.tensor",
    "OpenCheckpoint": "core.api.checkpoint",
    "Report": "core.verbs.convert.job",
    "TopologyChange": "core.verbs.convert.job",
    "open": "core.api.checkpoint",
    "open_checkpoint": "core.opening.open",
    "convert": "core.api.verbs",
    "diff": "core.api.verbs",
    "inspect": "core.api.verbs",
    "merge": "core.api.verbs",
    "prune": "core.api.verbs",
    "reshard": "core.api.verbs",
    "validate": "core.api.verbs",
}

__all__ = [*_MODULES, "__version__"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
