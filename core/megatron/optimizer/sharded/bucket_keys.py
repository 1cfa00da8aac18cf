"""The flat buffers of a torch_dist checkpoint, out of its keys: by optimizer, rank and buffer.

A buffer is brought into the form that files have it in (``core.megatron.optimizer.flat.content``):
buckets one after the other, without the padding at their ends. DCP cuts a bucket into chunks
wherever a parameter, or a data parallel rank, ends.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/distrib_optimizer.py``
(``sharded_param_state_*``, ``get_parameter_state_dp_reshardable``), ``core/optimizer/optimizer.py``
(``add_prefix_for_sharding``), tests/golden.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.catalog.catalog import Catalog
from core.catalog.optimizer_keys import MASTER
from core.catalog.stored import StoredArray, part_of
from core.errors import CorruptError
from core.megatron.extras.common_state import sharded_object
from core.megatron.optimizer.flat.content import PARAM, buffers_of, checked_dtype
from core.pickle.inert import TensorLeaf, as_mapping

_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(
    r"gbuf_idx_(\d+)\.dtype_\((?:torch\.)?(\w+), (?:torch\.)?(\w+)\)\.bucket_idx_(\d+)\.(\w+)"
)
_PARAM_STATE = "param_state"
_UNPADDED = "per_bucket_numel_unpadded"
_ENTRIES = ("per_bucket_numel", _UNPADDED, _PARAM_STATE)

Stored = Sequence[tuple[int, StoredArray]]
"""(first element, array of one axis) of a flat tensor, in increasing order, without gaps."""


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A buffer.

    Args:
        dtype: dtype of the parameters, None where nothing says.
        states: state → where it is stored.
        n_elements: elements of each state, without padding at the end of buckets.
        buckets: elements of every bucket, None where the checkpoint does not say.
    """

    dtype: str | None
    states: Mapping[str, Stored]
    n_elements: int
    buckets: Sequence[int] | None


@dataclass(slots=True)
class BucketGroup:
    """The buffers that the data parallel ranks of one model parallel rank saved.

    Args:
        label: for messages.
        buffers: in order.
        entries: the optimizer's other entries, ``optimizer`` and ``grad_scaler``.
    """

    label: str
    buffers: list[FlatBuffer] = field(default_factory=list)
    entries: dict[object, object] = field(default_factory=dict)


@dataclass(slots=True)
class _GroupKeys:
    """The keys of a group: (buffer, dtype) → bucket → state → key."""

    buckets: dict[tuple[int, str], dict[int, dict[str, str]]] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)


