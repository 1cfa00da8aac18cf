"""The flat buffers of a torch_dist checkpoint, collected from its keys.

A buffer gets the form that it has in rank files (``core.megatron.optimizer.flat.content``): buckets
one after the other, without the padding at their ends. DCP cuts a bucket into chunks at the end of
every parameter, and of every data parallel rank's part.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/distrib_optimizer.py``
(``sharded_param_state_*``, ``get_parameter_state_dp_reshardable``), ``core/optimizer/optimizer.py``
(``add_prefix_for_sharding``), tests/golden.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import accumulate

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER
from core.engine.catalog.stored import StoredArray, narrow_array
from core.errors import CorruptError
from core.megatron.extras.sharded_objects import sharded_object
from core.megatron.optimizer.flat.content import PARAM, buffers_of, checked_dtype
from core.pickle.fields import FieldReader, mapping_or_empty
from core.pickle.inert import TensorLeaf, as_mapping
from core.values import dataclass

_PREFIX = r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
_OBJECT = re.compile(_PREFIX + r"(?P<name>.+)")
_STATE = re.compile(
    _PREFIX + r"gbuf_idx_(?P<buffer>\d+)\.dtype_\((?:torch\.)?(?P<dtype>\w+), (?:torch\.)?\w+\)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_PARAM_STATE = "param_state"
_UNPADDED = "per_bucket_numel_unpadded"
_ENTRIES = ("per_bucket_numel", _UNPADDED, _PARAM_STATE)

Stored = Sequence[tuple[int, StoredArray]]
"""(first element, array of one axis) of a flat tensor, in increasing order, without gaps."""


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A buffer, as a sequence of stored arrays per state.

    Args:
        dtype: dtype of the parameters; None if unknown.
        states: state → its arrays.
        n_elements: number of elements of each state, without padding at the end of buckets.
        buckets: number of elements of every bucket; None if the checkpoint does not record it.
    """

    dtype: str | None
    states: Mapping[str, Stored]
    n_elements: int
    buckets: Sequence[int] | None


@dataclass(slots=True)
class BucketGroup:
    """The buffers that the data parallel ranks of one model parallel rank saved.

    Args:
        label: name of the group, for messages.
        buffers: buffers in order.
        entries: the optimizer's other entries, ``optimizer`` and ``grad_scaler``.
    """

    label: str
    buffers: list[FlatBuffer] = field(default_factory=list)
    entries: dict[object, object] = field(default_factory=dict)


@dataclass(slots=True)
class _GroupKeys:
    """The keys of a group.

    Args:
        buckets: (buffer, dtype) → bucket → state → key.
        objects: name → value.
    """

    buckets: dict[tuple[int, str], dict[int, dict[str, str]]] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)


def group_buffers(catalog: Catalog) -> dict[tuple[int, int], BucketGroup]:
    """Group the buffers by chained optimizer and model parallel rank.

    Returns:
        (number of the optimizer, number of the rank) → group.

    Raises:
        CorruptError: a bucket, a state or an element is missing, or an object is malformed or was
            not read.
        UnsupportedError: a buffer is for FP8 parameters.
    """
    keys_of: defaultdict[tuple[int, int], _GroupKeys] = defaultdict(_GroupKeys)

    # A tensor is a single state of a single bucket …
    for key in catalog.tensors:
        match = _STATE.fullmatch(key)
        if match is None:
            continue
        buckets = keys_of[int(match["chain"] or 0), int(match["group"])].buckets
        states = buckets.setdefault((int(match["buffer"]), match["dtype"]), {})
        name = MASTER if match["state"] == PARAM else match["state"]
        states.setdefault(int(match["bucket"]), {})[name] = key

    # … an object describes all buckets of a rank, or contains them.
    for key, item in catalog.objects.items():
        sharded = sharded_object(key)
        match = None if sharded is None else _OBJECT.fullmatch(sharded[0])
        if match is None:
            continue
        value = item.value
        if item.raw_key is not None:
            raise CorruptError(
                "the object that describes the optimizer's buckets was not loaded", key=key
            )
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        keys_of[int(match["chain"] or 0), int(match["group"])].objects[match["name"]] = value
    return {numbers: _get_group(catalog, numbers, keys_of[numbers]) for numbers in sorted(keys_of)}


