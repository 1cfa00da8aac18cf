"""Fills memory from a checkpoint: a conversion whose destination is the running process."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from core.arrays.box import full_box
from core.arrays.checksum import BLOCK_BYTES
from core.catalog.catalog import Catalog, TensorMeta
from core.copy.options import CopyOptions
from core.copy.run import execute
from core.errors import CorruptError, MissingShardError
from core.files.store import ReadStore
from core.live.tensors import LiveTensor, live_target
from core.plan.plan import make_plan


def fill(
    tensors: Sequence[LiveTensor],
    catalog: Catalog,
    store: ReadStore,
    *,
    checks_crc: bool = True,
) -> int:
    """Reads live tensors out of a checkpoint, whatever the layout there is; casts where dtypes differ.

    Args:
        tensors: dense ones; those that are flexible are zero where the checkpoint has nothing for them.
        catalog, store: the checkpoint, with global tensors under the same keys.
        checks_crc: compare the CRC-32 of records that are read whole, where the checkpoint states them.

    Returns:
        Bytes that were read.

    Raises:
        MissingShardError: the checkpoint lacks a tensor, or a region of one.
        CorruptError: shapes differ, or bytes do not have their CRC.
        UnsupportedError: a cast that is not made.
        CheckpointingException: any other, from reading.
    """
    target, images, memory = live_target(tensors)
    for meta in target.tensors.values():
        _check_wanted(meta, catalog, store)
    zeros = {
        key: full_box(meta.shape).subtract(full_box(catalog.tensors[key].shape))
        for key, meta in target.tensors.items()
        if meta.flexible and len(meta.shape) == len(catalog.tensors[key].shape)
    }
    plan = make_plan(catalog, target, images, zeros=zeros, compares=False, is_share=True)
    for tensor in tensors:
        if zeros.get(tensor.chunk.key):  # the engine takes it for granted that what it creates is zero
            _clear(tensor.memory)
    result = execute(plan, store, memory, CopyOptions(crc=checks_crc, digest=False))
    return result.read_bytes


def _clear(memory: memoryview) -> None:
    zeros = bytes(min(len(memory), BLOCK_BYTES))
    for start in range(0, len(memory), BLOCK_BYTES):
        piece = memory[start : start + BLOCK_BYTES]
        piece[:] = zeros[: len(piece)]


def _check_wanted(meta: TensorMeta, catalog: Catalog, store: ReadStore) -> None:
    """Whether the checkpoint has a tensor of that name and shape."""
    stored = catalog.tensors.get(meta.key)
    if stored is None:
        near = get_close_matches(meta.key, catalog.tensors, n=3)
        raise MissingShardError(
            "the checkpoint has no such tensor",
            key=meta.key,
            file=store.label,
            hint=f"similar ones: {', '.join(near)}" if near else "ckpt inspect --flat lists what there is",
        )
    if stored.shape != meta.shape and not meta.flexible:
        raise CorruptError(
            f"the checkpoint holds it in the global shape {stored.shape}, {meta.shape} is asked for (elements)",
            key=meta.key,
            file=store.label,
            hint="build the model as it was saved",
        )