def groups_of(catalog: Catalog) -> dict[tuple[int, int], BucketGroup]:
    """Group the buffers by chained optimizer and model parallel rank.

    Returns a mapping from the two numbers to the group, its buffers in order.

    Raises:
        CorruptError: a bucket, a state or an element is missing, or an object is not what it should
            be.
        UnsupportedError: buffers of FP8 parameters, or objects that have not been read.
    """
    keys_of: dict[tuple[int, int], _GroupKeys] = {}

    # Tensors are single states of single buckets …
    for key in catalog.tensors:
        group = _GROUP.fullmatch(key)
        bucket = None if group is None else _BUCKET.fullmatch(group[3])
        if group is None or bucket is None:
            continue
        keys = keys_of.setdefault((int(group[1] or 0), int(group[2])), _GroupKeys())
        states = keys.buckets.setdefault((int(bucket[1]), bucket[2]), {}).setdefault(
            int(bucket[4]), {}
        )
        states[MASTER if bucket[5] == PARAM else bucket[5]] = key

    # … objects describe all buckets of a rank, or hold them.
    for key, item in catalog.objects.items():
        sharded = sharded_object(key)
        group = None if sharded is None else _GROUP.fullmatch(sharded[0])
        if group is None:
            continue
        value = item.value
        if item.raw_key is not None:
            raise CorruptError("the optimizer's object was not read", key=key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        keys_of.setdefault((int(group[1] or 0), int(group[2])), _GroupKeys()).objects[group[3]] = (
            value
        )
    return {numbers: _group(catalog, numbers, keys_of[numbers]) for numbers in sorted(keys_of)}


def _group(catalog: Catalog, numbers: tuple[int, int], keys: _GroupKeys) -> BucketGroup:
    """Return the buffers and entries that have these keys."""
    label = f"dp_group_idx_{numbers[1]}"
    group = BucketGroup(f"chained_{numbers[0]}.{label}" if numbers[0] else label)
    group.entries |= {name: value for name, value in keys.objects.items() if name not in _ENTRIES}

    # dp_zero_gather_scatter has one object, as distrib_optim.pt of rank files.
    state = as_mapping(keys.objects.get(_PARAM_STATE))
    if state is not None:

        def array_of(leaf: TensorLeaf) -> StoredArray:
            array = catalog.fragments(leaf.key)[0].array
            assert array is not None
            return array

        for buffer in buffers_of(state, array_of, rank=group.label):
            states = {name: _joined(arrays) for name, arrays in buffer.states.items()}
            group.buffers.append(
                FlatBuffer(buffer.dtype, states, buffer.n_elements, buffer.buckets)
            )
        return group

    # The other forms have a key for each state of each bucket.
    stated = keys.objects.get(_UNPADDED)
    for place, ((number, dtype), buckets) in enumerate(sorted(keys.buckets.items())):
        where = f"buffer {number} of {group.label}"
        if number != place or sorted(buckets) != list(range(len(buckets))):
            raise CorruptError(
                f"{where}, or one of its buckets, is missing", hint="copy the checkpoint again"
            )
        unpadded = _unpadded(stated, number, n=len(buckets), where=where)
        group.buffers.append(
            _buffer(
                catalog,
                checked_dtype(dtype, where=where, rank=group.label),
                buckets,
                unpadded,
                where=where,
            )
        )
    return group


def _joined(arrays: Sequence[StoredArray]) -> Stored:
    """Return the places of consecutive arrays."""
    stored, first = [], 0
    for array in arrays:
        stored.append((first, array))
        first += array.shape[0]
    return stored


def _unpadded(stated: object, number: int, *, n: int, where: str) -> list[int] | None:
    """Return the elements of the buckets without padding, as their object says; None without
    one.
    """
    if stated is None:
        return None
    listed = stated[number] if isinstance(stated, list) and number < len(stated) else None
    sizes = next(iter((as_mapping(listed) or {}).values()), None)
    if (
        not isinstance(sizes, list)
        or len(sizes) != n
        or not all(isinstance(size, int) for size in sizes)
    ):
        raise CorruptError(f"{_UNPADDED} does not list the {n} buckets of {where}")
    return sizes


def _buffer(
    catalog: Catalog,
    dtype: str,
    buckets: Mapping[int, Mapping[str, str]],
    unpadded: Sequence[int] | None,
    *,
    where: str,
) -> FlatBuffer:
    """Return a buffer whose buckets have keys of their own."""
    names = list(buckets[0])
    states: dict[str, list[tuple[int, StoredArray]]] = {name: [] for name in names}
    sizes: list[int] = []
    if MASTER not in names:
        raise CorruptError(f"{where} has no masters ({PARAM!r})")

    # Every bucket must have every state, of one length.
    for number in range(len(buckets)):
        if set(buckets[number]) != set(names):
            raise CorruptError(
                f"bucket {number} of {where} has the states {sorted(buckets[number])}, not {names}"
            )
        stored = {catalog.tensors[key].shape for key in buckets[number].values()}
        length = min(stored)[0] if stored and all(len(shape) == 1 for shape in stored) else -1
        size = length if unpadded is None else unpadded[number]
        if len(stored) != 1 or length < size:
            raise CorruptError(
                f"bucket {number} of {where} has the shapes {sorted(stored)}, not ({size},)"
            )
        first = sum(sizes)
        for name, key in buckets[number].items():
            states[name] += _chunks(catalog, key, size, first)
        sizes.append(size)
    return FlatBuffer(dtype, states, sum(sizes), sizes)


def _chunks(catalog: Catalog, key: str, size: int, first: int) -> list[tuple[int, StoredArray]]:
    """Return where the first ``size`` elements of a bucket are stored, counted from ``first``."""
    stored: list[tuple[int, StoredArray]] = []
    end = 0
    for fragment in sorted(catalog.fragments(key), key=lambda fragment: fragment.box.offset):
        (start,), (n,) = fragment.box.offset, fragment.box.shape
        n = min(n, size - start)
        if n <= 0 or start < end:  # padding, or a copy
            continue
        array = fragment.array
        if start > end or array is None:
            raise CorruptError(
                f"elements {end}–{start} are in no file", key=key, hint="copy the checkpoint again"
            )
        if fragment.at != (0,) or array.shape != (n,):
            array = part_of(array, fragment.at[-1], (n,))
        stored.append((first + start, array))
        end = start + n
    if end < size:
        raise CorruptError(
            f"elements {end}–{size} are in no file", key=key, hint="copy the checkpoint again"
        )
    return stored
