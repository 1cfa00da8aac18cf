"""Dequantize float8, int8 and MXFP4 weights with scales, or quantize weights to float8.

Both return a catalog in which some tensors are computed while they are copied
(``core.engine.quantize.from_float8`` and ``core.engine.quantize.to_float8`` define how, bit for
bit).

Scales of a tensor ``X``, by name:

==================  ===============================================================================
``X_scale_inv``     DeepSeek-V3 and others: float32, one for each block of 128 × 128, row, or tensor
``X_scale``         compressed-tensors and others (``….weight_scale``): one for each row, or tensor
==================  ===============================================================================

Both are factors. The shape of the scales determines what each scale applies to, for a tensor whose
last two axes are r × c:

- ``()`` or all extents 1: the complete tensor;
- ``(…, r, 1)``: a row;
- ``(…, ⌈r / block rows⌉, ⌈c / block columns⌉)``: a block.

bitsandbytes' int8: ``….weight`` times the row's number in ``….SCB``, over 127. compressed-tensors'
int8, if ``config.json`` declares that scheme: ``….weight_scale``, one for each row or tensor.

torchao: ``X.qdata`` and its other parts (``torchao_weights``).

MXFP4: ``X_blocks`` and ``X_scales`` of gpt-oss become ``X`` (``core.engine.quantize.from_mxfp4``).

Written, in float32: ``X_scale_inv``, ``(…, ⌈r / 128⌉, ⌈c / 128⌉)``, or ``()`` for one scale per
tensor. If all scales are for complete tensors, they are ``X_scale``, ``(1,)``, as in
compressed-tensors: vLLM and SGLang look for these names.

Tensors with more than two axes (stacked layers, experts) are many matrices, each with its own
scales.

Not supported, refused by the scheme's name (``core.engine.quantize.schemes``): scales that divide,
zero points, groups, packed types.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from core.arrays.box import Shape
from core.arrays.dtypes import DType, dtype_called, dtype_of, is_float8, itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import dropped_unlisted
from core.engine.catalog.key_patterns import LIST_THEM, matcher, some_of
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.removal import remove_entries
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor, compute_whole, stack
from core.engine.changes.rename import nest_again
from core.engine.changes.torchao_weights import dequantize_torchao
from core.engine.quantize.from_float8 import Dequantized
from core.engine.quantize.from_mxfp4 import BLOCKS, GROUP, SCALES, DequantizedMxfp4
from core.engine.quantize.schemes import (
    QuantizedWeight,
    check_scheme,
    quantized_weights,
    refused_scheme,
)
from core.engine.quantize.source import source_of
from core.engine.quantize.to_float8 import BLOCK, Quantized, Scales, Weight
from core.errors import CorruptError, UnsupportedError, UsageError, did_you_mean
from core.pickle.inert import TensorLeaf
from core.pickle.nesting import ListIndex, entries
from core.values import dataclass, n_text

KINDS = ("block", "tensor", "none")
"""The kinds of scales that a rule of ``quantize`` may request."""

Rule = tuple[str | None, str]
"""(glob, or None for the weights that are quantized by default; one of ``KINDS``)."""

_SUFFIXES = ("_scale_inv", "_scale")
_BITSANDBYTES, _INT8, _MXFP4 = "bitsandbytes int8", "int8 scales", "mxfp4"
"""Values of ``dequantize`` in the table of schemes."""
_OVER_127 = 7.874015718698502e-3
"""1/127 as bitsandbytes rounds it."""
_KEPT = re.compile(
    r"(^|\.)(\w*embed\w*|wte|wpe|lm_head|head|output_layer|shared_head|score|classifier|eh_proj"
    r"|gate|router|shared_expert_gate|\w*norm\w*|ln_\w+|ln\d*)(\.|$)"
)
_STACKED = re.compile(r"(^|\.)(layers|experts)\.(?!\d)")
_ACTIVATION_SCALE = re.compile(
    r"(?P<weight>(?:.*\.)?|.+(?=_))_?(?:input|activation)_(?:scale|zero_point)"
)
"""A scale of activations, or their zero, and the weight that the name begins with.

