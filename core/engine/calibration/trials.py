"""Try every kind of work on samples, to prove a device exact and to measure its speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from core.arrays.box import Shape, full_box
from core.arrays.cast import find_cast
from core.arrays.dtypes import dtype_of, itemsize
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment
from core.engine.device.cast import cast_on
from core.engine.device.compare import count_differing, is_equal
from core.engine.device.device import (
    CAST,
    COMPARE,
    DEQUANTIZE,
    FINGERPRINT,
    QUANTIZE,
    VALUES,
    Device,
)
from core.engine.fingerprint.definition import TABLE, form_of
from core.engine.fingerprint.kernel import fastest_products, products_in_numpy, products_on
from core.engine.fingerprint.sums import FormSum
from core.engine.numbers.facts import ValueFacts, ValueObserver
from core.engine.numbers.kinds import KINDS
from core.engine.quantize.from_float8 import Dequantized
from core.engine.quantize.source import SourceTensor
from core.engine.quantize.to_float8 import BLOCK, Quantized, Weight
from core.files.store import MemoryStore
from core.values import dataclass

Array = Any
"""A numpy array."""
Do = Callable[[], None]
"""One round of work on a sample."""
_WINDOW_BYTES = 1 << 20
_LOW_BITS = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves of float32 patterns.

Together with every upper half they lie on, next to and between the ties of all narrower types.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial of a kind of work.

    Args:
        is_exact: return whether a device that does the work gives the CPU path's bits.
        typical: return the work on about so many bytes of typical numbers, for the calling thread,
            and its actual source bytes; on a device that does the work, or (None) without.
    """

    is_exact: Callable[[Device], bool]
    typical: Callable[[Device | None, int], tuple[Do, int]]


def trial_of(work: str) -> Trial:
    """Return the trial of a kind of work (``core.engine.device.device``).

    Raises:
        KeyError: no kind of work has this name.
    """
    if work.startswith(f"{CAST} "):
        source, _, target = work.removeprefix(f"{CAST} ").partition(" → ")
        return Trial(
            partial(_is_cast_exact, source, target), partial(_typical_cast, source, target)
        )
    return _TRIALS[work]


def patterns(dtype: str) -> Array:
    """Return bit patterns of a dtype, among them all that a cast might treat separately."""
    import numpy as np

    size = itemsize(dtype)
    if dtype == "bool":
        return np.arange(256, dtype="u1") & 1
    if size <= 2:
        return np.arange(1 << 8 * size, dtype=f"u{size}")
    upper: Array = np.arange(0, 1 << 16, 1 if size == 4 else 7, dtype="u4") << 16
    single: Array = (upper[:, None] | np.array(_LOW_BITS, "u4")).reshape(-1)
    if size == 4:
        return single
    random = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        wide: Array = single.view("f4").astype("f8").view("u8")
    half = np.uint64(1 << 28)  # half-way between two numbers of float32
    nan: Array = random.integers(0, 1 << 52, 4096, dtype="u8") | np.uint64(0x7FF << 52)
    any_bits: Array = random.integers(0, 1 << 64, 1 << 14, dtype="u8")
    return np.concatenate(
        [wide, wide + 1, wide - 1, wide | half, (wide | half) + 1, nan, nan | (1 << 63), any_bits]
    )