def _get_group(catalog: Catalog, numbers: tuple[int, int], keys: _GroupKeys) -> BucketGroup:
    """Read the buffers and entries that have these keys."""
    label = f"dp_group_idx_{numbers[1]}"
    group = BucketGroup(f"chained_{numbers[0]}.{label}" if numbers[0] else label)
    group.entries |= {name: value for name, value in keys.objects.items() if name not in _ENTRIES}

    # dp_zero_gather_scatter has one object, with the content of a distrib_optim.pt.
    state = as_mapping(keys.objects.get(_PARAM_STATE))
    if state is not None:

        def array_of(leaf: TensorLeaf) -> StoredArray:
            array = catalog.fragments(leaf.key)[0].array
            assert array is not None
            return array

        for buffer in buffers_of(state, array_of, rank=group.label):
            states: dict[str, Stored] = {}
            for name, arrays in buffer.states.items():
                starts = accumulate((array.shape[0] for array in arrays), initial=0)
                states[name] = list(zip(starts, arrays, strict=False))
            group.buffers.append(
                FlatBuffer(buffer.dtype, states, buffer.n_elements, buffer.buckets)
            )
        return group

    # The other forms have a key for each state of each bucket.
    recorded = keys.objects.get(_UNPADDED)
    for place, ((number, dtype), buckets) in enumerate(sorted(keys.buckets.items())):
        where = f"buffer {number} of {group.label}"
        if number != place or sorted(buckets) != list(range(len(buckets))):
            raise CorruptError(
                f"{where}, or one of its buckets, is missing", hint="copy the checkpoint again"
            )
        unpadded = _unpadded_sizes(recorded, number, n=len(buckets), where=where)
        group.buffers.append(
            _get_buffer(
                catalog,
                checked_dtype(dtype, where=where, rank=group.label),
                buckets,
                unpadded,
                where=where,
            )
        )
    return group


def _unpadded_sizes(recorded: object, number: int, *, n: int, where: str) -> list[int] | None:
    """Return the sizes of a buffer's buckets without padding, in elements; None if not recorded.

    Args:
        recorded: the object ``per_bucket_numel_unpadded``: for each buffer, {dtypes: [size …]}.
        number: number of the buffer.
        n: number of buckets.
    """
    if recorded is None:
        return None
    listed = recorded[number] if isinstance(recorded, list) and number < len(recorded) else None
    sizes = next(iter(mapping_or_empty(listed).values()), None)
    expected = f"a list of {n} bucket sizes"
    return [*FieldReader().read_ints(sizes, f"{_UNPADDED} of {where}", n=n, expected=expected)]


def _get_buffer(
    catalog: Catalog,
    dtype: str,
    buckets: Mapping[int, Mapping[str, str]],
    unpadded: Sequence[int] | None,
    *,
    where: str,
) -> FlatBuffer:
    """Read a buffer whose buckets have keys of their own.

    Args:
        buckets: bucket → state → key.
        unpadded: number of elements of every bucket without padding; None if not recorded.
        where: the buffer, for messages.
    """
    names = list(buckets[0])
    states: dict[str, list[tuple[int, StoredArray]]] = {name: [] for name in names}
    sizes: list[int] = []
    if MASTER not in names:
        raise CorruptError(f"{where} has no master weights ({PARAM!r})")

    # Every bucket must have the same states, all of one length.
    for number in range(len(buckets)):
        if set(buckets[number]) != set(names):
            raise CorruptError(
                f"bucket {number} of {where} has the states {', '.join(sorted(buckets[number]))}, "
                f"but bucket 0 has {', '.join(names)}"
            )
        stored = {catalog.tensors[key].shape for key in buckets[number].values()}
        length = min(stored)[0] if stored and all(len(shape) == 1 for shape in stored) else -1
        size = length if unpadded is None else unpadded[number]
        if len(stored) != 1 or length < size:
            raise CorruptError(
                f"the states of bucket {number} of {where} have the shapes "
                f"{', '.join(map(str, sorted(stored)))}, but must all be one-dimensional and "
                "equally long" + ("" if unpadded is None else f", with at least {size:,} elements")
            )

        # The buckets follow one another without their padding.
        first = sum(sizes)
        for name, key in buckets[number].items():
            states[name] += _chunks(catalog, key, size, first)
        sizes.append(size)
    return FlatBuffer(dtype, states, sum(sizes), sizes)


def _chunks(catalog: Catalog, key: str, size: int, first: int) -> list[tuple[int, StoredArray]]:
    """Return the arrays of the first ``size`` elements of a bucket, without its padding.

    Args:
        key: key of a state of the bucket.
        first: number of elements in the buffer before the bucket.
    """
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
                f"no file contains elements {end}–{start}",
                key=key,
                hint="copy the checkpoint again",
            )
        if fragment.at != (0,) or array.shape != (n,):
            array = narrow_array(array, fragment.at[-1], (n,))
        stored.append((first + start, array))
        end = start + n
    if end < size:
        raise CorruptError(
            f"no file contains elements {end}–{size}", key=key, hint="copy the checkpoint again"
        )
    return stored
