"""Load a checkpoint into memory: a conversion whose destination is the running process."""

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
    """Fill live tensors from a checkpoint of any layout, casting where dtypes differ.

    Args:
        tensors: dense tensors; flexible ones become zero where the checkpoint has no elements.
        catalog, store: the checkpoint, with global tensors under the same keys.
        checks_crc: compare the CRC-32 of records that are read completely, where the checkpoint has
            one.

    Returns:
        The number of bytes read.

    Raises:
        MissingShardError: the checkpoint lacks a tensor, or a region of one.
        CorruptError: shapes differ, or a checksum does not match.
        UnsupportedError: the cast is not supported.
        CheckpointingException: the checkpoint cannot be read.
    """
    target, images, memory = live_target(tensors)
    for meta in target.tensors.values():
        _require_tensor(meta, catalog, store)
    # A flexible tensor may be larger than the stored one; what no file holds is zero.
    zeros = {
        key: full_box(meta.shape).subtract(full_box(catalog.tensors[key].shape))
        for key, meta in target.tensors.items()
        if meta.flexible and len(meta.shape) == len(catalog.tensors[key].shape)
    }
    plan = make_plan(catalog, target, images, zeros=zeros, compares=False, is_share=True)
    for tensor in tensors:
        # The engine relies on new files being zero; this memory is the caller's and may hold
        # anything.
        if zeros.get(tensor.chunk.key):
            _fill_with_zeros(tensor.memory)
    result = execute(plan, store, memory, CopyOptions(crc=checks_crc, digest=False))
    return result.read_bytes


def _fill_with_zeros(memory: memoryview) -> None:
    zeros = bytes(min(len(memory), BLOCK_BYTES))
    for start in range(0, len(memory), BLOCK_BYTES):
        piece = memory[start : start + BLOCK_BYTES]
        piece[:] = zeros[: len(piece)]


def _require_tensor(meta: TensorMeta, catalog: Catalog, store: ReadStore) -> None:
    """Raise unless the checkpoint holds the tensor in this shape.

    Raises:
        MissingShardError: the checkpoint has no tensor of this key.
        CorruptError: the stored tensor has another shape.
    """
    stored = catalog.tensors.get(meta.key)
    if stored is None:
        near = get_close_matches(meta.key, catalog.tensors, n=3)
        raise MissingShardError(
            "the checkpoint has no such tensor",
            key=meta.key,
            file=store.label,
            hint=f"similar ones: {', '.join(near)}"
            if near
            else "ckpt inspect --flat lists what there is",
        )
    if stored.shape != meta.shape and not meta.flexible:
        raise CorruptError(
            f"the checkpoint holds it in the global shape {stored.shape}, {meta.shape} is "
            "asked for (elements)",
            key=meta.key,
            file=store.label,
            hint="build the model as it was saved",
        )