``mlp.up_proj.input_scale`` (of ``mlp.up_proj.weight``), and of stacked experts
``mlp.experts.gate_up_proj_activation_scale`` and ``experts.w13_input_scale`` (of
``experts.w13_weight``).
"""


@dataclass(frozen=True, slots=True)
class QuantizedCatalog:
    """A catalog after dequantizing or quantizing.

    Args:
        catalog: the changed catalog.
        keys: the tensors that changed, in order.
        remaining: float8 tensors that were not dequantized, or float matrices that were not
            quantized.
        notes: messages for the user.
    """

    catalog: Catalog
    keys: tuple[str, ...]
    remaining: tuple[str, ...]
    notes: tuple[str, ...]


def companion(key: str, tensor: Tensor, keys: Container[str]) -> str | None:
    """Return the key of a float8 tensor's scales among ``keys``, or None."""
    if not is_float8(tensor.dtype):
        return None
    return next((name for suffix in _SUFFIXES if (name := key + suffix) in keys), None)


def parse_dequantized_type(name: str) -> DType:
    """Return the element type that a user named for ``--dequantize``.

    Raises:
        UsageError: the name is not known, or not that of a float type of at least 16 bits.
    """
    target = dtype_called(name)
    if target.kind != "float" or target.itemsize < 2:
        raise UsageError(
            f"--dequantize: {name!r} is not a float dtype of at least 16 bits",
            hint="use bf16, fp16 or fp32",
        )
    return target


