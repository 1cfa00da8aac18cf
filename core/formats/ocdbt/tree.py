"""The nesting of an Orbax checkpoint, from its ``_METADATA``.

::

    {"tree_metadata": {"('opt_state', '0', 'count')": {
         "key_metadata": [{"key": "opt_state", "key_type": 2},
                          {"key": "0", "key_type": 1}, {"key": "count", …}],
         "value_metadata": {"value_type": "jax.Array", "skip_deserialize": false, …}}, …},
     "use_ocdbt": true, "use_zarr3": false, …}

A key of type 1 is an index, one of type 2 a name (also the field of a NamedTuple or class). A leaf
is stored under its keys, joined by dots. Empty containers and None have no value, only a type;
strings are in ``_strings.json``, by name; everything else is an array.

Source: ``_METADATA`` written by orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import CorruptError, MissingShardError
from core.files.json_object import read_json_object
from core.pickle.nesting import ListIndex, Path

if TYPE_CHECKING:
    from core.files.store import ReadStore

CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
STRINGS = "_strings.json"
_MAX_JSON_BYTES = 256 << 20
_MAX_JSON_VALUES = 16_000_000
"""A tree of 10⁵ leaves has about 4 · 10⁶."""
_EMPTY: Mapping[str, object] = {
    "None": None,
    "Dict": {},
    "List": [],
    "Tuple": (),
    "NamedTuple": None,
}
STRING = "string"
LIST_INDEX_KEY, NAME_KEY = 1, 2


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """A leaf of the tree.

    Args:
        path: path in the tree.
        kind: type of its value, as Orbax names it.
        value: its value; None for an array.
    """

    path: Path
    kind: str
    value: object = None

    @property
    def is_array(self) -> bool:
        """True if the value is stored as an array."""
        return self.kind != STRING and self.kind not in _EMPTY


def leaves_of(store: ReadStore, root: str) -> dict[str, OrbaxLeaf]:
    """Read all leaves, by name.

    Args:
        store: the checkpoint.
        root: directory of the item in the store; "" or ends with "/".

    Raises:
        CorruptError: a file is malformed, or two leaves have the same name.
        MissingShardError: the value of a string is missing.
    """
    # Read paths and types; any part of the JSON may have another type than expected.
    file = root + TREE
    tree: Any = _read_json(store, file).get("tree_metadata")
    texts = _read_json(store, root + STRINGS) if store.exists(root + STRINGS) else {}
    leaves: dict[str, OrbaxLeaf] = {}
    try:
        rows = [
            (_parse_path(row["key_metadata"]), row["value_metadata"]["value_type"])
            for row in tree.values()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise CorruptError(
            f"tree_metadata is malformed: {type(err).__name__} {str(err)[:120]}", file=file
        ) from err

    # Add the values of strings and empty containers.
    for path, kind in rows:
        name = ".".join(map(str, path))
        if name in leaves or type(kind) is not str:
            raise CorruptError(
                f"{TREE} has a duplicate of this leaf, or lacks its type", file=file, key=name
            )
        value = _EMPTY.get(kind)
        if kind == STRING:
            value = texts.get(name)
            if not isinstance(value, str):
                raise MissingShardError(
                    f"the string is missing in {STRINGS}", file=root + STRINGS, key=name
                )
        leaves[name] = OrbaxLeaf(path, kind, value)
    return leaves


def _parse_path(steps: Any) -> Path:
    """Return the path in ``key_metadata``.

    Raises:
        ValueError, KeyError, TypeError: the metadata is malformed.
    """
    path: list[object] = []
    for step in steps:
        name, kind = step["key"], step["key_type"]
        if type(name) is not str or kind not in (LIST_INDEX_KEY, NAME_KEY):
            raise ValueError(f"invalid key {name!r:.40} of type {kind!r:.40}")
        if kind == LIST_INDEX_KEY and not (name.isascii() and name.isdigit() and len(name) < 10):
            raise ValueError(f"invalid index {name!r:.40}")
        path.append(ListIndex(name) if kind == LIST_INDEX_KEY else name)
    if not path:
        raise ValueError("empty path")
    return tuple(path)


def recorded_iteration(store: ReadStore) -> int | None:
    """Return the iteration in ``_CHECKPOINT_METADATA``, which this project writes; None without.

    Raises:
        CorruptError: the file is malformed.
    """
    if not store.exists(CHECKPOINT):
        return None
    metadata = _read_json(store, CHECKPOINT).get("custom_metadata")
    iteration = metadata.get("iteration") if isinstance(metadata, dict) else None
    return iteration if type(iteration) is int and iteration >= 0 else None


def _read_json(store: ReadStore, file: str) -> dict[str, object]:
    """Read a JSON object with limits for the trees of large models."""
    return read_json_object(store, file, max_bytes=_MAX_JSON_BYTES, max_values=_MAX_JSON_VALUES)