def typical_numbers(dtype: str, n_bytes: int) -> Array:
    """Return about ``n_bytes`` bytes of normally distributed numbers, as weights are."""
    import numpy as np

    random = np.random.default_rng(1)
    n = max(1, n_bytes // itemsize(dtype))
    if dtype_of(dtype).kind != "float":
        data: Array = random.integers(0, 2, n * itemsize(dtype), dtype="u1")
        return data
    if dtype == "float8_e8m0fnu":
        return random.integers(100, 140, n, dtype="u1")
    numbers: Array = random.standard_normal(n, dtype=np.float32)
    if dtype == "float32":
        return numbers.view("u1")
    data = np.empty(n * itemsize(dtype), "u1")
    find_cast("float32", dtype)(memoryview(numbers.view("u1")), memoryview(data))
    return data


def _is_cast_exact(source: str, target: str, device: Device) -> bool:
    data: Array = patterns(source).view("u1")
    n_bytes = len(data) // itemsize(source) * itemsize(target)
    outs = [bytearray(n_bytes) for _ in range(2)]
    for cast, out in zip(
        (find_cast(source, target), cast_on(device, source, target)), outs, strict=True
    ):
        cast(memoryview(data), memoryview(out))
    return outs[0] == outs[1]


def _typical_cast(source: str, target: str, device: Device | None, n_bytes: int) -> tuple[Do, int]:
    data = typical_numbers(source, n_bytes)
    out = memoryview(bytearray(len(data) // itemsize(source) * itemsize(target)))
    cast = cast_on(device, source, target)
    return lambda: cast(memoryview(data), out), len(data)


def measure_values(device: Device | None, dtype: str, data: Array) -> ValueFacts:
    """Return the facts about the values of an array, which is fed in windows."""
    array = StoredArray("sample", dtype, (len(data) // itemsize(dtype),), Extent("sample", 0))
    observer = ValueObserver(device)
    observer.sees(array)
    for start in range(0, len(data), _WINDOW_BYTES):
        observer.feed(
            array, start // itemsize(dtype), memoryview(data)[start : start + _WINDOW_BYTES]
        )
    observer.finish(array)
    return observer.facts["sample"]


def _are_values_exact(device: Device) -> bool:
    import numpy as np

    for dtype in KINDS:
        base = {8: "float64", 4: "float32", 2: "float16", 1: "float8_e5m2"}[KINDS[dtype].n_bytes]
        base_patterns = patterns(base)
        data: Array = base_patterns[:: max(1, len(base_patterns) >> 14)].copy().view("u1")
        data = data[: len(data) // itemsize(dtype) * itemsize(dtype)]
        constant: Array = np.tile(data[: itemsize(dtype)], 100)
        typical = typical_numbers(base, 1 << 14)
        for sample in (data, data[::-1].copy(), constant, typical):
            if measure_values(device, dtype, sample) != measure_values(None, dtype, sample):
                return False
    return True


def _typical_values(device: Device | None, n_bytes: int) -> tuple[Do, int]:
    data = typical_numbers("bfloat16", n_bytes)

    def do() -> None:
        measure_values(device, "bfloat16", data)

    return do, len(data)


def _are_products_exact(device: Device) -> bool:
    import numpy as np

    products = products_on(device)
    lowest: Array = np.full((33, TABLE), -128, np.int8)
    highest: Array = np.full((33, TABLE), 127, np.int8)
    mixed: Array = np.random.default_rng(2).integers(-128, 128, (33, TABLE)).astype(np.int8)
    return all(
        bool((products(data[:, :n], first) == products_in_numpy(data[:, :n], first)).all())
        for data in (lowest, highest, mixed)
        for first, n in ((0, TABLE), (0, 1), (5, 1000), (TABLE - 96, 96))
    )


def _typical_fingerprint(device: Device | None, n_bytes: int) -> tuple[Do, int]:
    data = typical_numbers("bfloat16", n_bytes)
    form = form_of((len(data) // 8192, 4096), 2)

    def do() -> None:
        with fastest_products(len(data), device) as products:
            for start in range(0, len(data) // 8192 * 8192, _WINDOW_BYTES):
                FormSum(form, products).add_run(
                    start, memoryview(data)[start : start + _WINDOW_BYTES]
                )

    return do, len(data)


def _is_comparison_exact(device: Device) -> bool:
    import numpy as np

    data: Array = np.arange(1 << 14, dtype="u4").view("u1")
    for changed in ((), (0,), (len(data) - 1,), (5, 6, 7_777)):
        other = data.copy()
        other[list(changed)] ^= 0x80
        views = memoryview(data), memoryview(other)
        if any(
            count_differing(device, *views, size) != count_differing(None, *views, size)
            for size in (1, 4, 8)
        ):
            return False
    return True


def _typical_comparison(device: Device | None, n_bytes: int) -> tuple[Do, int]:
    data = typical_numbers("bfloat16", n_bytes // 2)
    copy = data.copy()

    def do() -> None:
        for start in range(0, len(data), _WINDOW_BYTES):
            stop = start + _WINDOW_BYTES
            assert is_equal(device, memoryview(data)[start:stop], memoryview(copy)[start:stop])

    return do, 2 * len(data)


def _tensor(name: str, dtype: str, shape: Shape) -> SourceTensor:
    """Return a tensor that fills the file of its name."""
    array = StoredArray(name, dtype, shape, Extent(name, 0))
    return SourceTensor(
        name,
        dtype,
        shape,
        (Fragment(full_box(shape), array, (0,) * len(shape)),),
    )


def _decode_all(
    encoding: Quantized | Dequantized, files: dict[str, bytes], device: Device | None
) -> bytes:
    """Decode a whole array of an encoding, unit by unit, on a device or the CPU path."""
    shape = (
        encoding.weight.source.shape if isinstance(encoding, Quantized) else encoding.weight.shape
    )
    dtype = encoding.dtype if isinstance(encoding, Dequantized) else "float8_e4m3fn"
    array = StoredArray("decoded", dtype, shape, Extent("decoded", 0, encoding=encoding))
    store = DecodedStore(MemoryStore(files), device=device)
    n_units = -(-array.n_bytes // encoding.unit_bytes)
    return b"".join(bytes(encoding.decode(store, array, unit)) for unit in range(n_units))


def _is_quantization_exact(device: Device) -> bool:
    import numpy as np

    shape = (2 * BLOCK + 3, 5 * BLOCK + 7)
    random = np.random.default_rng(3)
    for source, dtype in (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
    ):
        # Scales of many magnitudes, with zeros, a block of zeros, and a block of subnormal numbers.
        scale: Array = np.exp(8 * random.standard_normal(shape)).astype(np.float32)
        numbers: Array = np.clip(
            random.standard_normal(shape, np.float32) * scale, -60000, 60000
        ).astype(np.float32)
        numbers[random.random(shape) < 0.05] = 0
        numbers[:BLOCK, :BLOCK] = 0
        numbers[:BLOCK, BLOCK : 2 * BLOCK] *= np.float32(2.0**-130)
        data = numbers.tobytes()
        if source != "float32":
            out = bytearray(numbers.size * 2)
            find_cast("float32", source)(memoryview(data), memoryview(out))
            data = bytes(out)
        for per_block in (True, False):
            weight = _tensor("w", source, shape)
            encoding = Quantized(Weight(weight, dtype, per_block))
            files = {"w": data}
            if _decode_all(encoding, files, None) != _decode_all(encoding, files, device):
                return False
    return True


def _typical_quantization(device: Device | None, n_bytes: int) -> tuple[Do, int]:
    shape = (max(1, n_bytes // 2 // 4096), 4096)
    data = typical_numbers("bfloat16", shape[0] * 8192)
    weight = _tensor("w", "bfloat16", shape)
    files = {"w": data.tobytes()}

    def do() -> None:
        _decode_all(Quantized(Weight(weight, "bfloat16", True)), files, device)

    return do, len(data)


def _is_dequantization_exact(device: Device) -> bool:
    import numpy as np

    single = np.array(
        [1, 0.37, -3, 1e-30, 1e30, 1e38, 2.0**-140, 0, np.inf, -np.inf, np.nan, 448], np.float32
    )
    shape = (len(single), 512)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        numbers: Array = np.tile(np.arange(256, dtype="u1"), len(single) * 2)
        files = {"w": numbers.tobytes(), "s": single.tobytes()}
        weight = _tensor("w", dtype, shape)
        for target in ("bfloat16", "float16", "float32", "float64"):
            rows = Dequantized(
                weight, _tensor("s", "float32", (len(single), 1)), (1, shape[1]), target
            )
            if _decode_all(rows, files, None) != _decode_all(rows, files, device):
                return False
    blocks = Dequantized(
        _tensor("w", "float8_e4m3fn", (6, 1024)),
        _tensor("s", "float32", (3, 4)),
        (2, 256),
        "bfloat16",
    )
    return _decode_all(blocks, files, None) == _decode_all(blocks, files, device)


def _typical_dequantization(device: Device | None, n_bytes: int) -> tuple[Do, int]:
    shape = (-(-n_bytes // 4096), 4096)
    data = typical_numbers("float8_e4m3fn", shape[0] * 4096)
    scales = typical_numbers("float32", -(-shape[0] // BLOCK) * 32 * 4)
    encoding = Dequantized(
        _tensor("w", "float8_e4m3fn", shape),
        _tensor("s", "float32", (-(-shape[0] // BLOCK), 32)),
        (BLOCK, BLOCK),
        "bfloat16",
    )
    files = {"w": data.tobytes(), "s": scales.tobytes()}

    def do() -> None:
        _decode_all(encoding, files, device)

    return do, len(data)


_TRIALS = {
    VALUES: Trial(_are_values_exact, _typical_values),
    FINGERPRINT: Trial(_are_products_exact, _typical_fingerprint),
    COMPARE: Trial(_is_comparison_exact, _typical_comparison),
    QUANTIZE: Trial(_is_quantization_exact, _typical_quantization),
    DEQUANTIZE: Trial(_is_dequantization_exact, _typical_dequantization),
}
