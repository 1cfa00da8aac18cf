"""The leaves of an Orbax tree to write: arrays, numbers, strings, None and empty containers.

A leaf is named by its path, joined by dots, as Orbax names it. Orbax restores tuples and
NamedTuples as lists and dicts, and the keys of dicts as strings.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.catalog.key_patterns import rename_hint
from core.catalog.removal import drop_entries
from core.errors import UnsupportedError
from core.formats.ocdbt.tree import CUSTOM, LIST_INDEX_KEY, NAME_KEY, RANDOM_KEY, STRING, TREE
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.key_text import faithful_text, text_of
from core.pickle.nesting import ListIndex, Path, entries, join_path
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.catalog import AnyCatalog, Catalog

_SCALAR = "scalar"
_ARRAY, _JAX_ARRAY = "np.ndarray", "jax.Array"
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class WrittenLeaf:
    """A leaf of the tree to write.

    Args:
        path: path in the tree; list indexes are ``ListIndex``, everything else is text.
        kind: type of its value, as Orbax names it.
        value: key of the tensor in the catalog if the leaf is an array, else the value itself.
    """

    path: Path
    kind: str
    value: object

    @property
    def name(self) -> str:
        """Name of the leaf, unique in the tree."""
        return ".".join(map(str, self.path))

    @property
    def tensor_key(self) -> str | None:
        """Key of the leaf's tensor in the catalog; None if the leaf is not an array."""
        return str(self.value) if self.kind == _ARRAY else None

    @property
    def scalar(self) -> tuple[str, bytes] | None:
        """Dtype and little-endian bytes of a number; None for any other leaf."""
        if self.kind != _SCALAR:
            return None
        if isinstance(self.value, bool):
            return "bool", bytes((self.value,))
        if isinstance(self.value, int):
            return "int64", self.value.to_bytes(8, "little", signed=True)
        return "float64", struct.pack("<d", self.value)

    @property
    def string(self) -> str | None:
        """Text of a string; None for any other leaf."""
        return str(self.value) if self.kind == STRING else None


def storable(catalog: Catalog) -> Catalog:
    """Return the catalog without the objects that cannot be leaves, which are listed as dropped."""
    dropped: dict[str, str] = {}
    for key, item in catalog.objects.items():
        problem = _problem(item.value)
        inside = {node.key for node in walk(item.value) if isinstance(node, TensorLeaf)}
        if problem is None and inside != {
            leaf.tensor_key for leaf in _leaves_below(item.value, (key,)) if leaf.kind == _ARRAY
        }:
            problem = "attributes of dicts"
        if problem is not None:
            dropped[key] = f"Orbax trees cannot hold {problem}"
    return drop_entries(catalog, dropped)


def _problem(value: object) -> str | None:
    """Return what in a value cannot be a leaf; None if all of it can."""
    if value is None or isinstance(value, (bool, float, str, TensorLeaf)):
        return None
    if isinstance(value, int):
        return None if _MIN_INT <= value <= _MAX_INT else "integers of more than 64 bits"
    mapping = as_mapping(value)
    if mapping is not None:
        if any(faithful_text(key) is None for key in mapping):
            return "dicts with such keys"
        return next(filter(None, map(_problem, mapping.values())), None)
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_problem, value)), None)
    return getattr(value, "class_name", None) or type(value).__name__


def leaves_to_write(catalog: AnyCatalog) -> list[WrittenLeaf]:
    """Return all leaves in the order of the catalog.

    Args:
        catalog: a target; its objects passed ``storable``. An entry whose key is not its path in
            the skeleton, joined by dots, is placed at the root, under its key.

    Raises:
        UnsupportedError: two leaves have the same name.
    """
    paths: dict[str, Path] = {}
    if catalog.skeleton is not None:
        for entry in entries(catalog.skeleton):
            if isinstance(entry.leaf, (TensorLeaf, ObjectLeaf)) or entry.key in catalog.objects:
                if join_path(entry.path) == entry.key:
                    paths[entry.key] = tuple(
                        part if isinstance(part, ListIndex) else text_of(part)
                        for part in entry.path
                    )
    leaves = [WrittenLeaf(paths.get(key, (key,)), _ARRAY, key) for key in catalog.tensors]
    for key, item in catalog.objects.items():
        leaves += _leaves_below(item.value, paths.get(key, (key,)))
    names: set[str] = set()
    for leaf in leaves:
        if leaf.name in names:
            raise UnsupportedError(
                "two entries have this name when their paths are joined by dots",
                key=leaf.name,
                hint=rename_hint([leaf.name]),
            )
        names.add(leaf.name)
    return leaves


def _leaves_below(value: object, path: Path) -> Iterator[WrittenLeaf]:
    """Yield the leaves of a value that has passed ``storable``."""
    mapping = as_mapping(value)
    if mapping:
        for key, item in mapping.items():
            yield from _leaves_below(item, (*path, text_of(key)))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from _leaves_below(item, (*path, ListIndex(index)))
    elif isinstance(value, TensorLeaf):
        yield WrittenLeaf(path, _ARRAY, value.key)
    elif mapping is not None:
        yield WrittenLeaf(path, "Dict", {})
    elif isinstance(value, (list, tuple)):
        yield WrittenLeaf(path, "List" if isinstance(value, list) else "Tuple", value)
    elif value is None:
        yield WrittenLeaf(path, "None", None)
    else:
        yield WrittenLeaf(path, STRING if isinstance(value, str) else _SCALAR, value)


def is_random_key(leaf: WrittenLeaf, catalog: AnyCatalog) -> bool:
    """Return whether a leaf is a typed random key, which only jax arrays can be."""
    meta = None if leaf.tensor_key is None else catalog.meta(leaf.tensor_key)
    if meta is None or meta.dtype != "uint32":
        return False
    return isinstance((meta.attributes or {}).get(RANDOM_KEY), str)


def tree_json(leaves: Sequence[WrittenLeaf], catalog: AnyCatalog) -> bytes:
    """Return the content of ``_METADATA``."""
    rows = {}
    for leaf in leaves:
        value: dict[str, object] = {
            "value_type": _JAX_ARRAY if is_random_key(leaf, catalog) else leaf.kind,
            "skip_deserialize": leaf.kind not in (_ARRAY, _SCALAR, STRING),
        }
        if leaf.tensor_key is not None:
            value["write_shape"] = list(catalog.meta(leaf.tensor_key).shape)
        rows[str(tuple(map(str, leaf.path)))] = {
            "key_metadata": [
                {
                    "key": str(part),
                    "key_type": LIST_INDEX_KEY if isinstance(part, ListIndex) else NAME_KEY,
                }
                for part in leaf.path
            ],
            "value_metadata": value,
        }
    metadata = {
        "tree_metadata": rows,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": catalog.attributes.get(TREE, {}).get(CUSTOM),
    }
    return json.dumps(metadata).encode()
