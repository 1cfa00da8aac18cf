"""The table of what a pickle may call: ``pickle/calls.toml``, which explains its own fields."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from core.arrays.dtypes import BY_STORAGE, DTYPES
from core.values import dataclass

Name = tuple[str, str]
"""Module and name of a class or function."""
ArgumentUse = tuple[int, Literal["called", "made"]]
"""Position of an argument, and what the called function does with that argument."""
_LABEL = "calls.toml"
_HEAD = ""
_SEVERAL = "*"


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
class _PackageRows:
    """The rows of the table about one package.

    Args:
        exact: permissions of the names without a ``*``, by module and name.
        patterns: patterns of module and name, with their permissions.
        argument_uses: function → the arguments that it calls or instantiates.
    """

    exact: dict[Name, Constructor]
    patterns: list[_Pattern]
    argument_uses: dict[Name, tuple[ArgumentUse, ...]]


def constructor(module: str, name: str) -> Constructor | None:
    """Return the permissions of a harmless constructor; None if the table does not list it."""
    package = module.partition(".")[0]
    rows = _rows_of(package)
    exact = None if rows is None else rows.exact.get((module, name))
    # A pattern never covers a module of an unknown package.
    if exact is not None or package not in packages():
        return exact
    for some in (rows, _rows_of(_SEVERAL)):
        for module_pattern, name_pattern, permissions in [] if some is None else some.patterns:
            if name_pattern.fullmatch(name) and module_pattern.fullmatch(module):
                return permissions
    return None


def argument_uses(module: str, name: str) -> tuple[ArgumentUse, ...]:
    """Return the arguments that a function calls or instantiates."""
    rows = _rows_of(module.partition(".")[0])
    return () if rows is None else rows.argument_uses.get((module, name), ())


@cache
def packages() -> frozenset[str]:
    """Return the top-level modules of well-known distributions."""
    return frozenset(tomllib.loads(_texts()[_HEAD])["packages"].split())


@cache
def _texts() -> Mapping[str, str]:
    """Return the text of the table's rows by package, as most packages occur in no checkpoint.

    Rows whose package has a ``*`` are those of ``_SEVERAL``; what precedes all rows is ``_HEAD``.
    """
    text = Path(__file__).with_name(_LABEL).read_text(encoding="utf-8")
    head, *rows = re.split(r"^(?=\[\[)", text, flags=re.MULTILINE)
    texts: dict[str, list[str]] = {_HEAD: [head]}
    for row in rows:
        package = row.partition('\nmodule = "')[2].partition('"')[0].partition(".")[0]
        texts.setdefault(_SEVERAL if "*" in package else package, []).append(row)
    return {package: "".join(rows) for package, rows in texts.items()}


def _rows_of(package: str) -> _PackageRows | None:
    """Return the rows about a package; None if it has none."""
    return _parse_rows(package) if package in _texts() else None


@cache
def _parse_rows(package: str) -> _PackageRows:
    """Parse the rows about a package, once per process."""
    parsed = tomllib.loads(_texts()[package])
    rows = _PackageRows({}, [], {})
    # torch's element types and storages are not listed in the file, as ``dtypes`` has their names.
    if package == "torch":
        dtypes = Constructor(is_data=True, may="call")
        rows.exact.update({("torch", name): dtypes for name in (*DTYPES, *BY_STORAGE)})
    sections = ("data", "framework")
    for section, entry in ((name, entry) for name in sections for entry in parsed.get(name, ())):
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
                rows.argument_uses[module, name] = (*calls, *makes)
            if "*" not in module + name:
                rows.exact[module, name] = permissions
                continue
            # A pattern of names fits classes only, which begin with a capital: functions are listed
            # one by one.
            module_pattern = _pattern(module, r"[\w.]*")
            name_pattern = _pattern(name, r"\w*", lookahead="(?=[A-Z])")
            rows.patterns.append((module_pattern, name_pattern, permissions))
    return rows


def _pattern(text: str, star: str, *, lookahead: str = "") -> re.Pattern[str]:
    """Compile a text whose ``*`` stands for the regular expression ``star``.

    Args:
        lookahead: condition on the beginning of what matches, if the text has a ``*``.
    """
    condition = lookahead if "*" in text else ""
    return re.compile(condition + star.join(map(re.escape, text.split("*"))), re.ASCII)
