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
Handed = tuple[int, Literal["called", "made"]]
_LABEL = "calls.toml"


@dataclass(frozen=True, slots=True)
class Constructor:
    """A row of the table.

    Args:
        is_data: conversions keep such objects.
        may: what a pickle may do with it: ``name`` it, also ``make`` it without ``__init__``, or even ``call`` it.
        is_enum: its members may be named as attributes.
        may_be_bound: ``functools.partial`` may bind arguments to it, though a pickle may not call it.
    """

    is_data: bool
    may: Literal["name", "make", "call"]
    is_enum: bool = False
    may_be_bound: bool = False


_Pattern = tuple[re.Pattern[str], re.Pattern[str], Constructor]


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows, by name and by pattern, the packages, and what functions call or make of their arguments."""

    packages: frozenset[str]
    exact: dict[Name, Constructor]
    patterns: dict[str, list[_Pattern]]
    """By the package; ``""`` for those of several."""
    handed: dict[Name, tuple[Handed, ...]]


def constructor(module: str, name: str) -> Constructor | None:
    """Return the row of a harmless constructor, or None."""
    table = _table()
    exact = table.exact.get((module, name))
    package = module.partition(".")[0]
    if exact is not None or package not in table.packages:
        return exact
    for module_pattern, name_pattern, row in [*table.patterns.get(package, []), *table.patterns[""]]:
        if name_pattern.fullmatch(name) and module_pattern.fullmatch(module):
            return row
    return None


def handed(module: str, name: str) -> tuple[Handed, ...]:
    """Return the positions of the arguments that a function calls, or makes instances of."""
    return _table().handed.get((module, name), ())


def packages() -> frozenset[str]:
    """Return the top-level modules of well-known distributions."""
    return _table().packages


@lru_cache(maxsize=1)
def _table() -> _Table:
    parsed = tomllib.loads(files("core.pickle").joinpath(_LABEL).read_text(encoding="utf-8"))
    dtypes = Constructor(is_data=True, may="call")
    exact = {("torch", name): dtypes for name in (*DTYPES, *BY_STORAGE)}
    patterns: dict[str, list[_Pattern]] = {"": []}
    handed_of: dict[Name, tuple[Handed, ...]] = {}
    for kind in ("data", "framework"):
        for line in parsed[kind]:
            row = Constructor(kind == "data", line["may"], line.get("enum", False), line.get("bind", False))
            for name in line["names"].split():
                key = line["module"], name
                if "*" in line["module"] or "*" in name:
                    package = line["module"].partition(".")[0]
                    listed = patterns.setdefault("" if "*" in package else package, [])
                    listed.append((_pattern(line["module"], r"[\w.]*"), _name_pattern(name), row))
                else:
                    exact[key] = row
                calls: list[Handed] = [(position, "called") for position in line.get("calls", ())]
                makes: list[Handed] = [(position, "made") for position in line.get("makes", ())]
                if calls or makes:
                    handed_of[key] = (*calls, *makes)
    return _Table(frozenset(parsed["packages"].split()), exact, patterns, handed_of)


def _pattern(text: str, star: str) -> re.Pattern[str]:
    return re.compile(star.join(map(re.escape, text.split("*"))), re.ASCII)


def _name_pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a class's name, which begins with a capital where it has a ``*``."""
    return re.compile(("(?=[A-Z])" if "*" in text else "") + _pattern(text, r"\w*").pattern, re.ASCII)
