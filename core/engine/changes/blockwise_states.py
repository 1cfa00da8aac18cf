"""Find optimizer states of bitsandbytes and torchao that are codes with a scale for each block.

::

    PARAM.[__bnb_optimizer_quant_state__.]state1    codes, in the shape of the parameter
                                          absmax1   scales: of each block of consecutive codes
                                          qmap1     table: the number that a code stands for
                                          state2, absmax2, qmap2   the same, if there are two
    PARAM.exp_avg.{codes,scale,qmap}                torchao OptimState8bit and, two codes a byte,
                                                    OptimState4bit
    PARAM.exp_avg.{codes,scale}                     torchao OptimStateFp8

bitsandbytes 0.49 and later puts its states into a mapping of their own, which FSDP does not gather;
before, they were entries of the parameter. AdEMAMix has two moments in ``state1`` (2, *shape), with
``absmax1`` (2, blocks); optimizers with one moment (Lion, SGD, RMSprop, Adagrad) have no
``state2``. The block is not stored; it follows from the number of scales. Parameters below 4096
elements have ``state1`` and ``state2`` in float32.

Source: bitsandbytes 0.50.2 ``optim/optimizer.py``; torchao 0.18.0 ``optim/subclass_*.py``; states
that both wrote, in tests/golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import BITSANDBYTES, is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.engine.changes.rename import nest_again, new_path
from core.errors import CorruptError, UnsupportedError
from core.pickle.inert import TensorLeaf
from core.pickle.nesting import entries
from core.values import dataclass

_BLOCKS = (256, 2048, 64, 128, 512, 1024, 4096)
"""Blocks of bitsandbytes: 256 since 0.45, 2048 before, and others that it has kernels for."""


@dataclass(frozen=True, slots=True)
class BlockwiseState:
    """A state with the keys of its parts.

    Args:
        scales: None for a state that is stored in float32.
        table: None for float8 codes, and for float32.
        shape, block: as in ``core.engine.quantize.from_blockwise.DequantizedState``.
    """

    codes: str
    scales: str | None
    table: str | None
    shape: Shape
    block: int


def companions_of(codes: str) -> tuple[str, str]:
    """Return the keys that scales and table of bitsandbytes' codes have."""
    owner, number = codes.rpartition(".")[0], codes[-1]
    return f"{owner}.absmax{number}", f"{owner}.qmap{number}"


def codes_of_bitsandbytes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the keys of bitsandbytes' states that are codes with scales and a table."""
    return [
        key
        for key, tensor in tensors.items()
        if key.rpartition(".")[2] in ("state1", "state2")
        and tensor.dtype == "uint8"
        and all(companion in tensors for companion in companions_of(key))
        and is_optimizer_key(key)
    ]


def parameter_entry(key: str) -> str:
    """Return the entry of a parameter that a state of bitsandbytes is in, without the mapping."""
    return key.rpartition(".")[0].removesuffix(f".{BITSANDBYTES}")


def states_of_torchao(catalog: Catalog, *, option: str, hint: str) -> dict[str, BlockwiseState]:
    """Return the states of torchao's classes by their key in float32.

    Args:
        option, hint: for errors: the option that needs them, and what helps without it.

    Raises:
        UnsupportedError: the shape of a state with two codes a byte is not known.
        CorruptError: the parts do not fit each other.
    """
    tensors = catalog.tensors
    states: dict[str, BlockwiseState] = {}
    for key, tensor in tensors.items():
        target = key.removesuffix(".codes")
        if target == key or not is_optimizer_key(key) or f"{target}.scale" not in tensors:
            continue
        table = f"{target}.qmap" if f"{target}.qmap" in tensors else None
        shape = tensor.shape
        if table is not None and tensors[table].shape == (16,):
            item = catalog.objects.get(f"{target}.shape")
            value = None if item is None else item.value
            is_shape = isinstance(value, (list, tuple)) and all(
                type(extent) is int and extent >= 0 for extent in value
            )
            if not is_shape or not isinstance(value, (list, tuple)):
                raise UnsupportedError(
                    f"{option}: the state packs two values per byte, but the checkpoint does not "
                    "record its shape",
                    key=target,
                    hint=hint,
                )
            shape = tuple(value)
        states[target] = blockwise(tensors, key, f"{target}.scale", table, shape=shape)
    return states


def blockwise(
    tensors: Mapping[str, Tensor], codes: str, scales: str, table: str | None, *, shape: Shape
) -> BlockwiseState:
    """Return a state after checking that its parts fit each other.

    Raises:
        CorruptError: they do not.
    """
    n, n_codes, n_scales = prod(shape), prod(tensors[codes].shape), prod(tensors[scales].shape)
    expected = ("uint8", (256,) if n_codes == n else (16,)) if table is not None else None
    # Two moments that are stacked have scales of their own.
    scales_shape = tensors[scales].shape
    n_stacked = 2 if len(scales_shape) == 2 and scales_shape[:1] == shape[:1] == (2,) else 1
    block = next(
        (block for block in _BLOCKS if n_stacked * -(-(n // n_stacked) // block) == n_scales), None
    )
    problem = None
    if n_codes not in (n, -(-n // 2)) or len(scales_shape) != n_stacked:
        problem = f"there are {n_codes} codes, but the scales have shape {scales_shape}"
    elif block is None:
        problem = f"{n_scales} scales for {n} states do not match any block size"
    elif tensors[scales].dtype != "float32":
        problem = f"the scales are {tensors[scales].dtype}, not float32"
    elif expected is None and tensors[codes].dtype != "float8_e4m3fn":
        problem = f"the codes are {tensors[codes].dtype}, but there is no lookup table"
    elif expected is not None and table is not None:
        actual = (tensors[codes].dtype, tensors[table].shape)
        if actual != expected or tensors[table].dtype != "float32":
            problem = f"the codes are {actual[0]}, but the lookup table has shape {actual[1]}"
    if problem is not None or block is None:
        raise CorruptError(
            f"the parts of the optimizer state (shape {shape}) do not fit together: {problem}",
            key=codes,
        )
    return BlockwiseState(codes, scales, table, shape, block)


def without_parts(
    skeleton: object, key_of: dict[str, str], gone: set[str], mappings: tuple[str, ...]
) -> object:
    """Return a skeleton in which computed tensors take the place of their codes.

    Args:
        key_of: key of the codes → key of the computed tensor.
        gone: keys of other parts.
        mappings: prefixes of the keys of mappings of parts, which are removed completely.
    """
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        key = key_of.get(entry.key) if isinstance(entry.leaf, TensorLeaf) else None
        if key is not None:
            leaves[new_path(entry, key)] = TensorLeaf(key)
        elif entry.key not in gone and not entry.key.startswith(mappings):
            leaves[entry.path] = entry.leaf
    return nest_again(leaves)
