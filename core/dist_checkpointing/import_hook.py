"""Imports of ``megatron.core.dist_checkpointing`` that find this package.

Source: importlib's protocol of finders and loaders (Python language reference, 5.3 and 5.4).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

from typing_extensions import override

from core.errors import UsageError

OURS, MEGATRONS = "core.dist_checkpointing", "megatron.core.dist_checkpointing"


def as_megatron() -> None:
    """Let this package be imported as ``megatron.core.dist_checkpointing``.

    Call it before anything of Megatron is imported. For the rest of the process, every import of
    ``megatron.core.dist_checkpointing``, or of a module in it, then gives the module of the same
    name in ``core.dist_checkpointing``, whoever imports it: Megatron's models and optimizers build
    our ``ShardedTensor``, its training script calls our ``save`` and ``load``. The rest of Megatron
    stays its own. A module that only the replaced package has is not found, so that the two never
    mix. Nothing is imported yet, and a second call changes nothing.

    ``save`` then replaces a checkpoint in its directory unless ``overwrite`` is False: the training
    script cannot ask for it, and a run that was set back to an earlier iteration saves over later
    ones.

    Raises:
        UsageError: Megatron's own package has been imported already, so that some of its classes
            would be its own.
    """
    if replaces_megatron():
        return
    if MEGATRONS in sys.modules:
        raise UsageError(
            f"{MEGATRONS} has already been imported, so it cannot be replaced",
            hint="call as_megatron() before the first import of megatron",
        )
    sys.meta_path.insert(0, _Finder())


def replaces_megatron() -> bool:
    """Return whether ``as_megatron`` was called in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(MetaPathFinder, Loader):
    """A finder and loader of our modules under the names of Megatron's."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = OURS + fullname.removeprefix(MEGATRONS)
        is_replaced = fullname == MEGATRONS or fullname.startswith(f"{MEGATRONS}.")
        if not is_replaced or find_spec(name) is None:
            return None
        return spec_from_loader(fullname, self, origin=name)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(OURS + spec.name.removeprefix(MEGATRONS))
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        # The import has given the module the alias's spec: reload, pickle and inspect need its own.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
