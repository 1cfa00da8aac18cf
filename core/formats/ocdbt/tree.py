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

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.engine.catalog.attributes import BY_PATH, ROOT, Attributes, parse_by_path
from core.engine.catalog.dropped import Dropped, dropped_together
from core.errors import UNLIKE_ANY_WRITER, CorruptError, MissingShardError, suggesting
from core.files.json_object import read_json_object
from core.pickle.fields import mapping_or_empty
from core.pickle.nesting import ListIndex, Path
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

CHECKPOINT = "_CHECKPOINT_METADATA"
TREE = "_METADATA"
STRINGS = "_strings.json"
ARRAY_METADATA = "array_metadatas"
SHARDING = "_sharding"
ITERATION = "iteration"
"""The member of the checkpoint's custom metadata that this project writes."""
RANDOM_KEY = "random_key_impl"
"""The member of ``ext_metadata`` that makes an array a typed random key: the kind of key."""
CUSTOM, METRICS = "custom_metadata", "metrics"
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


def read_tree(store: ReadStore, root: str) -> dict[str, object]:
    """Read the ``_METADATA`` of an item.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    return _read_json(store, root + TREE)


@suggesting(UNLIKE_ANY_WRITER)
def leaves_of(store: ReadStore, root: str, content: Mapping[str, object]) -> dict[str, OrbaxLeaf]:
    """Read all leaves, by name.

    Args:
        store: the checkpoint.
        root: directory of the item in the store; "" or ends with "/".
        content: from ``read_tree``.

    Raises:
        CorruptError: a file is malformed, or two leaves have the same name.
        MissingShardError: the value of a string is missing.
    """
    # Read paths and types; any part of the JSON may have another type than expected.
    file = root + TREE
    tree: Any = content.get("tree_metadata")
    texts = _read_json(store, root + STRINGS) if store.exists(root + STRINGS) else {}
    leaves: dict[str, OrbaxLeaf] = {}
    try:
        rows = [
            (_parse_path(row["key_metadata"]), row["value_metadata"]["value_type"])
            for row in tree.values()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise CorruptError(
            f"tree_metadata is malformed ({type(err).__name__}: {str(err)[:120]})", file=file
        ) from err

    # Add the values of strings and empty containers.
    for path, kind in rows:
        name = ".".join(map(str, path))
        if name in leaves or type(kind) is not str:
            raise CorruptError(
                f"{TREE} lists this leaf twice or without a type", file=file, key=name
            )
        value = _EMPTY.get(kind)
        if kind == STRING:
            value = texts.get(name)
            if not isinstance(value, str):
                raise MissingShardError(
                    f"the string is missing from {STRINGS}", file=root + STRINGS, key=name
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


def read_attributes(store: ReadStore) -> dict[str, Attributes]:
    """Read the custom metadata and the metrics of the checkpoint.

    Returns:
        The custom metadata under the path of the root, with those that this project has put among
        them under paths of their own; the metrics as an attribute of the file that holds them.

    Raises:
        CorruptError: the file is malformed.
    """
    by_path: dict[str, Attributes] = {}
    if store.exists(CHECKPOINT):
        content = _read_json(store, CHECKPOINT)
        custom = dict(mapping_or_empty(content.get(CUSTOM)))
        by_path |= parse_by_path(custom.pop(BY_PATH, None)) or {}
        by_path[ROOT] = custom
        metrics = mapping_or_empty(content.get(METRICS))
        by_path[CHECKPOINT] = {METRICS: metrics} if metrics else {}
    return {path: values for path, values in by_path.items() if values}


def read_key_kinds(
    store: ReadStore, root: str
) -> tuple[dict[str, Attributes], tuple[Dropped, ...]]:
    """Read what ``array_metadatas`` says about arrays: above all, which are typed random keys.

    The device of a typed key is taken along, as Orbax makes it a typed key only on a device.

    Args:
        root: directory of the item; "" or ends with "/".

    Returns:
        Name of the array → ``ext_metadata`` and its entry of ``_sharding``; and the record of the
        other arrays' devices, if that file has been read.

    Raises:
        CorruptError: a file is malformed.
    """
    # The files of all processes say the same; Orbax reads the first one, too.
    folder = root + ARRAY_METADATA
    name = next(iter(sorted(store.files(folder))), None)
    if name is None:
        return {}, ()
    rows: Any = _read_json(store, f"{folder}/{name}").get("array_metadatas")
    attributes: dict[str, dict[str, object]] = {}
    try:
        for row in rows:
            facts = row["array_metadata"]
            if facts["ext_metadata"]:
                attributes[str(facts["param_name"])] = dict(facts["ext_metadata"])
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise CorruptError("array_metadatas is malformed", file=f"{folder}/{name}") from err
    others: list[str] = []
    if attributes and store.exists(root + SHARDING):
        for encoded, text in _read_json(store, root + SHARDING).items():
            key = _decode_sharding_name(encoded)
            if key in attributes and isinstance(text, str):
                attributes[key][SHARDING] = text
            else:
                others.append(f"{SHARDING}.{key}")
    return {**attributes}, dropped_together(others, "devices of arrays that are not random keys")


def encode_sharding_name(name: str) -> str:
    """Return the name of a leaf in ``_sharding``."""
    return b64encode(name.encode()).decode()


def _decode_sharding_name(name: str) -> str:
    """Return the name of a leaf from ``_sharding``; the same if it has another form."""
    try:
        return b64decode(name, validate=True).decode()
    except ValueError:
        return name


def _read_json(store: ReadStore, file: str) -> dict[str, object]:
    """Read a JSON object with limits for the trees of large models."""
    return read_json_object(store, file, max_bytes=_MAX_JSON_BYTES, max_values=_MAX_JSON_VALUES)
