"""Select the entries that the KEYs of ``ckpt inspect`` mean: tensors, objects, values in objects.

A KEY is a name or a pattern of a tensor or an object, else the path of a value inside an object
(``args.hidden_size``), else a part of names. What matches none of these is an error with the most
similar names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.key_patterns import LIST_THEM, matching
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import UsageError
from core.megatron.optimizer.form import role_of
from core.values import dataclass
from core.verbs.inspect.nested import leaves, object_value, roots_of, shared_objects, values_at
from core.verbs.inspect.summary import Summary, bare_key

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor
    from core.opening.open import Checkpoint

_Entry = TypeVar("_Entry")

_MIN_PART = 2
"""Minimum length of a KEY that is searched as a part of names."""


@dataclass(slots=True)
class SelectedEntries:
    """The entries that some KEYs select, each once, in the order of the KEYs.

    Args:
        tensors: by key.
        objects: by key; values inside objects have their path as key.
        notes: notes on KEYs that matched as a part of names.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_searched(self) -> bool:
        """True if a KEY matched several entries as a part of their names."""
        return bool(self.notes) and len(self.tensors) + len(self.objects) > 1

    def __bool__(self) -> bool:
        return bool(self.tensors or self.objects)

    def add(self, other: SelectedEntries) -> None:
        """Add the entries of another KEY."""
        self.tensors.update(other.tensors)
        self.objects.update(other.objects)
        self.notes += other.notes


def select_entries(
    checkpoint: Checkpoint, summary: Summary, patterns: Sequence[str] | None
) -> SelectedEntries:
    """Return the entries that the patterns select; all tensors and objects without patterns.

    Raises:
        UsageError: a pattern matches nothing.
        CheckpointingException: an object cannot be read.
    """
    view = summary.view
    if not patterns:
        return SelectedEntries(dict(view.tensors), dict(view.objects))
    selector = _Selector(checkpoint, summary)
    selection = SelectedEntries()
    for pattern in patterns:
        selection.add(selector.select(pattern))
    return selection


def with_selected(summary: Summary, selection: SelectedEntries) -> Summary:
    """Return a summary whose view has the selected objects, and whose notes those of the KEYs."""
    return replace(
        summary,
        view=replace(summary.view, objects={**summary.view.objects, **selection.objects}),
        notes=(*summary.notes, *selection.notes),
    )


def model_tensors(summary: Summary) -> dict[str, Tensor]:
    """Return the tensors of the view that do not belong to the optimizer."""
    view = summary.view
    return {
        key: tensor
        for key, tensor in view.tensors.items()
        if role_of(bare_key(key, view)) in ("model", "other")
        and not is_optimizer_key(bare_key(key, view))
    }


def require_key(summary: Summary, option: str) -> UsageError:
    """Build the error for an option that needs a KEY, with a command for this checkpoint.

    Args:
        option: the option as the user gave it, such as ``--values 8``.
    """
    key = next(iter(model_tensors(summary)), "KEY")
    return UsageError(
        f"{option} requires a tensor's KEY",
        hint=f"pass a KEY or a pattern: ckpt inspect {quote(summary.path)} {quote(key)} {option}",
    )


