"""The record of what is not carried (``Catalog.dropped``), and the lines that tell of it.

Every step between reading and writing that leaves entries out, as the destination or the layout
has no place for them, adds to it: ``core.engine.catalog.removal.drop_entries`` where entries leave
a catalog; readers, and steps that build a new catalog, with the functions of this file.
``core.verbs.convert.prepare`` joins the records. What the user excluded, copies of weights, and a
schedule that Megatron starts anew are notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor

ADAPTER_CONFIG = "adapter_config.json"
"""The configuration of an adapter that peft wrote."""
FILES_BESIDE = "sidecar files, which this format does not include"
"""The reason for not carrying these files over."""
UNREAD = "other files in the directory"
"""The reason for not carrying files over that no reader opened."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Entries of a checkpoint that are not carried over, for one reason.

    ``str`` gives their line in the complete list, ``name (reason)`` for a single entry.

    Args:
        names: names of the entries: keys, or paths of files; at least one.
        reason: why the destination does not hold them; "" if the name says it.
        line: the line, if it is not that of a single entry.
        tensors: the tensors among the entries (``core.verbs.convert.account``).
        is_listed: False for what the user excluded, what other entries say as well, and what no
            reader misses (padding, rounded copies).
    """

    names: tuple[str, ...]
    reason: str
    line: str | None = None
    tensors: tuple[Tensor[Any], ...] = ()
    is_listed: bool = True

    def __str__(self) -> str:
        return "".join(self.label_and_ending)

    @property
    def label_and_ending(self) -> tuple[str, str]:
        """The key that begins the line, "" if none does, and the rest of the line."""
        if self.line is None:
            return self.names[0], f" ({self.reason})" if self.reason else ""
        key, mark, rest = self.line.partition(" (")
        return (key, mark + rest) if mark else ("", self.line)

    @property
    def is_of_optimizer(self) -> bool:
        """True for the optimizer, or a part of it."""
        return is_optimizer_key(self.names[0].partition(" ")[0])


def dropped_each(
    names: Iterable[object], reason: str, tensors: Mapping[str, Tensor[Any]] | None = None
) -> tuple[Dropped, ...]:
    """Return the record of entries that have a line each: ``name (reason)``.

    Args:
        tensors: by name; an entry that is none of them is another value.
    """
    tensors = tensors or {}
    return tuple(
        Dropped((name,), reason, tensors=(tensors[name],) if name in tensors else ())
        for name in map(str, names)
    )


def dropped_unlisted(tensors: Mapping[str, Tensor[Any]], reason: str) -> tuple[Dropped, ...]:
    """Return the record of tensors that are not listed; none without any.

    Args:
        tensors: by any name.
        reason: why they are neither written nor listed.
    """
    if not tensors:
        return ()
    return (Dropped(tuple(tensors), reason, tensors=tuple(tensors.values()), is_listed=False),)


def dropped_together(names: Iterable[str], reason: str) -> tuple[Dropped, ...]:
    """Return the record of entries that share a line: ``reason: name, name``; none without any."""
    names = tuple(names)
    return (Dropped(names, reason, f"{reason}: {', '.join(names)}"),) if names else ()
