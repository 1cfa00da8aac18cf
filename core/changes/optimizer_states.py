"""Dequantize optimizer states of 8 and 4 bits to float32.

::

    PARAM.state1, .absmax1, .qmap1   bitsandbytes, blockwise (Adam8bit, AdamW8bit): exp_avg
    PARAM.state2, .absmax2, .qmap2                                                  exp_avg_sq
    PARAM.state1, .state2            the same in float32, of parameters below 4096 elements
    PARAM.exp_avg.{codes,scale,qmap} torchao OptimState8bit and, two states a byte, OptimState4bit
    PARAM.exp_avg.{codes,scale}      torchao OptimStateFp8

become ``PARAM.exp_avg`` and ``PARAM.exp_avg_sq`` (torchao: the state's own name), as torch.optim's
Adam has them. The block of bitsandbytes is not stored; it follows from the number of scales.

Source: bitsandbytes 0.50.2 ``optim/optimizer.py``; torchao 0.18.0 ``optim/subclass_*.py``.

Not supported, refused by name: bitsandbytes' optimizers with one state (Lion, SGD …), AdEMAMix, and
8-bit states that are not blockwise (``max1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta, whole_fragment
from core.catalog.stored import Extent, StoredArray
from core.changes.rename import is_optimizer_key, nest_again
from core.errors import CorruptError, UnsupportedError, UsageError
from core.pickle.inert import TensorLeaf
from core.pickle.nesting import entries
from core.quantize.from_blockwise import DequantizedState
from core.quantize.source import source_of

OPTION = "--dequantize-optim"
_MOMENTS = {"1": "exp_avg", "2": "exp_avg_sq"}
"""Number of a state of bitsandbytes' Adam → name of the state in torch.optim's."""
_BLOCKS = (256, 2048, 64, 128, 512, 1024, 4096)
"""Blocks of bitsandbytes: 256 since 0.45, 2048 before, and others that it has kernels for."""
_CACHED = 64
_NO_OPTIM = "keep the states as they are, or drop the optimizer with --no-optim"


@dataclass(frozen=True, slots=True)
class DequantizedStates:
    """A catalog after dequantizing the optimizer.

    Args:
        keys: the computed states.
        renamed: float32 states that only got a new name.
    """

    catalog: Catalog
    keys: tuple[str, ...]
    renamed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _QuantizedState:
    """A state with the keys of its parts; ``shape`` and ``block`` as in ``DequantizedState``.

    Args:
        scales: None for a state that is stored in float32.
    """

    codes: str
    scales: str | None
    table: str | None
    shape: Shape
    block: int


def dequantize_states(catalog: Catalog) -> DequantizedStates:
    """Turn optimizer states of 8 and 4 bits into float32 tensors.

    Raises:
        UsageError: the optimizer has no such states.
        UnsupportedError: a state is not of a known form.
        CorruptError: the parts of a state do not fit each other.
    """
    states = {**_states_of_bitsandbytes(catalog), **_states_of_torchao(catalog)}
    computed_keys = tuple(key for key, state in states.items() if state.scales is not None)
    if not computed_keys:
        raise UsageError(
            f"{OPTION}: no optimizer state has 8 or 4 bits and scales",
            hint=f"omit {OPTION}; ckpt inspect --optim shows the states",
        )
    clash = next((key for key in states if key in catalog.tensors), None)
    if clash is not None:
        raise CorruptError("the state is stored both in float32 and in 8 or 4 bits", key=clash)

    @lru_cache(maxsize=_CACHED)
    def computed(key: str) -> Sequence[Fragment]:
        state = states[key]
        if state.scales is None:
            return [replace(fragment, key=key) for fragment in catalog.fragments(state.codes)]
        codes = source_of(catalog, state.codes)
        encoding = DequantizedState(
            codes,
            source_of(catalog, state.scales),
            None if state.table is None else source_of(catalog, state.table),
            state.shape,
            state.block,
        )
        extent = Extent(codes.file, 0, encoding=encoding)
        return (whole_fragment(key, StoredArray(key, "float32", state.shape, extent)),)

    def fragments_of(key: str) -> Sequence[Fragment]:
        return computed(key) if key in states else catalog.fragments(key)

    # A state takes the place of its codes; the other parts go.
    key_of = {state.codes: key for key, state in states.items()}
    gone = {
        part
        for state in states.values()
        for part in (state.scales, state.table)
        if part is not None
    }
    tensors: dict[str, TensorMeta] = {}
    for name, meta in catalog.tensors.items():
        if name in key_of:
            key = key_of[name]
            tensors[key] = TensorMeta(key, "float32", states[key].shape)
        elif name not in gone:
            tensors[name] = meta

    # What torchao's classes record beside the parts describes codes that are gone.
    mappings = tuple(f"{key}." for key, state in states.items() if state.codes == f"{key}.codes")
    objects = {key: item for key, item in catalog.objects.items() if not key.startswith(mappings)}
    result = replace(
        catalog,
        tensors=tensors,
        fragments_of=fragments_of,
        objects=objects,
        skeleton=None
        if catalog.skeleton is None
        else _without_parts(catalog.skeleton, key_of, gone, mappings),
    )
    renamed = tuple(key for key in states if key not in computed_keys)
    return DequantizedStates(result, computed_keys, renamed)


def _without_parts(
    skeleton: object, key_of: dict[str, str], gone: set[str], mappings: tuple[str, ...]
) -> object:
    """Return a skeleton in which states take the place of their codes, and parts are missing."""
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        key = key_of.get(entry.key) if isinstance(entry.leaf, TensorLeaf) else None
        if key is not None:
            # A state of torchao was a mapping of its parts; one of bitsandbytes has another name.
            is_mapping = entry.key == f"{key}.codes"
            path = entry.path[:-1] if is_mapping else (*entry.path[:-1], key.rpartition(".")[2])
            leaves[path] = TensorLeaf(key)
        elif entry.key not in gone and not entry.key.startswith(mappings):
            leaves[entry.path] = entry.leaf
    return nest_again(leaves)


def _states_of_bitsandbytes(catalog: Catalog) -> dict[str, _QuantizedState]:
    """Return the states of bitsandbytes' Adam by their key in float32.

    Raises:
        UnsupportedError: the optimizer has one state, or states that are not blockwise.
        CorruptError: the number of scales does not fit any block.
    """
    tensors = catalog.tensors
    states: dict[str, _QuantizedState] = {}
    for key, meta in tensors.items():
        owner, _, name = key.rpartition(".")
        if name not in ("state1", "state2") or not is_optimizer_key(key):
            continue
        number = name[-1]
        if f"{owner}.state2" not in tensors:
            raise UnsupportedError(
                f"{OPTION}: the optimizer has one state, whose name in other software depends on "
                "its kind (Lion, SGD, RMSprop …)",
                key=key,
                hint=_NO_OPTIM,
            )
        target = f"{owner}.{_MOMENTS[number]}"
        if meta.dtype == "float32":
            states[target] = _QuantizedState(key, None, None, meta.shape, 0)
            continue
        scales, table = f"{owner}.absmax{number}", f"{owner}.qmap{number}"
        if meta.dtype != "uint8" or scales not in tensors or table not in tensors:
            raise UnsupportedError(
                f"{OPTION}: the state of type {meta.dtype} has no absmax{number} and qmap{number}, "
                "so it is not blockwise",
                key=key,
                hint=_NO_OPTIM,
            )
        states[target] = _blockwise(catalog, key, scales, table, shape=meta.shape)
    return states


def _states_of_torchao(catalog: Catalog) -> dict[str, _QuantizedState]:
    """Return the states of torchao's classes by their key in float32.

    Raises:
        UnsupportedError: the shape of a state with two codes a byte is not known.
        CorruptError: the parts do not fit each other.
    """
    tensors = catalog.tensors
    states: dict[str, _QuantizedState] = {}
    for key, meta in tensors.items():
        target = key.removesuffix(".codes")
        if target == key or not is_optimizer_key(key) or f"{target}.scale" not in tensors:
            continue
        table = f"{target}.qmap" if f"{target}.qmap" in tensors else None
        shape = meta.shape
        if table is not None and tensors[table].shape == (16,):
            shape = _recorded_shape(catalog, target)
        states[target] = _blockwise(catalog, key, f"{target}.scale", table, shape=shape)
    return states


def _recorded_shape(catalog: Catalog, target: str) -> Shape:
    """Return the shape that a tensor of torchao recorded beside its parts."""
    item = catalog.objects.get(f"{target}.shape")
    value = None if item is None else item.value
    if not isinstance(value, (list, tuple)) or not all(type(n) is int and n >= 0 for n in value):
        raise UnsupportedError(
            f"{OPTION}: the shape of the state, of which two are in a byte, is not recorded",
            key=target,
            hint=_NO_OPTIM,
        )
    return tuple(value)


def _blockwise(
    catalog: Catalog, codes: str, scales: str, table: str | None, *, shape: Shape
) -> _QuantizedState:
    """Return a state after checking that its parts fit each other.

    Raises:
        CorruptError: they do not.
    """
    tensors = catalog.tensors
    n, n_codes, n_scales = prod(shape), prod(tensors[codes].shape), prod(tensors[scales].shape)
    expected = ("uint8", (256,) if n_codes == n else (16,)) if table is not None else None
    block = next((block for block in _BLOCKS if -(-n // block) == n_scales), None)
    problem = None
    if n_codes not in (n, -(-n // 2)) or len(tensors[scales].shape) != 1:
        problem = f"{n_codes} codes and scales of shape {tensors[scales].shape}"
    elif block is None:
        problem = f"{n_scales} scales for {n} states, which no block explains"
    elif tensors[scales].dtype != "float32":
        problem = f"scales of type {tensors[scales].dtype}"
    elif expected is None and tensors[codes].dtype != "float8_e4m3fn":
        problem = f"codes of type {tensors[codes].dtype} without a table"
    elif expected is not None and table is not None:
        actual = (tensors[codes].dtype, tensors[table].shape)
        if actual != expected or tensors[table].dtype != "float32":
            problem = f"codes of type {actual[0]} with a table of shape {actual[1]}"
    if problem is not None or block is None:
        raise CorruptError(
            f"the parts of the optimizer state of shape {shape} do not fit: {problem}", key=codes
        )
    return _QuantizedState(codes, scales, table, shape, block)
