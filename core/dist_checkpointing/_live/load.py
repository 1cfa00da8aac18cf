"""Load a checkpoint into memory: a conversion whose destination is the running process."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from core.arrays.checksum import BLOCK_BYTES
from core.dist_checkpointing._live.tensors import LiveTensor, live_target
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import AnyTensor
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.errors import CorruptError, MissingShardError
from core.files.store import ReadStore


def fill(
    tensors: Sequence[LiveTensor],
    catalog: Catalog,
    store: ReadStore,
    *,
    checks_crc: bool = True,
) -> int:
    """Fill live tensors from a checkpoint of any layout, casting where dtypes differ.

    Args:
        tensors: dense tensors; flexible ones become zero where the checkpoint has no elements.
        catalog, store: the checkpoint, with global tensors under the same keys.
        checks_crc: check the CRC-32, if recorded, of every record that is read completely.

    Returns:
        The number of bytes read.

    Raises:
        MissingShardError: the checkpoint lacks a tensor, or a region of a tensor.
        CorruptError: shapes differ, or a checksum does not match.
        UsageError: two chunks of one key disagree on dtype or shape.
        UnsupportedError: the cast is not supported.
        CheckpointingException: the checkpoint cannot be read.
    """
    target, images, memory = live_target(tensors)
    for key, meta in target.tensors.items():
        _require_tensor(key, meta, catalog, store)
    # A share: the chunks of this process need not cover their global tensors.
    plan = make_plan(catalog, target, images, compares=False, is_share=True)
    # A flexible tensor may be larger than the stored one. The engine writes no zeros, since new
    # files are zero; the caller's memory may hold anything. It is overwritten block by block, so
    # that no second buffer of a tensor's size is needed.
    for tensor in tensors:
        if tensor.chunk.shape != catalog.tensors[tensor.chunk.key].shape:
            for start in range(0, len(tensor.memory), BLOCK_BYTES):
                block = tensor.memory[start : start + BLOCK_BYTES]
                block[:] = bytes(len(block))
    result = execute(plan, store, memory, CopyOptions(crc=checks_crc, digest=False))
    return result.read_bytes


def _require_tensor(key: str, tensor: AnyTensor, catalog: Catalog, store: ReadStore) -> None:
    """Raise unless the checkpoint holds the tensor in this shape.

    Raises:
        MissingShardError: the checkpoint has no tensor of this key.
        CorruptError: the stored tensor has another shape.
    """
    stored = catalog.tensors.get(key)
    if stored is None:
        near = get_close_matches(key, catalog.tensors, n=3)
        raise MissingShardError(
            "the checkpoint has no such tensor",
            key=key,
            file=store.label,
            hint=f"similar keys: {', '.join(near)}"
            if near
            else "list the checkpoint's tensors: ckpt inspect PATH --flat",
        )
    if stored.shape != tensor.shape and not tensor.flexible:
        raise CorruptError(
            f"the global shape is {stored.shape} in the checkpoint, but {tensor.shape} was "
            "requested",
            key=key,
            file=store.label,
            hint="build the model with the same sizes as when it was saved",
        )
