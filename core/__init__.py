"""The checkpoint engine: opens, converts, reshards and verifies training checkpoints.

Start at ``docs/explanation/architecture.md``, or at ``core.convert.run``. The names that this
module exports are imported when they are first used, so that ``import core`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog as Catalog
    from core.convert.job import Job as Job
    from core.convert.job import Report as Report
    from core.convert.job import TopologyChange as TopologyChange
    from core.errors import CheckpointingException as CheckpointingException
    from core.formats.format import Format as Format
    from core.opening.open import Checkpoint as Checkpoint
    from core.opening.open import open_checkpoint as open_checkpoint

__version__ = "0.1.0"

_MODULES = {
    "Catalog": "core.catalog.catalog",
    "Checkpoint": "core.opening.open",
    "CheckpointingException": "core.errors",
    "Format": "core.formats.format",
    "Job": "core.convert.job",
    "Report": "core.convert.job",
    "TopologyChange": "core.convert.job",
    "open_checkpoint": "core.opening.open",
}

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