class _Selector:
    """Selects the entries of single KEYs."""

    def __init__(self, checkpoint: Checkpoint, summary: Summary) -> None:
        self._checkpoint = checkpoint
        self._view = summary.view
        self._stored = checkpoint.catalog
        self._shared = shared_objects(checkpoint, self._view)

    def select(self, pattern: str) -> SelectedEntries:
        """Return the entries that a pattern selects.

        Raises:
            UsageError: there are none.
        """
        return (
            self._by_name(pattern)
            or self._by_path(pattern)
            or self._in_all_ranks(pattern)
            or self._by_part(pattern)
            or self._refuse(pattern)
        )

    def _by_name(self, pattern: str) -> SelectedEntries:
        """Return the tensors and objects with matching names."""
        view = self._view
        tensors = {key: view.tensors[key] for key in matching(view.tensors, pattern)}
        objects = {key: view.objects[key] for key in matching(view.objects, pattern)}
        # The tensor names of rank files match, too; they differ from the global ones.
        if not tensors and self._stored is not view:
            stored = self._stored.tensors
            tensors = {key: stored[key] for key in matching(stored, pattern)}
        return SelectedEntries(tensors, objects)

    def _by_path(self, pattern: str) -> SelectedEntries:
        """Return the values inside objects at a matching path."""
        # ``args`` and ``config`` are one value; other objects of rank files are listed by rank.
        if pattern in self._shared and (
            pattern in ("args", "config") or not self._in_all_ranks(pattern)
        ):
            return SelectedEntries(objects={pattern: self._shared[pattern]})
        objects = {**self._shared, **self._view.objects}
        values = values_at(self._checkpoint, objects, pattern)
        return SelectedEntries(
            objects={key: StoredObject(key, value) for key, value in values.items()}
        )

    def _in_all_ranks(self, pattern: str) -> SelectedEntries:
        """Return the objects of all ranks: ``iteration`` selects ``mp_rank_00:iteration``, …."""
        objects = self._view.objects
        selected = {key: objects[key] for key in matching(objects, f"*:{pattern}")}
        # The paths of values inside them, of one rank after the other.
        if not selected and self._stored.is_rank_local:
            for rank in dict.fromkeys(key.partition(":")[0] for key in objects):
                values = values_at(self._checkpoint, objects, f"{rank}:{pattern}")
                selected.update((key, StoredObject(key, value)) for key, value in values.items())
        return SelectedEntries(objects=selected)

    def _by_part(self, part: str) -> SelectedEntries:
        """Return the entries whose names contain a text, regardless of case.

        Values inside the arguments and other shared objects come first, and count only if no
        tensor does: many tensors have a part in common with an argument.
        """
        text = part.lower()
        if len(text) < _MIN_PART:
            return SelectedEntries()
        view = self._view
        selection = SelectedEntries(
            _containing(view.tensors, text), _containing(view.objects, text)
        )
        if not selection:
            selection = SelectedEntries(_containing(self._stored.tensors, text))
        if not selection.tensors:
            values = _containing(dict(self._shared_values()), text)
            selection.objects = {
                **{key: StoredObject(key, value) for key, value in values.items()},
                **selection.objects,
            }
        n = len(selection.tensors) + len(selection.objects)
        if n:
            names = "one name contains" if n == 1 else f"{n:,} names contain"
            selection.notes.append(f"no key matches {part!r}, but {names} it")
        return selection

    def _shared_values(self) -> Iterator[tuple[str, object]]:
        """Yield the paths and values inside the arguments, config.json and shared entries."""
        for name, item in self._shared.items():
            yield from leaves(item.value, name)

    def _refuse(self, pattern: str) -> SelectedEntries:
        """Raise the error for a pattern that matches nothing.

        Raises:
            UsageError: always.
        """
        from core.verbs.inspect.nearest import nearest_names

        view = self._view
        # Without their rank directories, names of rank files match in all ranks.
        names = [*view.tensors, *(bare_key(key, self._stored) for key in view.objects)]
        names += [*self._shared, *(key for key, _ in self._shared_values())]
        # The object that the path begins with may have values at other paths.
        objects = {**self._shared, **view.objects}
        for root in roots_of(pattern, objects):
            value = object_value(self._checkpoint, objects[root])
            names += (key for key, _ in leaves(value, root))
        nearest = nearest_names(names, pattern)
        hint = f"did you mean {' or '.join(nearest)}? {LIST_THEM}" if nearest else LIST_THEM
        raise UsageError(f"no tensor or object matches {pattern!r}", hint=hint)


def _containing(entries: Mapping[str, _Entry], text: str) -> dict[str, _Entry]:
    """Return the entries whose keys contain a text, in lower case."""
    return {key: entry for key, entry in entries.items() if text in key.lower()}
