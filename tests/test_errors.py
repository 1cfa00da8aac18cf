"""The tree of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from core import errors


def subclasses(cls: type[errors.CheckpointingException]) -> Iterator[str]:
    """Yield the rows of the tree below a class: depth, name and exit code."""
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield f"1 {child.__name__} {child.exit_code}"
            yield from (f"{int(row[0]) + 1}{row[1:]}" for row in subclasses(child))


def test_the_tree_that_the_module_draws_is_that_of_its_classes() -> None:
    drawn = [
        f"{len(lead) // 4 - 1} {name} {code}"
        for lead, name, code in re.findall(
            r"^( {4}[│├└─ ]+)(\w+) +(\d)", errors.__doc__ or "", re.MULTILINE
        )
    ]
    actual = list(subclasses(errors.CheckpointingException))
    assert len(actual) > 10
    assert drawn == actual
