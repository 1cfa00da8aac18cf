"""The table of what a pickle may call, ``pickle/calls.toml``, which explains its fields."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from core.arrays.dtypes import BY_STORAGE, DTYPES

Name = tuple[str, str]
"""Module and name of a class or function."""
ArgumentUse = tuple[int, Literal["called", "made"]]
"""Position of an argument, and what the function that gets it does with it."""
_LABEL = "calls.toml"


@dataclass(frozen=True, slots=True)
class Constructor:
    """A row of the table.

    Args:
        is_data: conversions keep such objects.
        may: what a pickle may do with it: ``name`` it, also ``make`` it without ``__init__``, or
            even ``call`` it.
        is_enum: its members may be named as attributes.
        may_be_bound: ``functools.partial`` may bind arguments to it, though a pickle may not call
            it.
    """

    is_data: bool
    may: Literal["name", "make", "call"]
    is_enum: bool = False
    may_be_bound: bool = False


_Pattern = tuple[re.Pattern[str], re.Pattern[str], Constructor]


@dataclass(frozen=True, slots=True)
class _Table:
    """The parsed table.

    Args:
        packages: top-level modules of well-known distributions.
        exact: rows without a ``*``, by module and name.
        patterns: package → patterns of module and name with their row; ``""`` for those that fit
            several packages.
        argument_uses: function → those of its arguments that it calls or makes instances of.
    """

    packages: frozenset[str]
    exact: dict[Name, Constructor]
    patterns: dict[str, list[_Pattern]]
    argument_uses: dict[Name, tuple[ArgumentUse, ...]]


def constructor(module: str, name: str) -> Constructor | None:
    """Return the row of a harmless constructor; None if the table has no row for it."""
    table = _table()
    exact = table.exact.get((module, name))
    package = module.partition(".")[0]
    if exact is not None or package not in table.packages:
        return exact
    for module_pattern, name_pattern, row in [
        *table.patterns.get(package, []),
        *table.patterns[""],
    ]:
        if name_pattern.fullmatch(name) and module_pattern.fullmatch(module):
            return row
    return None


def argument_uses(module: str, name: str) -> tuple[ArgumentUse, ...]:
    """Return the arguments that a function calls, or makes instances of."""
    return _table().argument_uses.get((module, name), ())


def packages() -> frozenset[str]:
    """Return the top-level modules of well-known distributions."""
    return _table().packages


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Parse the table, once per process."""
    parsed = tomllib.loads(files("core.pickle").joinpath(_LABEL).read_text(encoding="utf-8"))
    # The names of torch's element types and storages need no entry in the file.
    dtypes = Constructor(is_data=True, may="call")
    exact = {("torch", name): dtypes for name in (*DTYPES, *BY_STORAGE)}
    patterns: dict[str, list[_Pattern]] = {"": []}
    uses: dict[Name, tuple[ArgumentUse, ...]] = {}
    for section in ("data", "framework"):
        for entry in parsed[section]:
            module = entry["module"]
            row = Constructor(
                section == "data", entry["may"], entry.get("enum", False), entry.get("bind", False)
            )
            # The arguments that a function of this entry calls, or makes instances of.
            calls: list[ArgumentUse] = [(position, "called") for position in entry.get("calls", ())]
            makes: list[ArgumentUse] = [(position, "made") for position in entry.get("makes", ())]
            # Names with a * are patterns, sorted by package so that few are tried.
            for name in entry["names"].split():
                if "*" in module or "*" in name:
                    package = module.partition(".")[0]
                    package_patterns = patterns.setdefault("" if "*" in package else package, [])
                    package_patterns.append((_pattern(module, r"[\w.]*"), _name_pattern(name), row))
                else:
                    exact[module, name] = row
                if calls or makes:
                    uses[module, name] = (*calls, *makes)
    return _Table(frozenset(parsed["packages"].split()), exact, patterns, uses)


def _pattern(text: str, star: str) -> re.Pattern[str]:
    """Compile a text whose ``*`` stands for the regular expression ``star``."""
    return re.compile(star.join(map(re.escape, text.split("*"))), re.ASCII)


def _name_pattern(text: str) -> re.Pattern[str]:
    """Compile the pattern of a class's name; with a ``*`` the name must begin with a capital."""
    capital = "(?=[A-Z])" if "*" in text else ""
    return re.compile(capital + _pattern(text, r"\w*").pattern, re.ASCII)
