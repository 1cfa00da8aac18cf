"""The table of what a pickle may call: ``pickle/calls.toml``, which explains its own fields."""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from core.arrays.dtypes import BY_STORAGE, DTYPES
from core.values import dataclass

Name = tuple[str, str]
"""Module and name of a class or function."""
ArgumentUse = tuple[int, Literal["called", "made"]]
"""Position of an argument, and what the called function does with that argument."""
_LABEL = "calls.toml"


@dataclass(frozen=True, slots=True)
class Constructor:
    """The permissions of a class or function that is listed in the table.

    Args:
        is_data: conversions keep its objects.
        may: the strongest permitted use, each of which includes the previous one: ``name`` it,
            ``make`` an instance without ``__init__``, ``call`` it.
        is_enum: an enumeration, whose members may be named as attributes.
        may_be_bound: ``functools.partial`` may bind arguments to it, although a pickle may not
            call it.
    """

    is_data: bool
    may: Literal["name", "make", "call"]
    is_enum: bool = False
    may_be_bound: bool = False

    def allows(self, how: str) -> bool:
        """Return whether the table permits a use (a ``core.pickle.uses.How``)."""
        return how in _ALLOWED[self.may] or (how == "bound" and self.may_be_bound)


_ALLOWED = {
    "name": ("named",),
    "make": ("named", "made"),
    "call": ("named", "made", "called", "bound"),
}
"""``Constructor.may`` → the uses that it permits."""

_Pattern = tuple[re.Pattern[str], re.Pattern[str], Constructor]


@dataclass(frozen=True, slots=True)
class _Table:
    """The parsed table.

    Args:
        packages: top-level modules of well-known distributions.
        exact: permissions of the names without a ``*``, by module and name.
        patterns: package → patterns of module and name with their permissions; ``""`` for patterns
            that fit several packages.
        argument_uses: function → the arguments that it calls or instantiates.
    """

    packages: frozenset[str]
    exact: dict[Name, Constructor]
    patterns: dict[str, list[_Pattern]]
    argument_uses: dict[Name, tuple[ArgumentUse, ...]]


def constructor(module: str, name: str) -> Constructor | None:
    """Return the permissions of a harmless constructor; None if the table does not list it."""
    table = _table()
    exact = table.exact.get((module, name))
    package = module.partition(".")[0]
    # A pattern never covers a module of an unknown package.
    if exact is not None or package not in table.packages:
        return exact
    patterns = [*table.patterns.get(package, []), *table.patterns[""]]
    for module_pattern, name_pattern, permissions in patterns:
        if name_pattern.fullmatch(name) and module_pattern.fullmatch(module):
            return permissions
    return None


def argument_uses(module: str, name: str) -> tuple[ArgumentUse, ...]:
    """Return the arguments that a function calls or instantiates."""
    return _table().argument_uses.get((module, name), ())


def packages() -> frozenset[str]:
    """Return the top-level modules of well-known distributions."""
    return _table().packages


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Parse the table, once per process."""
    parsed = tomllib.loads(files("core.pickle").joinpath(_LABEL).read_text(encoding="utf-8"))
    # torch's element types and storages are not listed in the file, as ``dtypes`` has their names.
    dtypes = Constructor(is_data=True, may="call")
    exact = {("torch", name): dtypes for name in (*DTYPES, *BY_STORAGE)}
    patterns: dict[str, list[_Pattern]] = {"": []}
    uses: dict[Name, tuple[ArgumentUse, ...]] = {}
    sections = [(section, entry) for section in ("data", "framework") for entry in parsed[section]]
    for section, entry in sections:
        module = entry["module"]
        permissions = Constructor(
            is_data=section == "data",
            may=entry["may"],
            is_enum=entry.get("enum", False),
            may_be_bound=entry.get("bind", False),
        )
        # Arguments that the functions of this entry call or instantiate.
        calls: list[ArgumentUse] = [(position, "called") for position in entry.get("calls", ())]
        makes: list[ArgumentUse] = [(position, "made") for position in entry.get("makes", ())]
        for name in entry["names"].split():
            if calls or makes:
                uses[module, name] = (*calls, *makes)
            if "*" not in module + name:
                exact[module, name] = permissions
                continue
            # Patterns are grouped by package, so that a look-up tries few of them. A pattern of
            # names fits classes only, which begin with a capital: functions are listed one by one.
            package = module.partition(".")[0]
            module_pattern = _pattern(module, r"[\w.]*")
            name_pattern = _pattern(name, r"\w*", lookahead="(?=[A-Z])")
            patterns.setdefault("" if "*" in package else package, []).append(
                (module_pattern, name_pattern, permissions)
            )
    return _Table(frozenset(parsed["packages"].split()), exact, patterns, uses)


def _pattern(text: str, star: str, *, lookahead: str = "") -> re.Pattern[str]:
    """Compile a text whose ``*`` stands for the regular expression ``star``.

    Args:
        lookahead: condition on the beginning of what matches, if the text has a ``*``.
    """
    condition = lookahead if "*" in text else ""
    return re.compile(condition + star.join(map(re.escape, text.split("*"))), re.ASCII)