def dequantize(
    catalog: Catalog,
    dtype: str = "bfloat16",
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    config: Mapping[str, object] | None = None,
) -> QuantizedCatalog:
    """Turn float8, int8 and MXFP4 tensors with scales into tensors of ``dtype`` without scales.

    Args:
        dtype: a float type of at least 16 bits.
        block: rows and columns of a block, for scales whose shape has blocks.
        config: the model's ``config.json``, or None.

    Raises:
        UsageError: ``dtype`` is not known or not such a float type, or no tensor has scales.
        CorruptError: scales have a shape or dtype that does not fit, or belong to no tensor.
        UnsupportedError: the scheme of a weight cannot be dequantized.
    """
    target = parse_dequantized_type(dtype)

    # Find the scales and check them all now, so that no error comes in the middle of copying.
    of_torchao = dequantize_torchao(catalog, target.name)
    unpacked = _dequantize_mxfp4(of_torchao.catalog, target.name, config)
    if of_torchao.keys:
        note = f"{n_text(len(of_torchao.keys), 'torchao weight')} converted to {target.name}"
        keys = (*of_torchao.keys, *unpacked.keys)
        unpacked = replace(unpacked, keys=keys, notes=(note, *unpacked.notes))
    catalog, unpacked_keys = unpacked.catalog, unpacked.keys
    integers = _find_integer_weights(catalog, config)
    float8_scales, bare = _find_float8_scales(catalog, block)
    scales_of = {key: weight.scales[0] for key, weight in integers.items()} | float8_scales
    if not scales_of and unpacked_keys:
        return replace(unpacked, remaining=tuple(bare))
    if not scales_of:
        raise UsageError(
            "--dequantize: no float8, int8 or MXFP4 tensor has scales",
            hint="if the float8 values need no scales, cast them with --dtype"
            if bare
            else "omit --dequantize",
        )
    # The scales are applied, bitsandbytes' notes describe numbers that are gone, and activations
    # are quantized only before a product with such numbers: none of these is kept.
    # What has such a name beside a weight of another type is the model's own parameter.
    weights = {*unpacked_keys, *scales_of, *bare}
    activations = {
        key: weight
        for key in catalog.tensors
        if (match := _ACTIVATION_SCALE.fullmatch(key)) is not None
        for weight in (match["weight"], f"{match['weight']}weight", f"{match['weight']}_weight")
        if weight in weights
    }
    unscaled = frozenset(bare)
    kept = {key for key, weight in activations.items() if weight in unscaled}
    removed = {
        *scales_of.values(),
        *(key for weight in integers.values() for key in _row_formats(weight)),
        *(activations.keys() - kept),
    }

    def dequantize_weight(key: str) -> StoredArray:
        weight, scales = source_of(catalog, key), source_of(catalog, scales_of[key])
        if (integer := integers.get(key)) is None:
            shape = _block_of(catalog, key, scales_of[key], block)
            encoding = Dequantized(weight, scales, shape, target.name)
        else:
            # bitsandbytes stores the largest absolute value of a row, so its scale is that over
            # 127.
            shape = (1, max(1, weight.shape[-1])) if scales.shape[:1] == weight.shape[:1] else None
            factor = _OVER_127 if integer.scheme.dequantize == _BITSANDBYTES else None
            note = next((source_of(catalog, note) for note in _row_formats(integer)), None)
            encoding = Dequantized(weight, scales, shape, target.name, factor, note)
        extent = Extent(weight.file, 0, encoding=encoding)
        return StoredArray(key, target.name, weight.shape, extent)

    # Remove the scales, and give the dequantized tensors the new dtype. Tied weights with the same
    # scales stay tied.
    remaining = remove_entries(catalog, removed)
    tensors = dict(remaining.tensors)
    dequantized_of: dict[tuple[int, int], Tensor] = {}
    for key, scales in scales_of.items():
        weight = tensors[key]
        pair = id(weight), id(catalog.tensors[scales])
        if pair not in dequantized_of:
            tiling = compute_whole(partial(dequantize_weight, key))
            dequantized_of[pair] = replace(weight, dtype=target.name, tiling=tiling)
        tensors[key] = dequantized_of[pair]
    # Without float8 weights, nothing applies the scales of activations.
    unused = {key: catalog.tensors[key] for key in activations if key in removed}
    result = replace(
        remaining,
        tensors=tensors,
        dropped=(*catalog.dropped, *dropped_unlisted(unused, "activation scales")),
    )

    # Note the float8 tensors and scales that were not used.
    notes = [f"{some_of(bare)}: float8 without scales, left unchanged"] if bare else []
    notes += [f"{some_of(list(unused))}: activation scales, dropped"] if unused else []
    notes += [f"{some_of(sorted(kept))}: activation scales, left unchanged"] if kept else []
    return QuantizedCatalog(
        result, (*unpacked_keys, *scales_of), tuple(bare), (*unpacked.notes, *notes)
    )


