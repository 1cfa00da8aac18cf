"""Packages that are also functions: ``core.convert(…)`` beside ``core.convert.job``.

The Python interface has the names of the commands, and so have the packages behind them. A package
whose ``__init__`` calls ``make_callable`` can be called; the call goes to the function of the same
name in ``core.api.verbs``. Importing the package stays cheap.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType


class VerbModule(ModuleType):
    """A package that can be called as the function of its name in ``core.api.verbs``."""

    @property
    def __wrapped__(self) -> object:
        """The function; ``inspect.signature`` and ``help`` follow this attribute."""
        verbs = import_module("core.api.verbs")  # late: it imports the packages that call this
        return getattr(verbs, self.__name__.rpartition(".")[2])

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function of ``core.api.verbs`` that has the name of the package."""
        return self.__wrapped__(*args, **kwargs)  # type: ignore[operator]


def make_callable(name: str) -> None:
    """Let an imported package be called.

    Args:
        name: its full name, ``core.convert``.
    """
    sys.modules[name].__class__ = VerbModule
