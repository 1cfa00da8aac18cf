"""ShardedObjects of Megatron-core's distributed checkpoints, and the tensors that objects hold.

A ShardedObject is an object with the key ``<key>/shard_<offset>_<shape>``, dots inside offset and shape: one of a grid
of objects, such as the random state of one rank. In a catalog its value is a list of one, whatever the backend.

Source: ``ShardedObject.unique_key`` of megatron-core 0.12.1 to 0.20 (``megatron/core/dist_checkpointing/mapping.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.box import whole
from core.catalog import Catalog, Fragment, TensorMeta
from core.errors import UnsupportedError

if TYPE_CHECKING:
    from core.catalog import StoredArray

_SHARDED_OBJECT = re.compile(r".+/shard_\d+(\.\d+)*_\d+(\.\d+)*$")


def is_sharded_object(key: str) -> bool:
    """Whether a key is ``<name>/shard_<offset>_<shape>``, dots inside offset and shape."""
    return _SHARDED_OBJECT.search(key) is not None


def with_hidden(catalog: Catalog, arrays: Mapping[str, StoredArray]) -> Catalog:
    """The catalog with more hidden tensors, each one array."""

    def fragments_of(key: str) -> Sequence[Fragment]:
        array = arrays.get(key)
        if array is None:
            return catalog.fragments(key)
        return (Fragment(key, whole(array.shape), array, (0,) * len(array.shape)),)

    metas = {key: TensorMeta(key, array.dtype, array.shape) for key, array in arrays.items()}
    return replace(catalog, hidden={**catalog.hidden, **metas}, fragments_of=fragments_of)


def array_inside(target: Catalog, key: str) -> StoredArray:
    """The one array of a hidden tensor.

    Raises:
        UnsupportedError: it lies in several arrays.
    """
    fragments = target.fragments(key)
    if len(fragments) != 1 or fragments[0].array is None:
        raise UnsupportedError("a tensor inside an object must be one array", key=key)
    return fragments[0].array
