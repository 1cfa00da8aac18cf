"""Dequantize 8-bit and 4-bit optimizer states to float32.

The states that ``blockwise_states`` finds become ``PARAM.exp_avg`` and ``PARAM.exp_avg_sq``
(torchao: the state's own name), as torch.optim's Adam has them; so do bitsandbytes' float32 states
of small parameters. Codes and scales are multiplied as both libraries do (``from_blockwise``).

bitsandbytes' optimizers with one moment (Lion, SGD, RMSprop, Adagrad), which nothing in a
checkpoint tells apart, and AdEMAMix, whose two first moments are one tensor, keep their names:
``state1`` and ``state2`` in float32 are what bitsandbytes' own 32-bit optimizers save and load.

Not supported, refused by name: 8-bit states that are not blockwise (``max1``); AdEMAMix's of a
parameter whose number of elements is not a multiple of the block (bitsandbytes 0.50.2 reads the
scales of the second moment in different places on a GPU and on a CPU); and states of another shape
than their parameter: what FSDP gathers of bitsandbytes' states is the shard of the first rank, for
every parameter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor, compute_whole
from core.engine.changes.blockwise_states import (
    BlockwiseState,
    blockwise,
    companions_of,
    parameter_entry,
    states_of_torchao,
    without_parts,
)
from core.engine.changes.rename import OwnedEntry, owned_entries
from core.engine.quantize.from_blockwise import DequantizedState
from core.engine.quantize.source import source_of
from core.errors import CorruptError, UnsupportedError, UsageError
from core.values import dataclass

OPTION = "--dequantize-optim"
_MOMENTS = {"1": "exp_avg", "2": "exp_avg_sq"}
"""Number of a state of bitsandbytes' Adam → name of the state in torch.optim's."""
_NO_OPTIM = f"omit {OPTION} to keep the states as they are, or drop the optimizer with --no-optim"


@dataclass(frozen=True, slots=True)
class DequantizedStates:
    """A catalog after dequantizing the optimizer.

    Args:
        keys: the computed states.
        renamed: float32 states that only got a new name.
        kept: computed states that keep bitsandbytes' name.
    """

    catalog: Catalog
    keys: tuple[str, ...]
    renamed: tuple[str, ...]
    kept: tuple[str, ...]


def dequantize_states(catalog: Catalog) -> DequantizedStates:
    """Turn optimizer states of 8 and 4 bits into float32 tensors.

    Raises:
        UsageError: the optimizer has no such states.
        UnsupportedError: a state is not of a known form.
        CorruptError: the parts of a state do not fit each other.
    """
    states = {
        **_states_of_bitsandbytes(catalog),
        **states_of_torchao(catalog, option=OPTION, hint=_NO_OPTIM),
    }
    computed_keys = tuple(key for key, state in states.items() if state.scales is not None)
    if not computed_keys:
        raise UsageError(
            f"{OPTION}: the checkpoint has no 8-bit or 4-bit optimizer states with scales",
            hint=f"omit {OPTION}; to see the optimizer states, run ckpt inspect SRC --optim",
        )
    clash = next(
        (key for key, state in states.items() if key != state.codes and key in catalog.tensors),
        None,
    )
    if clash is not None:
        raise CorruptError(
            "the state is stored both in float32 and as 8-bit or 4-bit codes", key=clash
        )

    def dequantize_state(key: str, state: BlockwiseState) -> StoredArray:
        assert state.scales is not None
        codes = source_of(catalog, state.codes)
        encoding = DequantizedState(
            codes,
            source_of(catalog, state.scales),
            None if state.table is None else source_of(catalog, state.table),
            state.shape,
            state.block,
        )
        extent = Extent(codes.file, 0, encoding=encoding)
        return StoredArray(key, "float32", state.shape, extent)

    # A state takes the place of its codes; the other parts go.
    key_of = {state.codes: key for key, state in states.items()}
    gone = {
        part
        for state in states.values()
        for part in (state.scales, state.table)
        if part is not None
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in catalog.tensors.items():
        if name in key_of:
            state = states[key := key_of[name]]
            tensors[key] = (
                tensor
                if state.scales is None
                else Tensor(
                    "float32", state.shape, compute_whole(partial(dequantize_state, key, state))
                )
            )
        elif name not in gone:
            tensors[name] = tensor

    # What torchao's classes record beside the parts describes codes that are gone.
    mappings = tuple(f"{key}." for key, state in states.items() if state.codes == f"{key}.codes")
    objects = {key: item for key, item in catalog.objects.items() if not key.startswith(mappings)}
    result = replace(
        catalog,
        tensors=tensors,
        objects=objects,
        skeleton=None
        if catalog.skeleton is None
        else without_parts(catalog.skeleton, key_of, gone, mappings),
    )
    renamed = tuple(key for key in states if key not in computed_keys)
    kept = tuple(key for key, state in states.items() if key == state.codes)
    return DequantizedStates(result, computed_keys, renamed, kept)


def _states_of_bitsandbytes(catalog: Catalog) -> dict[str, BlockwiseState]:
    """Return the states of bitsandbytes' optimizers by their key in float32.

    Raises:
        UnsupportedError: states are not blockwise, or not those of their parameter, or the two
            moments of one tensor do not consist of complete blocks.
        CorruptError: the number of scales does not fit any block.
    """
    tensors, owned = catalog.tensors, owned_entries(catalog)
    states: dict[str, BlockwiseState] = {}
    for key, tensor in tensors.items():
        owner, _, name = key.rpartition(".")
        if name not in ("state1", "state2") or not is_optimizer_key(key):
            continue

        # Two states of one shape are Adam's; AdEMAMix has two moments in the first one.
        number, shape = name[-1], tensor.shape
        first, second = (tensors.get(f"{owner}.state{i}") for i in (1, 2))
        is_adam = first is not None and second is not None and first.shape == second.shape
        if first is not None and second is not None and not is_adam:
            if first.shape != (2, *second.shape):
                raise UnsupportedError(
                    f"{OPTION}: no supported optimizer has states of shapes {first.shape} and "
                    f"{second.shape}",
                    key=key,
                    hint=_NO_OPTIM,
                )
            shape = second.shape
        _check_owner(catalog, key, owned.get(key), shape=shape)
        target = f"{parameter_entry(key)}.{_MOMENTS[number]}" if is_adam else key
        if tensor.dtype == "float32":
            if target != key:
                states[target] = BlockwiseState(key, None, None, tensor.shape, 0)
            continue

        # Each code has a scale, by its block.
        scales, table = companions_of(key)
        if tensor.dtype != "uint8" or scales not in tensors or table not in tensors:
            raise UnsupportedError(
                f"{OPTION} supports only blockwise states (uint8 codes with absmax{number} and "
                f"qmap{number}), and this {tensor.dtype} state is not blockwise",
                key=key,
                hint=_NO_OPTIM,
            )
        state = blockwise(tensors, key, scales, table, shape=tensor.shape)
        if shape != tensor.shape and prod(shape) % state.block:
            raise UnsupportedError(
                f"{OPTION}: the parameter has {prod(shape)} elements, which is not a multiple of "
                f"the block size {state.block}, so where bitsandbytes stored the scales of "
                "AdEMAMix's second moment depends on the device that it ran on (GPU or CPU)",
                key=key,
                hint=_NO_OPTIM,
            )
        states[target] = state
    return states


def _check_owner(catalog: Catalog, key: str, entry: OwnedEntry | None, *, shape: Shape) -> None:
    """Raise if a state of bitsandbytes is not that of its complete parameter.

    ``FSDP.optim_state_dict`` (torch 2.13) leaves alone what is in a mapping of its own. So it
    returns the first rank's shard of the flat parameter in place of each parameter's states.

    Args:
        entry: the parameter that the state belongs to; None if its key tells none.
        shape: shape of one moment.

    Raises:
        UnsupportedError: the state has another shape than its parameter, or is that of several.
    """
    parameter = None
    if entry is not None:
        parameter = catalog.tensors[entry.tensor].shape
    if parameter not in (None, shape):
        problem = f"the state has shape {shape}, but its parameter has shape {parameter}"
    elif key in catalog.ties:
        problem = f"the state is shared with a different parameter, {catalog.ties[key]}"
    else:
        return
    raise UnsupportedError(
        f"{OPTION}: {problem}; FSDP saves only the first rank's shard of bitsandbytes states",
        key=key,
        hint="the other ranks' states are not in the checkpoint, so drop the optimizer with "
        "--no-optim",
    )
