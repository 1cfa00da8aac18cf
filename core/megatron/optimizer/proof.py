"""Whether a master belongs to a weight: rounded to the weight's dtype, it is the weight.

Megatron makes the weights anew from their fp32 masters at every step, so a checkpoint's masters
round to its weights, bit for bit (to nearest even). A few elements tell: what is compared is a
sample from the beginning, the middle and the end of both. Where the weights are fp32 themselves,
sample and weight are equal.

Source: Megatron-LM d98e8a64 ``core/optimizer/optimizer.py`` ``_copy_main_params_to_model_params``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod

from core.arrays.cast import cast_of
from core.arrays.dtypes import dtype_of, itemsize
from core.catalog.catalog import Catalog, bind_nothing
from core.catalog.decoded import DecodedStore
from core.catalog.optimizer_keys import MASTER, state_key
from core.catalog.stored import StoredArray
from core.files.store import ReadStore

RUN = 16
"""Elements of one of the three runs of a sample."""


def is_master(
    store: ReadStore,
    master: StoredArray,
    weight: StoredArray,
    *,
    bind: Callable[[ReadStore, StoredArray], StoredArray] = bind_nothing,
) -> bool:
    """Return whether the samples of a master and a weight agree.

    Args:
        store: where both lie.
        master: an array of a float dtype at least as wide as the weight's.
        weight: with as many elements; its shape may be another.
        bind: ``bind`` of the catalog, for late-bound arrays.

    Raises:
        UnsupportedError: the weight's dtype is not one that masters are rounded to.
    """
    if prod(master.shape) != prod(weight.shape):
        return False
    return rounds_to(
        sample(store, master, bind=bind),
        master.dtype,
        sample(store, weight, bind=bind),
        weight.dtype,
    )


def are_masters(
    store: ReadStore,
    pairs: Sequence[tuple[StoredArray, StoredArray]],
    *,
    bind: Callable[[ReadStore, StoredArray], StoredArray] = bind_nothing,
) -> bool:
    """Return whether ``is_master`` holds for every (master, weight), reading each file in one go.

    Raises:
        UnsupportedError, MissingShardError: as for ``is_master``.
    """
    if any(prod(master.shape) != prod(weight.shape) for master, weight in pairs):
        return False
    masters = _samples(store, [master for master, _ in pairs], bind=bind)
    weights = _samples(store, [weight for _, weight in pairs], bind=bind)
    alike: dict[tuple[str, str], list[int]] = {}
    for number, (master, weight) in enumerate(pairs):
        alike.setdefault((master.dtype, weight.dtype), []).append(number)
    return all(
        rounds_to(
            b"".join(masters[i] for i in numbers),
            master,
            b"".join(weights[i] for i in numbers),
            weight,
        )
        for (master, weight), numbers in alike.items()
    )


def _samples(
    store: ReadStore,
    arrays: Sequence[StoredArray],
    *,
    bind: Callable[[ReadStore, StoredArray], StoredArray],
) -> list[bytes]:
    """Return ``sample`` of every array."""
    samples = [b""] * len(arrays)
    spans: dict[str, list[tuple[int, int]]] = {}
    places: dict[str, list[int]] = {}
    for number, array in enumerate(arrays):
        extent = array.extent
        if extent.is_late or extent.encoding is not None or extent.strides is not None:
            samples[number] = sample(store, array, bind=bind)
            continue
        size, offset = itemsize(array.dtype), extent.offset
        for start, n in _runs(prod(array.shape)):
            spans.setdefault(extent.file, []).append((offset + start * size, n * size))
            places.setdefault(extent.file, []).append(number)

    # Read each file once, in order of its samples.
    for file, wanted in spans.items():
        for number, run in zip(places[file], store.read_spans(file, wanted), strict=True):
            samples[number] += run
    return samples


def sample(
    store: ReadStore,
    array: StoredArray,
    *,
    bind: Callable[[ReadStore, StoredArray], StoredArray] = bind_nothing,
) -> bytes:
    """Read some elements of an array, dense: the same ones for arrays of one size."""
    if array.extent.is_late:
        array = bind(store, array)
    decoded = DecodedStore(store) if array.extent.encoding is not None else None
    if decoded is not None:
        array, store = decoded.placed(array), decoded
    extent, size = array.extent, itemsize(array.dtype)
    runs = _runs(prod(array.shape))
    if extent.strides is None:
        return b"".join(
            store.read(extent.file, extent.offset + start * size, n * size) for start, n in runs
        )
    places = [
        _place(index, array.shape, extent.strides)
        for start, n in runs
        for index in range(start, start + n)
    ]
    return b"".join(store.read(extent.file, extent.offset + place * size, size) for place in places)


def rounds_to(master: bytes, master_dtype: str, weight: bytes, weight_dtype: str) -> bool:
    """Return whether elements, rounded to another dtype, are the given ones; NaNs equal each other.

    Raises:
        UnsupportedError: the cast is not made.
    """
    if master_dtype != weight_dtype:
        few = (
            rounding_of(master_dtype, weight_dtype)
            if len(master) <= MOST * itemsize(master_dtype)
            else None
        )
        if few is not None:
            master = few(master)
        else:
            rounded = bytearray(len(weight))
            cast_of(master_dtype, weight_dtype)(memoryview(master), memoryview(rounded))
            master = bytes(rounded)
    if master == weight:
        return True
    size = itemsize(weight_dtype)
    if len(master) != len(weight) or dtype_of(weight_dtype).kind != "float":
        return False
    pairs = [(master[at : at + size], weight[at : at + size]) for at in range(0, len(weight), size)]
    return all(a == b or (_is_nan(a, weight_dtype) and _is_nan(b, weight_dtype)) for a, b in pairs)


@lru_cache(maxsize=1 << 12)
def _runs(n: int) -> tuple[tuple[int, int], ...]:
    """Return (first element, elements) of the runs of a sample."""
    if n <= 3 * RUN:
        return ((0, n),) if n else ()
    return ((0, RUN), (n // 2, RUN), (n - RUN, RUN))


def _place(index: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements in storage before one, given its number in C order."""
    place = 0
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        index, at = divmod(index, extent)
        place += at * stride
    return place


