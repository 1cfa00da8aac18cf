"""Dequantize weights of torchao's classes, which are read as their parts.

::

    X.qdata, X.scale, X.zero_point, and the settings X.class, X.block_size, X.dtype …  ──▶  X

for ``Float8Tensor``, ``Int8Tensor`` and ``IntxUnpackedToInt8Tensor`` (``core.formats.torch.
tensor_parts``). The result is that of their ``dequantize()``, in the dtype that ``--dequantize``
names.

Not supported, refused by name: weights whose activations are scaled in advance (``act_pre_scale``),
of which the weight alone is not the layer's; zero points that are not int8.

Source: torchao 0.18.0 ``quantization/quantize_/workflows``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor, compute_whole
from core.engine.changes.blockwise_states import without_parts
from core.engine.quantize.from_torchao import DequantizedTorchao
from core.engine.quantize.source import source_of
from core.errors import CorruptError, UnsupportedError
from core.pickle.fields import describe_value
from core.values import dataclass

CLASSES = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")


@dataclass(frozen=True, slots=True)
class DequantizedWeights:
    """A catalog in which weights of torchao are computed.

    Args:
        keys: the weights.
    """

    catalog: Catalog
    keys: tuple[str, ...]


def dequantize_torchao(catalog: Catalog, dtype: str) -> DequantizedWeights:
    """Turn the parts of torchao's weights into tensors of ``dtype``.

    Raises:
        UnsupportedError: a weight cannot be dequantized by itself.
        CorruptError: the parts of a weight do not fit each other.
    """
    block_of: dict[str, Shape] = {}
    for name in catalog.tensors:
        key = name.removesuffix(".qdata")
        kind = catalog.objects.get(f"{key}.class")
        if key != name and kind is not None and kind.value in CLASSES:
            block_of[key] = _block(catalog, key)
    if not block_of:
        return DequantizedWeights(catalog, ())

    def dequantize_weight(key: str) -> StoredArray:
        codes, zeros = source_of(catalog, f"{key}.qdata"), f"{key}.zero_point"
        encoding = DequantizedTorchao(
            codes,
            source_of(catalog, f"{key}.scale"),
            source_of(catalog, zeros) if zeros in catalog.tensors else None,
            block_of[key],
            dtype,
        )
        extent = Extent(codes.file, 0, encoding=encoding)
        return StoredArray(key, dtype, codes.shape, extent)

    # A weight takes the place of its codes; the other parts and the settings go.
    parts = tuple(f"{key}." for key in block_of)
    tensors: dict[str, Tensor] = {}
    for name, tensor in catalog.tensors.items():
        key = name.removesuffix(".qdata")
        if key in block_of and key != name:
            tensors[key] = Tensor(
                dtype, tensor.shape, compute_whole(partial(dequantize_weight, key))
            )
        elif not name.startswith(parts):
            tensors[name] = tensor
    key_of = {f"{key}.qdata": key for key in block_of}
    skeleton = catalog.skeleton
    result = replace(
        catalog,
        tensors=tensors,
        objects={key: item for key, item in catalog.objects.items() if not key.startswith(parts)},
        skeleton=None if skeleton is None else without_parts(skeleton, key_of, set(), parts),
    )
    return DequantizedWeights(result, tuple(block_of))


def _block(catalog: Catalog, key: str) -> Shape:
    """Return the block of a weight's scales, after checking that its parts fit each other.

    Raises:
        UnsupportedError, CorruptError: as for ``dequantize_torchao``.
    """
    tensors = catalog.tensors
    codes, scales = tensors[f"{key}.qdata"], tensors.get(f"{key}.scale")
    zeros = tensors.get(f"{key}.zero_point")
    if f"{key}.act_pre_scale" in tensors:
        raise UnsupportedError(
            "--dequantize: activations are scaled by act_pre_scale before they reach this weight, "
            "so the weight alone does not define the layer",
            key=key,
            hint="to copy the parts unchanged, omit --dequantize",
        )
    item = catalog.objects.get(f"{key}.block_size")
    recorded = None if item is None else item.value
    problem = None
    if (
        not isinstance(recorded, (list, tuple))
        or len(recorded) != len(codes.shape)
        or any(type(extent) is not int or extent < 1 for extent in recorded)
    ):
        problem = (
            f"a block size of {describe_value(recorded)} does not fit codes of shape {codes.shape}"
        )
        raise CorruptError(problem, key=key)
    block = tuple(map(int, recorded))
    pairs = list(zip(codes.shape, block, strict=True))
    n_blocks = prod(extent // width for extent, width in pairs)
    codes_type = dtype_of(codes.dtype)
    if any(extent % width for extent, width in pairs):
        problem = f"a block size of {block} does not evenly divide codes of shape {codes.shape}"
    elif codes.dtype != "int8" and (codes_type.kind, codes_type.itemsize) != ("float", 1):
        problem = f"the codes are {codes.dtype}, not int8 or float8"
    elif scales is None or prod(scales.shape) != n_blocks or dtype_of(scales.dtype).kind != "float":
        text = "missing" if scales is None else f"{scales.dtype} of shape {scales.shape}"
        problem = f"there are {n_blocks} blocks, but the scales are {text}"
    elif zeros is not None and prod(zeros.shape) != n_blocks:
        problem = f"there are {n_blocks} blocks, but the zero points have shape {zeros.shape}"
    if problem is not None:
        raise CorruptError(f"the parts of a torchao tensor do not fit together: {problem}", key=key)
    if zeros is not None and zeros.dtype != "int8":
        raise UnsupportedError(
            f"--dequantize: {zeros.dtype} zero points are not supported, only int8 zero points",
            key=key,
            hint="to copy the parts unchanged, omit --dequantize",
        )
    return block
