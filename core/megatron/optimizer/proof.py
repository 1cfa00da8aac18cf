"""The proof that an optimizer's master weights belong to a parameter: they round to its weights.

Megatron rounds the fp32 master weights to the model's dtype at every step, so a checkpoint's master
weights round to its weights, bit for bit (to nearest even). A sample of a few elements from the
beginning, the middle and the end of both is compared. fp32 weights equal their master weights.

Source: Megatron-LM d98e8a64 ``core/optimizer/optimizer.py`` ``_copy_main_params_to_model_params``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod

from core.arrays.cast import find_cast
from core.arrays.dtypes import dtype_of, itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.optimizer_keys import MASTER, state_key
from core.engine.catalog.stored import StoredArray
from core.files.store import ReadStore

RUN = 16
"""Number of elements in each of the three runs of a sample."""


def is_master(
    store: ReadStore,
    master: StoredArray,
    weight: StoredArray,
) -> bool:
    """Return whether the sample of the master weights rounds to that of the weights.

    Args:
        store: store that holds both arrays.
        master: an array of a float dtype at least as wide as the weight's.
        weight: an array with as many elements; the shapes may differ.

    Raises:
        UnsupportedError: master weights are not rounded to the weight's dtype.
        MissingShardError: a file is missing or too short.
    """
    if prod(master.shape) != prod(weight.shape):
        return False
    return rounds_to(
        sample_array(store, master),
        master.dtype,
        sample_array(store, weight),
        weight.dtype,
    )


def are_masters(
    store: ReadStore,
    pairs: Sequence[tuple[StoredArray, StoredArray]],
) -> bool:
    """Return whether ``is_master`` holds for all pairs, reading each file in one go.

    Args:
        pairs: (master weights, weights).

    Raises:
        UnsupportedError, MissingShardError: as for ``is_master``.
    """
    if any(prod(master.shape) != prod(weight.shape) for master, weight in pairs):
        return False
    masters = _samples(store, [master for master, _ in pairs])
    weights = _samples(store, [weight for _, weight in pairs])

    # Round all samples of a pair of dtypes at once.
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


def find_different_copies(
    store: ReadStore, pairs: Sequence[tuple[str, StoredArray, StoredArray]]
) -> list[tuple[str, StoredArray]]:
    """Return the (key, copy) of weights whose copies are not their rounded master weights.

    Args:
        pairs: see ``core.engine.catalog.facets.WeightCopies``.

    Raises:
        UnsupportedError, MissingShardError: as for ``is_master``.
    """
    if are_masters(store, [(master, copy) for _, master, copy in pairs]):
        return []
    copies: dict[str, StoredArray] = {}
    for key, master, copy in pairs:
        if key not in copies and not is_master(store, master, copy):
            copies[key] = copy
    return list(copies.items())


def _samples(
    store: ReadStore,
    arrays: Sequence[StoredArray],
) -> list[bytes]:
    """Return ``sample_array`` of every array."""
    # Collect the byte ranges of plain arrays by file; read the other arrays one by one.
    samples = [b""] * len(arrays)
    spans: dict[str, list[tuple[int, int]]] = {}
    places: dict[str, list[int]] = {}
    for number, array in enumerate(arrays):
        extent = array.extent
        if extent.is_late or extent.encoding is not None or extent.strides is not None:
            samples[number] = sample_array(store, array)
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


def sample_array(
    store: ReadStore,
    array: StoredArray,
) -> bytes:
    """Read a sample of an array's elements, as dense bytes.

    The element numbers depend on the array's size only, so samples of two arrays can be compared.

    Raises:
        MissingShardError: a file is missing or too short.
    """
    # Find the elements: late-bound arrays need their extent, encoded ones are decoded.
    array = array.locate(store)
    decoded = DecodedStore(store) if array.extent.encoding is not None else None
    if decoded is not None:
        array, store = decoded.placed(array), decoded
    extent, size = array.extent, itemsize(array.dtype)
    runs = _runs(prod(array.shape))

    # Dense arrays are read in runs, strided ones element by element.
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
    """Return whether master weights round to the given weights; all NaNs are equal.

    Raises:
        UnsupportedError: master weights are not rounded to the weight's dtype.
    """
    # A few elements are rounded here, because importing numpy would take longer.
    if master_dtype != weight_dtype:
        is_few = len(master) <= MOST_PLAIN * itemsize(master_dtype)
        round_few = rounding_of(master_dtype, weight_dtype) if is_few else None
        if round_few is not None:
            master = round_few(master)
        else:
            rounded = bytearray(len(weight))
            find_cast(master_dtype, weight_dtype)(memoryview(master), memoryview(rounded))
            master = bytes(rounded)
    if master == weight:
        return True

    # Different bytes may still be NaNs, whose bits differ between implementations.
    size = itemsize(weight_dtype)
    if len(master) != len(weight) or dtype_of(weight_dtype).kind != "float":
        return False
    pairs = [(master[at : at + size], weight[at : at + size]) for at in range(0, len(weight), size)]
    return all(a == b or (_is_nan(a, weight_dtype) and _is_nan(b, weight_dtype)) for a, b in pairs)


@lru_cache(maxsize=1 << 12)
def _runs(n: int) -> tuple[tuple[int, int], ...]:
    """Return (first element, number of elements) of each run of a sample."""
    if n <= 3 * RUN:
        return ((0, n),) if n else ()
    return ((0, RUN), (n // 2, RUN), (n - RUN, RUN))


def _place(index: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the offset of an element in a strided array, in elements.

    Args:
        index: number of the element in C order.
    """
    offset = 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        index, coordinate = divmod(index, size)
        offset += coordinate * stride
    return offset