def _is_nan(data: bytes, dtype: str) -> bool:
    result = is_nan(data, dtype)
    if result is not None:
        return result
    wide = bytearray(8)
    cast_of(dtype, "float64")(memoryview(data), memoryview(wide))
    value: float = struct.unpack("<d", wide)[0]
    return value != value


MOST = 4096
"""Elements beyond which numpy is faster, its import included."""


_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}
"""Bits of infinity; greater ones, without the sign, are NaNs."""


_CODES = {"float16": "H", "bfloat16": "H", "float32": "I"}


def rounding_of(source: str, target: str) -> Callable[[bytes], bytes] | None:
    """Return the function that rounds dense little-endian elements to nearest even.

    None where only numpy does.

    NaNs stay NaNs, with bits of their own.
    """
    return {("float32", "bfloat16"): _to_bfloat16, ("float32", "float16"): _to_float16}.get(
        (source, target)
    )


def is_nan(data: bytes, dtype: str) -> bool | None:
    """Return whether one element is not a number; None if the dtype is not known here."""
    if dtype not in _INFINITIES:
        return None
    (bits,) = struct.unpack(f"<{_CODES[dtype]}", data)
    return bool(bits & (1 << 8 * len(data) - 1) - 1 > _INFINITIES[dtype])


def _to_bfloat16(data: bytes) -> bytes:
    n = len(data) // 4
    return struct.pack(f"<{n}H", *map(_bfloat16_bits, struct.unpack(f"<{n}I", data)))


def _bfloat16_bits(bits: int) -> int:
    if bits & 0x7FFF_FFFF > _INFINITIES["float32"]:
        return bits >> 16 | 0x40
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16  # ties to even; a carry leads on to infinity


def _to_float16(data: bytes) -> bytes:
    return b"".join(map(_float16, struct.unpack(f"<{len(data) // 4}f", data)))


def _float16(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", float("inf") if value > 0 else float("-inf"))


MOST = 64
"""Parameters that are looked at, evenly spread."""


def strange_masters(catalog: Catalog, store: ReadStore) -> list[str]:
    """Return the parameters, among a sample, whose masters do not round to their weights.

    Names say what belongs to what, so that this is no proof of a mapping; but weights that were
    edited, or taken from another step than the optimizer, show themselves.

    Args:
        catalog: the global per-layer form, of a checkpoint that stores states by name.
    """
    named = [key for key in catalog.tensors if state_key(MASTER, key) in catalog.tensors]
    strange = []
    for key in named[:: max(1, len(named) // MOST)]:
        pair = _same_part(catalog, key, state_key(MASTER, key))
        if pair is not None and not is_master(store, pair[1], pair[0], bind=catalog.bind):
            strange.append(key)
    return strange


def pairs_of_masters(catalog: Catalog) -> Iterator[tuple[str, StoredArray, StoredArray]]:
    """Yield (parameter, array of weights, array of masters).

    The two arrays hold the same part of their tensors.
    """
    for key in catalog.tensors:
        if state_key(MASTER, key) in catalog.tensors:
            pair = _same_part(catalog, key, state_key(MASTER, key))
            if pair is not None:
                yield key, *pair


def _same_part(catalog: Catalog, key: str, master: str) -> tuple[StoredArray, StoredArray] | None:
    """Return a weight's array and a master's that hold the same box, and nothing else.

    None if there are none.
    """
    boxes = {
        piece.box: piece.array
        for piece in catalog.fragments(key)
        if piece.array is not None and prod(piece.array.shape) == piece.box.n_elements
    }
    for piece in catalog.fragments(master):
        weight = boxes.get(piece.box)
        if (
            weight is not None
            and piece.array is not None
            and prod(piece.array.shape) == piece.box.n_elements
        ):
            return weight, piece.array
    return None
