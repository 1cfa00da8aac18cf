"""What a destination cannot keep of a state dict's nesting, types and shared memory, as notes of a summary.

Every note names the entries that it is about, so that a reader of the result can look them up::

    OrderedDict becomes dict: model, ema.model
    tied tensors are written separately: lm_head.weight (embed.weight)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.arrays.dtypes import itemsize
from core.catalog.facets import TorchFileFacts
from core.catalog.key_patterns import listed_keys
from core.catalog.mapping_attributes import MappingAttribute, attributes_beside_tensors, attributes_of
from core.pickle.inert import Inert, TensorLeaf, as_mapping
from core.pickle.nesting import ListIndex, Path, containers, entries, join_path

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.catalog.stored import StoredArray

_SEPARATE = "objects that several places share become separate copies"


def nesting_notes(catalog: Catalog) -> list[str]:
    """Return what a format loses that knows only dicts with string keys, lists, and plain tensors."""
    rows: dict[str, list[str]] = {}
    for path, node in containers(catalog.skeleton):
        name = _joined(path)
        mapping = as_mapping(node)
        if isinstance(node, Inert):
            rows.setdefault(f"{_class(node)} becomes dict", []).append(name)
        elif isinstance(node, tuple):
            rows.setdefault("tuples become lists", []).append(name)
        for key in mapping or ():
            if not isinstance(key, str):
                rows.setdefault("keys that are not strings become strings", []).append(_joined((*path, key)))
    first: dict[int, str] = {}
    for entry in entries(catalog.skeleton):
        if isinstance(entry.leaf, (list, set, bytearray, Inert)):
            earlier = first.setdefault(id(entry.leaf), entry.key)
            if earlier != entry.key:
                rows.setdefault(_SEPARATE, []).append(f"{entry.key} ({earlier})")
    notes = [f"{what}: {listed_keys(names)}" for what, names in rows.items()]
    notes += _attribute_notes(attributes_of(catalog.skeleton))
    return notes + _parameter_notes(catalog) + _collision_notes(catalog)


def flattening_notes(catalog: Catalog, *, has_common: bool) -> list[str]:
    """Return what a format loses that has no containers around tensors: their paths become their names.

    Args:
        has_common: other entries keep their nesting, in a dict of their own.
    """
    paths = [entry.path for entry in entries(catalog.skeleton) if isinstance(entry.leaf, TensorLeaf)]
    nested = [path for path in paths if len(path) > 1 or any(isinstance(part, ListIndex) for part in path)]
    odd = [_joined(path) for path in paths if any(not isinstance(part, (str, ListIndex)) for part in path)]
    notes = []
    if odd:
        notes.append(f"keys that are not strings become strings: {listed_keys(odd)}")
    if nested:
        such = _joined(nested[0])
        notes.append(f"containers are not stored, the tensors in them are called by their paths, such as {such}")
    root = catalog.skeleton
    if isinstance(root, Inert) and as_mapping(root) is not None:
        notes.append(f"{_class(root)} becomes dict: the root")
    elif has_common:
        notes += root_notes(catalog)
    elif root is not None and as_mapping(root) is None:
        notes.append("the root is not a dict, and becomes one")
    notes += _attribute_notes(attributes_beside_tensors(catalog.skeleton))
    return notes + _parameter_notes(catalog) + _collision_notes(catalog)


def attributes_note(attributes: Iterable[MappingAttribute]) -> str:
    """Return a note on attributes of mappings that are left out."""
    return f"attributes of mappings are left out: {listed_keys(attribute.key for attribute in attributes)}"


def attribute_tensors_left_out(catalog: Catalog) -> list[str]:
    """Return what is left out with the attributes of mappings that hold tensors, as lines of a summary."""
    names = [attribute.key for attribute in attributes_of(catalog.skeleton) if attribute.holds_tensor]
    return [f"{name} (a tensor in an attribute of a mapping, which only torch files hold)" for name in names]


def n_leaves(skeleton: object) -> int:
    """Return how many tensors stand in mappings, lists and tuples, those of objects' values included."""
    return sum(isinstance(entry.leaf, TensorLeaf) for entry in entries(skeleton))


def root_notes(catalog: Catalog) -> list[str]:
    """Return what becomes of a root that is not a mapping where the format needs one."""
    is_mapping = catalog.skeleton is None or as_mapping(catalog.skeleton) is not None
    return [] if is_mapping else ["the root is not a dict, so it stands in one, under the name 'value'"]


