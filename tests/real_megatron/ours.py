"""This project's ``core.dist_checkpointing`` in the place of ``megatron.core.dist_checkpointing``.

``take_the_place`` is called before anything of megatron-core is imported. What megatron-core
imports then under its own names is what its users get after they change the import: its models and
optimizers build our ShardedTensors and factories.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

OURS, THEIRS = "core.dist_checkpointing", "megatron.core.dist_checkpointing"


def take_the_place() -> None:
    """Gives every module of the package the name of megatron-core's, for the rest of the process.

    Raises:
        RuntimeError: megatron-core's own package is imported already.
    """
    if any(name == THEIRS or name.startswith(f"{THEIRS}.") for name in sys.modules):
        raise RuntimeError(f"{THEIRS} is imported already")
    package = importlib.import_module(OURS)
    names = [OURS, *(found.name for found in pkgutil.walk_packages(package.__path__, f"{OURS}."))]
    for name in names:
        sys.modules[THEIRS + name.removeprefix(OURS)] = importlib.import_module(name)
    import megatron.core

    megatron.core.dist_checkpointing = package


def is_in_place() -> bool:
    """Whether this process has called ``take_the_place``."""
    return THEIRS in sys.modules and sys.modules[THEIRS].__name__ == OURS
