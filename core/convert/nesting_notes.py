"""Describe what a destination cannot keep of nesting, types and shared memory, as notes.

Every note names the entries that it is about, so that the user can look them up in the result::

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
from core.catalog.mapping_attributes import (
    MappingAttribute,
    attributes_beside_tensors,
    attributes_of,
)
from core.pickle.inert import Inert, TensorLeaf, as_mapping
from core.pickle.nesting import ListIndex, Path, containers, entries, join_path

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.catalog.stored import StoredArray

_STRING_KEYS = "non-string keys are converted to strings"
_SEPARATE = "shared objects become separate copies"


def nesting_notes(catalog: Catalog) -> list[str]:
    """Return what is lost in a format of dicts with string keys, lists and plain tensors only."""
    rows: dict[str, list[str]] = {}
    for path, node in containers(catalog.skeleton):
        name = _path_text(path)
        mapping = as_mapping(node)
        if isinstance(node, Inert):
            rows.setdefault(f"{_class(node)} becomes dict", []).append(name)
        elif isinstance(node, tuple):
            rows.setdefault("tuples become lists", []).append(name)
        for key in mapping or ():
            if not isinstance(key, str):
                rows.setdefault(_STRING_KEYS, []).append(_path_text((*path, key)))
    first: dict[int, str] = {}
    for entry in entries(catalog.skeleton):
        if isinstance(entry.leaf, (list, set, bytearray, Inert)):
            earlier = first.setdefault(id(entry.leaf), entry.key)
            if earlier != entry.key:
                rows.setdefault(_SEPARATE, []).append(f"{entry.key} ({earlier})")
    notes = [f"{text}: {listed_keys(names)}" for text, names in rows.items()]
    notes += _attribute_notes(attributes_of(catalog.skeleton))
    return notes + _tensor_notes(catalog)


def flattening_notes(catalog: Catalog, *, has_common: bool) -> list[str]:
    """Return what is lost in a format where paths are tensor names, without containers.

    Args:
        has_common: entries that are not tensors keep their nesting, in a dict of their own.
    """
    paths = [
        entry.path for entry in entries(catalog.skeleton) if isinstance(entry.leaf, TensorLeaf)
    ]
    nested = [
        path for path in paths if len(path) > 1 or any(isinstance(part, ListIndex) for part in path)
    ]
    odd = [
        _path_text(path)
        for path in paths
        if any(not isinstance(part, (str, ListIndex)) for part in path)
    ]
    notes = []
    if odd:
        notes.append(f"{_STRING_KEYS}: {listed_keys(odd)}")
    if nested:
        notes.append(
            f"nested tensors are stored under dotted names, such as {_path_text(nested[0])}"
        )
    root = catalog.skeleton
    if isinstance(root, Inert) and as_mapping(root) is not None:
        notes.append(f"{_class(root)} becomes dict: the root")
    elif has_common:
        notes += root_notes(catalog)
    elif root is not None and as_mapping(root) is None:
        notes.append("the root is not a dict and becomes one")
    notes += _attribute_notes(attributes_beside_tensors(catalog.skeleton))
    return notes + _tensor_notes(catalog)


def attributes_note(attributes: Iterable[MappingAttribute]) -> str:
    """Return a note on attributes of mappings that are left out."""
    return f"attributes of mappings are left out: {listed_keys(attribute.key for attribute in attributes)}"


def attribute_tensors_left_out(catalog: Catalog) -> list[str]:
    """Return a line for each attribute of a mapping that is left out with a tensor."""
    names = [
        attribute.key for attribute in attributes_of(catalog.skeleton) if attribute.holds_tensor
    ]
    return [
        f"{name} (a tensor in an attribute of a mapping; only torch files store those)"
        for name in names
    ]


def n_leaves(skeleton: object) -> int:
    """Return the number of tensors in mappings, lists, tuples and values of objects."""
    return sum(isinstance(entry.leaf, TensorLeaf) for entry in entries(skeleton))


def root_notes(catalog: Catalog) -> list[str]:
    """Return a note if the root is not a mapping, which the format needs."""
    is_mapping = catalog.skeleton is None or as_mapping(catalog.skeleton) is not None
    return (
        []
        if is_mapping
        else ["the root is not a dict; it is stored in one, under the name 'value'"]
    )


def sharing_notes(catalog: Catalog, *, keeps_ties: bool) -> list[str]:
    """Return notes on entries that share memory in the source and no longer in the destination.

    Args:
        keeps_ties: tensors with the same bytes still share them in the destination, or are recorded
        as equal.
    """
    notes = []
    ties = _pairs(catalog.aliases, set(catalog.tensors))
    if ties and not keeps_ties:
        notes.append(f"tied tensors are written separately: {listed_keys(ties)}")
    views = [f"{view} ({base})" for view, base in _views(catalog)]
    if views:
        notes.append(
            f"views of other tensors' memory become separate tensors: {listed_keys(views)}"
        )
    torch_file = catalog.facet(TorchFileFacts)
    shared = _pairs(
        {} if torch_file is None else torch_file.shared,
        {_path_text(path) for path, _ in containers(catalog.skeleton)} | catalog.objects.keys(),
    )
    if shared:
        notes.append(f"{_SEPARATE}: {listed_keys(shared)}")
    return notes


def recorded_notes(recorded: Mapping[str, str]) -> list[str]:
    """Return a note on tensors that the destination records by name only.

    Args:
        recorded: tensor → the tensor that holds its bytes.
    """
    if not recorded:
        return []
    key, first = next(iter(recorded.items()))
    untie = f"--untie {key}={first}{' …' if len(recorded) > 1 else ''}"
    names = listed_keys(f"{key} ({first})" for key, first in recorded.items())
    return [
        f"tied tensors are stored once, under the name in brackets ({untie} writes both): {names}"
    ]


def _attribute_notes(attributes: Iterable[MappingAttribute]) -> list[str]:
    """Return a note on those attributes of mappings that hold no tensor."""
    plain = [attribute for attribute in attributes if not attribute.holds_tensor]
    return [attributes_note(plain)] if plain else []


def _tensor_notes(catalog: Catalog) -> list[str]:
    """Return notes on tensors that lose their wrapper, or whose keys are not their paths."""
    leaves = [
        (entry, entry.leaf)
        for entry in entries(catalog.skeleton)
        if isinstance(entry.leaf, TensorLeaf)
    ]
    notes = []
    parameters = [
        _path_text(entry.path)
        for entry, leaf in leaves
        if leaf.wrapper is not None or leaf.requires_grad
    ]
    if parameters:
        notes.append(f"Parameter and requires_grad become plain tensors: {listed_keys(parameters)}")
    # Where several paths join to one key, all but the first get a number or an escaped dot.
    collisions = [
        entry.key
        for entry, _ in leaves
        if ("\\." in entry.key or re.search(r"~\d+$", entry.key))
        and entry.key != _path_text(entry.path)
    ]
    if collisions:
        notes.append(
            f"tensors whose dotted paths collide get distinct keys: {listed_keys(collisions)}"
        )
    return notes


def _views(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield (tensor, earlier tensor) for different tensors of torch files that share bytes."""
    if catalog.format not in ("torch", "torch_bin"):
        return
    # Group the arrays by file; tied tensors are reported elsewhere.
    aliases = catalog.aliases
    arrays: dict[str, list[StoredArray]] = {}
    for key in catalog.tensors:
        array = catalog.fragments(key)[0].array
        if (
            key not in aliases
            and array is not None
            and array.n_bytes
            and array.extent.encoding is None
        ):
            arrays.setdefault(array.extent.file, []).append(replace(array, name=key))
    # In order of their first byte, an array overlaps an earlier one if it begins before that one's end.
    for file_arrays in arrays.values():
        base: StoredArray | None = None
        for array in sorted(file_arrays, key=lambda array: (_span(array)[0], -_span(array)[1])):
            if base is not None and _span(array)[0] < _span(base)[1]:
                if (array.extent, array.shape) != (base.extent, base.shape):
                    yield array.name, base.name
            if base is None or _span(array)[1] > _span(base)[1]:
                base = array


def _span(array: StoredArray) -> tuple[int, int]:
    """Return the file range from the first to the last byte of a dense or strided array."""
    strides = array.extent.strides or c_strides(array.shape)
    last = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True))
    return array.extent.offset, array.extent.offset + (last + 1) * itemsize(array.dtype)


def _pairs(first_of: Mapping[str, str], keys: Set[str]) -> list[str]:
    """Return ``key (first)`` for each key of a table whose key and first both remain."""
    return [f"{key} ({first})" for key, first in first_of.items() if key in keys and first in keys]


def _class(node: Inert) -> str:
    return node.class_name.rpartition(".")[2]


def _path_text(path: Path) -> str:
    return join_path(path) or "the root"