def sharing_notes(catalog: Catalog, *, keeps_ties: bool) -> list[str]:
    """Return which entries share memory in the source and no longer in the destination.

    Args:
        keeps_ties: tensors with the same bytes still share them there, or are recorded as equal.
    """
    notes = []
    ties = _pairs(catalog.aliases, set(catalog.tensors))
    if ties and not keeps_ties:
        notes.append(f"tied tensors are written separately: {listed_keys(ties)}")
    views = [f"{view} ({base})" for view, base in _views(catalog)]
    if views:
        notes.append(f"tensors that are views of others' memory get memory of their own: {listed_keys(views)}")
    torch_file = catalog.facet(TorchFileFacts)
    shared = _pairs(
        {} if torch_file is None else torch_file.shared,
        {_joined(path) for path, _ in containers(catalog.skeleton)} | catalog.objects.keys(),
    )
    if shared:
        notes.append(f"{_SEPARATE}: {listed_keys(shared)}")
    return notes


def recorded_notes(recorded: Mapping[str, str]) -> list[str]:
    """Return a note on tensors of which the destination has the names only.

    Args:
        recorded: tensor → the one whose bytes are there.
    """
    if not recorded:
        return []
    key, first = next(iter(recorded.items()))
    untie = f"--untie {key}={first}{' …' if len(recorded) > 1 else ''}"
    names = listed_keys(f"{key} ({first})" for key, first in recorded.items())
    return [f"tied tensors are in the file once, under the name in brackets ({untie} writes both): {names}"]


def _attribute_notes(attributes: Iterable[MappingAttribute]) -> list[str]:
    """Return a note on those attributes that hold no tensor; ``attribute_tensors_left_out`` lists the others."""
    plain = [attribute for attribute in attributes if not attribute.holds_tensor]
    return [attributes_note(plain)] if plain else []


def _parameter_notes(catalog: Catalog) -> list[str]:
    leaves = [(entry.path, entry.leaf) for entry in entries(catalog.skeleton) if isinstance(entry.leaf, TensorLeaf)]
    names = [_joined(path) for path, leaf in leaves if leaf.wrapper is not None or leaf.requires_grad]
    return [f"Parameter and requires_grad become plain tensors: {listed_keys(names)}"] if names else []


def _collision_notes(catalog: Catalog) -> list[str]:
    """A note on tensors whose keys are not their paths, because several paths join to one key."""
    names = [
        entry.key
        for entry in entries(catalog.skeleton)
        if isinstance(entry.leaf, TensorLeaf)
        and ("\\." in entry.key or re.search(r"~\d+$", entry.key))
        and entry.key != _joined(entry.path)
    ]
    return [f"tensors whose paths collide get keys of their own: {listed_keys(names)}"] if names else []


def _views(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """(tensor, one before it) for tensors of torch's files that lie in the same bytes, but are not the same tensor."""
    if catalog.format not in ("torch", "torch_bin"):
        return
    aliases = catalog.aliases
    arrays: dict[str, list[StoredArray]] = {}
    for key in catalog.tensors:
        array = catalog.fragments(key)[0].array
        is_tied = key in aliases
        if not is_tied and array is not None and array.n_bytes and array.extent.encoding is None:
            arrays.setdefault(array.extent.file, []).append(replace(array, name=key))
    for in_file in arrays.values():
        base: StoredArray | None = None
        for array in sorted(in_file, key=lambda array: (_span(array)[0], -_span(array)[1])):
            if base is not None and _span(array)[0] < _span(base)[1]:
                if (array.extent, array.shape) != (base.extent, base.shape):
                    yield array.name, base.name
            if base is None or _span(array)[1] > _span(base)[1]:
                base = array


def _span(array: StoredArray) -> tuple[int, int]:
    """The bytes of a file between the first and the last element of a dense or strided array."""
    strides = array.extent.strides or c_strides(array.shape)
    last = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True))
    return array.extent.offset, array.extent.offset + (last + 1) * itemsize(array.dtype)


def _pairs(first_of: Mapping[str, str], keys: Set[str]) -> list[str]:
    """``key (first)`` for the rows of a table from keys to the first of their kind, of those that remain."""
    return [f"{key} ({first})" for key, first in first_of.items() if key in keys and first in keys]


def _class(node: Inert) -> str:
    return node.class_name.rpartition(".")[2]


def _joined(path: Path) -> str:
    return join_path(path) or "the root"
