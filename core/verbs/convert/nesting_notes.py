"""Notes on nesting, types and shared memory that a destination cannot keep.

Every note names the entries that it is about, so that the user can look them up in the result::

    OrderedDict becomes dict: model, ema.model
    tied tensors are written separately: lm_head.weight (embed.weight)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.arrays.dtypes import itemsize
from core.engine.catalog.dropped import Dropped, dropped_each, dropped_unlisted
from core.engine.catalog.facets import TorchFileFacts
from core.engine.catalog.mapping_attributes import (
    MappingAttribute,
    attributes_beside_tensors,
    attributes_of,
    record_attributes,
)
from core.errors import list_some
from core.formats.format import Format
from core.opening.objects import state_dict
from core.opening.target import keeps_containers
from core.pickle.inert import Inert, TensorLeaf, as_mapping
from core.pickle.nesting import ListIndex, Path, containers, entries, join_path
from core.verbs.convert.global_form.form import is_model_form

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.stored import StoredArray

_STRING_KEYS = "non-string keys are converted to strings"
_SEPARATE = "shared objects become separate copies"


def describe_nesting(catalog: Catalog, format: Format, *, is_bare: bool) -> list[str]:
    """Describe the containers around tensors that the destination does not keep.

    Args:
        is_bare: it has only tensors.
    """
    if is_model_form(catalog):
        return []
    sharing = _sharing_notes(catalog, keeps_ties=format.keeps_nesting or format.records_ties)
    if keeps_containers(catalog, format) and not is_bare:
        return sharing
    if format.has_common_state or format.has_objects_beside:
        return [*_flattening_notes(catalog, has_common=format.has_common_state), *sharing]
    return [*_root_notes(catalog), *_nesting_notes(state_dict(catalog)), *sharing]


def describe_not_stored(catalog: Catalog, format: Format, *, is_bare: bool) -> list[Dropped]:
    """Describe each entry that the destination cannot store, with the reason."""
    # Attributes of mappings. A mapping without tensors may be stored whole.
    dropped: list[Dropped] = []
    if not is_model_form(catalog) and (is_bare or not keeps_containers(catalog, format)):
        attributes = (
            attributes_beside_tensors(catalog.skeleton)
            if format.has_common_state or format.has_objects_beside
            else attributes_of(state_dict(catalog).skeleton)
        )
        dropped += _record_lost_attributes(attributes)
    if format.keeps_objects and not is_bare:
        return dropped

    # Objects; those with the same first part of their names share a line.
    from core.megatron.extras.common_state import OPTIMIZER

    optimizer = [OPTIMIZER] if catalog.optimizer is not None else []
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys((*catalog.objects, *map(str, catalog.common or {}), *optimizer)):
        groups.setdefault(key.partition(".")[0], []).append(key)
    for name, keys in groups.items():
        label = keys[0] if len(keys) == 1 else f"{name}.… ({len(keys)} entries)"
        line = f"{label}: not a tensor, so {format.title} cannot store it"
        dropped.append(Dropped(tuple(keys), f"{format.title} stores only tensors", line))
    # The tensors inside these objects, such as the steps of an optimizer, go with them.
    return [*dropped, *dropped_unlisted(catalog.hidden, "inside entries that are not tensors")]


def _nesting_notes(catalog: Catalog) -> list[str]:
    """Describe what a format of dicts with string keys, lists and plain tensors cannot keep."""
    names_of_note: dict[str, list[str]] = {}

    # Containers that change their type, and keys that become strings.
    for path, node in containers(catalog.skeleton):
        name = _path_text(path)
        if isinstance(node, Inert):
            names_of_note.setdefault(_becomes_dict(node), []).append(name)
        elif isinstance(node, tuple):
            names_of_note.setdefault("tuples become lists", []).append(name)
        for key in as_mapping(node) or ():
            if not isinstance(key, str):
                names_of_note.setdefault(_STRING_KEYS, []).append(_path_text((*path, key)))

    # Mutable objects that several entries share.
    first_keys: dict[int, str] = {}
    for entry in entries(catalog.skeleton):
        if isinstance(entry.leaf, (list, set, bytearray, Inert)):
            first = first_keys.setdefault(id(entry.leaf), entry.key)
            if first != entry.key:
                names_of_note.setdefault(_SEPARATE, []).append(f"{entry.key} ({first})")
    notes = [f"{text}: {list_some(names)}" for text, names in names_of_note.items()]
    return [*notes, *_tensor_notes(catalog)]


def _flattening_notes(catalog: Catalog, *, has_common: bool) -> list[str]:
    """Describe what a format cannot keep that names tensors by their paths, without containers.

    Args:
        catalog: the global form of the source.
        has_common: entries that are not tensors keep their nesting, in a separate dict.
    """
    notes = _path_notes(catalog)
    root = catalog.skeleton
    if isinstance(root, Inert) and as_mapping(root) is not None:
        notes.append(f"{_becomes_dict(root)}: the root")
    elif has_common:
        notes += _root_notes(catalog)
    elif root is not None and as_mapping(root) is None:
        notes.append("the root is not a dict, so it is converted to one")
    return notes + _tensor_notes(catalog)


def _record_lost_attributes(attributes: Sequence[MappingAttribute]) -> tuple[Dropped, ...]:
    """Return the record of dropped attributes of mappings, those with tensors one by one."""
    return (
        *dropped_each(
            (attribute.key for attribute in attributes if attribute.holds_tensor),
            "a tensor in a mapping's attribute, which only torch files can store",
        ),
        *record_attributes(attribute.key for attribute in attributes if not attribute.holds_tensor),
    )


def n_leaves(skeleton: object) -> int:
    """Count the tensors in mappings, lists, tuples and values of objects."""
    return sum(isinstance(entry.leaf, TensorLeaf) for entry in entries(skeleton))


def _root_notes(catalog: Catalog) -> list[str]:
    """Write a note if the root is not a mapping, which the format needs."""
    if catalog.skeleton is None or as_mapping(catalog.skeleton) is not None:
        return []
    return ["the root is not a dict, so it is stored in one under the name 'value'"]


def _sharing_notes(catalog: Catalog, *, keeps_ties: bool) -> list[str]:
    """Describe entries that share memory in the source, but not in the destination.

    Args:
        catalog: the global form of the source.
        keeps_ties: tensors with the same bytes still share them in the destination, or are recorded
            as equal.
    """
    notes = []
    if catalog.ties and not keeps_ties:
        ties = [f"{key} ({first})" for key, first in catalog.ties.items()]
        notes.append(f"tied tensors are written separately: {list_some(ties)}")
    views = [f"{view} ({base})" for view, base in _find_views(catalog)]
    if views:
        notes.append(f"views of other tensors' memory become separate tensors: {list_some(views)}")
    # Lists, dicts and other objects that a torch file stores once for several entries.
    torch_file = catalog.facet(TorchFileFacts)
    shared = _format_pairs(
        {} if torch_file is None else torch_file.shared,
        {_path_text(path) for path, _ in containers(catalog.skeleton)} | catalog.objects.keys(),
    )
    if shared:
        notes.append(f"{_SEPARATE}: {list_some(shared)}")
    return notes


def recorded_notes(recorded: Mapping[str, str]) -> list[str]:
    """Write a note on tied tensors of which the destination stores one and records the others.

    Args:
        recorded: tensor → the tensor that holds its bytes.
    """
    if not recorded:
        return []
    key, first = next(iter(recorded.items()))
    more = " …" if len(recorded) > 1 else ""
    untie = f"--untie {key}={first}{more}"
    names = list_some(f"{key} ({first})" for key, first in recorded.items())
    return [
        f"tied tensors are stored once, under the name in parentheses ({untie} keeps both): {names}"
    ]


def _path_notes(catalog: Catalog) -> list[str]:
    """Describe tensors whose paths become dotted names: non-string keys, and one example."""
    notes = []
    paths = [
        entry.path for entry in entries(catalog.skeleton) if isinstance(entry.leaf, TensorLeaf)
    ]
    converted = [
        _path_text(path)
        for path in paths
        if not all(isinstance(part, (str, ListIndex)) for part in path)
    ]
    if converted:
        notes.append(f"{_STRING_KEYS}: {list_some(converted)}")
    nested = [path for path in paths if len(path) > 1 or (path and isinstance(path[0], ListIndex))]
    if nested:
        example = _path_text(nested[0])
        notes.append(f"nested tensors are stored under dotted names, such as {example}")
    return notes


def _tensor_notes(catalog: Catalog) -> list[str]:
    """Describe tensors that lose their wrapper, or whose keys are not their paths."""
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
        notes.append(
            "Parameters and tensors with requires_grad become plain tensors: "
            f"{list_some(parameters)}"
        )
    # Where several paths join to one key, all but the first get a number or an escaped dot.
    collisions = [entry.key for entry, _ in leaves if entry.is_altered]
    if collisions:
        notes.append(
            f"tensors with the same dotted path get distinct keys: {list_some(collisions)}"
        )
    return notes


def _find_views(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield (tensor, earlier tensor) for different tensors of torch files that share bytes."""
    if catalog.format not in ("torch", "torch_bin"):
        return

    # Collect (first byte, end, array) by file; tied tensors are reported elsewhere.
    spans_of_file: dict[str, list[tuple[int, int, StoredArray]]] = {}
    ties = catalog.ties
    for key in catalog.tensors:
        array = None if key in ties else catalog.fragments(key)[0].array
        if array is None or not array.n_bytes or array.extent.encoding is not None:
            continue
        extent = array.extent
        strides = extent.strides or c_strides(array.shape)
        last = sum((n - 1) * stride for n, stride in zip(array.shape, strides, strict=True))
        end = extent.offset + (last + 1) * itemsize(array.dtype)
        spans = spans_of_file.setdefault(extent.file, [])
        spans.append((extent.offset, end, replace(array, name=key)))

    # In order of their first byte, an array overlaps an earlier one if it begins before that
    # one's end; so only the earlier one that ends last has to be remembered.
    for spans in spans_of_file.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        base_end, base = spans[0][1:]
        for start, end, array in spans[1:]:
            is_same = (array.extent, array.shape) == (base.extent, base.shape)
            if start < base_end and not is_same:
                yield array.name, base.name
            if end > base_end:
                base_end, base = end, array


def _format_pairs(first_of: Mapping[str, str], keys: Set[str]) -> list[str]:
    """Format ``key (first)`` for each key of a table whose key and first both remain."""
    return [f"{key} ({first})" for key, first in first_of.items() if key in keys and first in keys]


def _becomes_dict(node: Inert) -> str:
    return f"{node.class_name.rpartition('.')[2]} becomes dict"


def _path_text(path: Path) -> str:
    return join_path(path) or "the root"