def _dequantize_mxfp4(
    catalog: Catalog, dtype: str, config: Mapping[str, object] | None
) -> QuantizedCatalog:
    """Turn MXFP4 experts into tensors of another name and shape, which models have without MXFP4.

    Raises:
        CorruptError: scales do not fit their numbers, or the wide tensor exists as well.
        UnsupportedError: the tensors are in nested dictionaries.
    """
    numbers_of: dict[str, str] = {}
    for weight in quantized_weights(catalog.tensors, config):
        if weight.scheme.dequantize != _MXFP4:
            continue
        key = weight.key.removesuffix(BLOCKS)
        numbers, scales = catalog.tensors[weight.key], catalog.tensors.get(key + SCALES)
        fits = scales is not None and (*scales.shape, GROUP // 2) == numbers.shape
        if scales is None or not fits or scales.dtype != "uint8" or len(numbers.shape) != 4:
            text = (
                "are missing" if scales is None else f"are {scales.dtype} of shape {scales.shape}"
            )
            raise CorruptError(
                f"the MXFP4 values have shape {numbers.shape}, but their scales {text}",
                key=key + SCALES,
            )
        if key in catalog.tensors:
            raise CorruptError("the tensor is also stored as MXFP4 values", key=key)
        numbers_of[key] = weight.key
    if not numbers_of:
        return QuantizedCatalog(catalog, (), (), ())
    if catalog.skeleton is not None:
        raise UnsupportedError(
            "--dequantize: MXFP4 weights in a nested state dict are not supported",
            key=next(iter(numbers_of)),
            hint="dequantize the model's published safetensors files instead",
        )

    def dequantize_expert(key: str, expert: int, shape: Shape) -> StoredArray:
        blocks, scales = source_of(catalog, key + BLOCKS), source_of(catalog, key + SCALES)
        encoding = DequantizedMxfp4(blocks, scales, expert, dtype)
        extent = Extent(blocks.file, 0, encoding=encoding)
        return StoredArray(f"{key}[{expert}]", dtype, shape, extent)

    # The wide tensor takes the place of its numbers; the scales go.
    key_of = {numbers: key for key, numbers in numbers_of.items()}
    gone = {key + SCALES for key in numbers_of}
    tensors: dict[str, Tensor] = {}
    for name, tensor in catalog.tensors.items():
        if name in key_of:
            n_experts, n_columns, n_groups, _ = tensor.shape
            key, shape = key_of[name], (n_groups * GROUP, n_columns)
            tensors[key] = stack(
                [
                    Tensor(
                        dtype, shape, compute_whole(partial(dequantize_expert, key, expert, shape))
                    )
                    for expert in range(n_experts)
                ]
            )
        elif name not in gone:
            tensors[name] = tensor

    result = replace(catalog, tensors=tensors)
    note = f"{n_text(len(numbers_of), 'MXFP4 tensor')} converted to {dtype}"
    return QuantizedCatalog(result, tuple(numbers_of), (), (note,))


def _find_float8_scales(
    catalog: Catalog, block: tuple[int, int]
) -> tuple[dict[str, str], list[str]]:
    """Find the scales of the float8 tensors, and check that they fit.

    Returns:
        The key of the scales by tensor, and the float8 tensors without scales.

    Raises:
        CorruptError: scales do not fit their tensor, or belong to no tensor.
    """
    scales_of: dict[str, str] = {}
    bare: list[str] = []
    for key, tensor in catalog.tensors.items():
        scales = companion(key, tensor, catalog.tensors)
        if scales is not None:
            scales_of[key] = scales
            _block_of(catalog, key, scales, block)
        elif is_float8(tensor.dtype):
            bare.append(key)
        elif key.endswith(_SUFFIXES[0]) and key.removesuffix(_SUFFIXES[0]) not in catalog.tensors:
            raise CorruptError(
                "the weight that these scales belong to is missing",
                key=key,
                hint="copy the checkpoint again, or drop the scales with --exclude if they are not "
                "needed",
            )
    return scales_of, bare


def _find_integer_weights(
    catalog: Catalog, config: Mapping[str, object] | None
) -> dict[str, QuantizedWeight]:
    """Find the int8 weights with scales by key, and check that the scales fit.

    Raises:
        UnsupportedError: the scheme of a weight cannot be dequantized.
        CorruptError: scales do not fit their weight.
    """
    check_scheme(config, doing="--dequantize")
    weights: dict[str, QuantizedWeight] = {}
    for weight in quantized_weights(catalog.tensors, config):
        scheme = weight.scheme
        if scheme.dequantize == "scales":
            continue  # float8
        # Further scales or notes would be zero points or an order of columns.
        is_plain = scheme.dequantize == _BITSANDBYTES or len(weight.scales) == 1
        if scheme.dequantize is None or not is_plain:
            raise refused_scheme(weight)
        # One scale per row or, except in bitsandbytes, per tensor.
        tensor, scales = catalog.tensors[weight.key], catalog.tensors[weight.scales[0]]
        rows = tensor.shape[0] if len(tensor.shape) == 2 else None
        fits = {(rows,)} if scheme.dequantize == _BITSANDBYTES else {(rows, 1), (1,), (), (1, 1)}
        kind = dtype_of(scales.dtype)
        if (
            scheme.dequantize == _INT8
            and rows is not None
            and scales.shape[:1] == (rows,)
            and scales.shape not in fits
        ):
            raise refused_scheme(weight)  # several scales per row: one for each group of columns
        if rows is None or scales.shape not in fits or kind.kind != "float" or kind.itemsize < 2:
            raise CorruptError(
                f"the scales ({scales.dtype}, shape {scales.shape}) do not fit "
                f"the {scheme.name} weight {weight.key!r} (shape {tensor.shape})",
                key=weight.scales[0],
            )
        weights[weight.key] = weight
    return weights


def _row_formats(weight: QuantizedWeight) -> tuple[str, ...]:
    """Return the key of bitsandbytes' ``weight_format`` (order of the numbers), if it exists."""
    return weight.others if weight.scheme.dequantize == _BITSANDBYTES else ()


def _block_of(
    catalog: Catalog, key: str, scales_key: str, block: tuple[int, int]
) -> tuple[int, int] | None:
    """Return rows and columns of a block, or None if one scale applies to the complete tensor.

    Args:
        key, scales_key: the tensor and its scales.
        block: rows and columns that the configuration states.

    Raises:
        CorruptError: the scales do not fit the tensor.
    """
    tensor, scales = catalog.tensors[key], catalog.tensors[scales_key]
    facts = dtype_of(scales.dtype)
    if facts.kind != "float" or (facts.itemsize == 1 and facts.name != "float8_e8m0fnu"):
        raise CorruptError(
            f"the scales of {key!r} are {scales.dtype}, which is not a valid dtype for scales",
            key=scales_key,
        )
    # A row is a block as well: one of height 1, over all columns.
    shape = tensor.shape
    if scales.n_elements == 1:
        return None
    if len(shape) >= 2:
        *lead, rows, columns = shape
        if scales.shape == (*lead, rows, 1):
            return 1, max(1, columns)
        if scales.shape == (*lead, -(-rows // block[0]), -(-columns // block[1])):
            return block
    raise CorruptError(
        f"the scales (shape {scales.shape}) do not fit {key!r} (shape {shape}) "
        f"with a block size of {block[0]} × {block[1]}",
        key=scales_key,
        hint="check quantization_config.weight_block_size in config.json",
    )


def quantize(catalog: Catalog, rules: Sequence[Rule]) -> QuantizedCatalog:
    """Quantize the float matrices that the rules choose to float8_e4m3fn with scales.

    Args:
        rules: later rules win. ``None`` as glob stands for the matrices called ``….weight`` that
            DeepSeek-V3 stores in float8: no embeddings, output layers, norms, routers or optimizer
            state, and of the tensors with more than two axes only stacked layers and experts. A
            glob chooses among all tensors with at least two axes and 16 bits.

    Raises:
        UsageError: a rule requests a kind that is not in ``KINDS``, a glob matches no matrix, or
            scales exist already.
    """
    # Choose the matrices, and name their scales.
    matrices = [
        key
        for key, tensor in catalog.tensors.items()
        if len(tensor.shape) >= 2
        and dtype_of(tensor.dtype).kind == "float"
        and itemsize(tensor.dtype) >= 2
    ]
    kinds = _choose_kinds(catalog, matrices, rules)
    suffix, shape_of_one = ("_scale_inv", ()) if "block" in kinds.values() else ("_scale", (1,))
    scales_of = {key: f"{key}{suffix}" for key in kinds}
    taken = next(
        (new for new in scales_of.values() if new in catalog.tensors or new in catalog.objects),
        None,
    )
    if taken is not None:
        raise UsageError(
            "--quantize: the checkpoint already has an entry with the same name as the new scales",
            key=taken,
        )

    # Compute the numbers and their scales while they are copied. Both read the same Weight, so that
    # the scales are computed once for both.
    @cache
    def read_weight(key: str) -> Weight:
        return Weight(source_of(catalog, key), catalog.tensors[key].dtype, kinds[key] == "block")

    def quantize_weight(key: str) -> StoredArray:
        weight = read_weight(key)
        extent = Extent(weight.source.file, 0, encoding=Quantized(weight))
        return StoredArray(key, "float8_e4m3fn", catalog.tensors[key].shape, extent)

    def compute_scales(key: str, shape: Shape) -> StoredArray:
        weight = read_weight(key)
        extent = Extent(weight.source.file, 0, encoding=Scales(weight))
        return StoredArray(scales_of[key], "float32", shape, extent)

    # Add the scales, each right after its tensor.
    tensors: dict[str, Tensor] = {}
    for key, tensor in catalog.tensors.items():
        if key not in kinds:
            tensors[key] = tensor
            continue
        shape = tensor.shape
        blocks = (
            (*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:]))
            if kinds[key] == "block"
            else shape_of_one
        )
        tensors[key] = replace(
            tensor, dtype="float8_e4m3fn", tiling=compute_whole(partial(quantize_weight, key))
        )
        tensors[scales_of[key]] = Tensor(
            "float32", blocks, compute_whole(partial(compute_scales, key, blocks))
        )

    result = replace(
        catalog,
        tensors=tensors,
        skeleton=None if catalog.skeleton is None else _with_scales(catalog.skeleton, scales_of),
    )
    remaining = [key for key in matrices if key not in kinds and not is_optimizer_key(key)]
    return QuantizedCatalog(result, tuple(kinds), tuple(remaining), ())


def _choose_kinds(
    catalog: Catalog, matrices: Sequence[str], rules: Sequence[Rule]
) -> dict[str, str]:
    """Return the kind of scales of each matrix that the rules choose, in the order of ``matrices``.

    Raises:
        UsageError: a rule requests an unknown kind, or its glob matches no matrix.
    """
    kind_of: dict[str, str] = {}
    for glob, kind in rules:
        if kind not in KINDS:
            raise UsageError(
                f"--quantize: {kind!r} is not one of {', '.join(KINDS)}",
                hint=did_you_mean(kind, KINDS),
            )
        if glob is None:
            chosen = [key for key in matrices if _is_default(key, catalog.tensors[key])]
        else:
            chosen = list(filter(matcher(glob), matrices))
        if not chosen:
            raise UsageError(
                "--quantize: no matrix "
                + ("is the weight of a linear layer" if glob is None else f"matches {glob!r}"),
                hint=LIST_THEM,
            )
        kind_of.update(dict.fromkeys(chosen, kind))
    return {key: kind_of[key] for key in matrices if kind_of.get(key, "none") != "none"}


def _is_default(key: str, tensor: Tensor) -> bool:
    """Return whether a matrix is a linear weight that DeepSeek-V3 has in float8."""
    is_linear = key.endswith(".weight") and not is_optimizer_key(key) and _KEPT.search(key) is None
    return is_linear and (len(tensor.shape) == 2 or _STACKED.search(key) is not None)


def _with_scales(skeleton: object, scales_of: Mapping[str, str]) -> object:
    """Return a skeleton in which scales come right after their tensors."""
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        leaves[entry.path] = entry.leaf
        new = scales_of.get(entry.key) if isinstance(entry.leaf, TensorLeaf) else None
        if new is not None:
            # A list has no place for a name: such scales go to the root, under their full key.
            name = entry.path[-1]
            path = (
                (new,)
                if isinstance(name, ListIndex)
                else (*entry.path[:-1], f"{name}{new.removeprefix(entry.key)}")
            )
            leaves[path] = TensorLeaf(new)
    return nest_again(leaves)