def _is_nan(data: bytes, dtype: str) -> bool:
    result = is_nan_element(data, dtype)
    if result is not None:
        return result
    wide = bytearray(8)
    find_cast(dtype, "float64")(memoryview(data), memoryview(wide))
    value: float = struct.unpack("<d", wide)[0]
    return value != value


MOST_PLAIN = 4096
"""Number of elements above which numpy is faster, its import included."""


_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}
"""Bits of positive infinity; without the sign, greater values are NaNs."""


_CODES = {"float16": "H", "bfloat16": "H", "float32": "I"}


def rounding_of(source: str, target: str) -> Callable[[bytes], bytes] | None:
    """Return a function that rounds dense little-endian elements to nearest even, without numpy.

    None for other dtypes. NaNs stay NaNs, with bits that may differ from numpy's.
    """
    return {("float32", "bfloat16"): _to_bfloat16, ("float32", "float16"): _to_float16}.get(
        (source, target)
    )


def is_nan_element(data: bytes, dtype: str) -> bool | None:
    """Return whether an element is NaN; None for dtypes other than the three of the table."""
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


MOST_COMPARED = 64
"""Number of parameters to compare, evenly spread."""


def strange_masters(catalog: Catalog, store: ReadStore) -> list[str]:
    """Return the parameters, among a sample, whose master weights do not round to their weights.

    The states are stored by name, so this does not prove a mapping. It finds weights that were
    edited, or that come from another step than the optimizer.

    Args:
        catalog: the global per-layer form, of a checkpoint that stores states by name.

    Raises:
        UnsupportedError, MissingShardError: as for ``is_master``.
    """
    named = [key for key in catalog.tensors if state_key(MASTER, key) in catalog.tensors]
    strange = []
    for key in named[:: max(1, len(named) // MOST_COMPARED)]:
        pair = _same_part(catalog, key, state_key(MASTER, key))
        if pair is not None and not is_master(store, pair[1], pair[0]):
            strange.append(key)
    return strange


def pairs_of_masters(catalog: Catalog) -> Iterator[tuple[str, StoredArray, StoredArray]]:
    """Yield (parameter, weights, master weights); the two arrays hold the same box."""
    for key in catalog.tensors:
        if state_key(MASTER, key) in catalog.tensors:
            pair = _same_part(catalog, key, state_key(MASTER, key))
            if pair is not None:
                yield key, *pair


def _same_part(catalog: Catalog, key: str, master: str) -> tuple[StoredArray, StoredArray] | None:
    """Return two arrays, weights and master weights, that hold exactly the same box; None if none.

    Args:
        key, master: keys of the parameter and of its master weights.
    """
    weights, masters = (
        [
            (fragment.box, fragment.array)
            for fragment in catalog.fragments(name)
            if fragment.array is not None and prod(fragment.array.shape) == fragment.box.n_elements
        ]
        for name in (key, master)
    )
    weight_of = dict(weights)
    return next(((weight_of[box], array) for box, array in masters if box in weight_of), None)
