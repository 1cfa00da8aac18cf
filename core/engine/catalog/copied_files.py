"""Tell files that were copied over those of other ranks from ranks that hold the same.

Files with equal content are no mistake if they hold the same part of a tensor (replicas). They are
one if the layout gives them different parts::

    mp_rank_00/distrib_optim.pt   rows 0 … 31 of  exp_avg  ┐ equal bytes: one of the files is
    mp_rank_01/distrib_optim.pt   rows 32 … 63 of exp_avg  ┘ a copy of the other

Ranks may yet hold equal bytes for a reason: states before the first step are zero, norms are filled
with ones, and a model may begin with equal experts or layers (upcycling, depth up-scaling). So
parts whose elements are all equal prove nothing, and weights of different tensors are only a
suspicion. Different parts of one tensor, or the moments of different tensors, are a proof.

Not compared: compressed arrays, and strided ones (expanded and transposed tensors).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, c_strides
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_moment
from core.engine.catalog.tensor import Fragment
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

COPIED_HINT = (
    "copy each rank's own file again from the original checkpoint, or use an older checkpoint"
)
_RANK_IN_KEY = re.compile(r"\bexpert_parallel_rank_\d+\b")
"""Part of the keys of DeepSpeed's ranks, whose optimizers may be replicas of each other."""
_N_WINDOWS = 16
_WINDOW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file with the content of another one, although the layout gives it other parts.

    Args:
        file, other: the two files; nothing shows which of them is the copy.
        key, other_key: a tensor of which ``file`` holds a part, and the one of which ``other``
            holds a part in the same place.
        is_proven: the ranks cannot have had equal parts; otherwise, equal layers or experts at the
            beginning of a training run would look the same.
    """

    file: str
    other: str
    key: str
    other_key: str
    is_proven: bool

    @property
    def message(self) -> str:
        """The text of an error or a finding about ``file``, without a full stop."""
        rank, colon, name = self.key.partition(":")
        if self.key == self.other_key:
            parts = f"it should contain a different part of {self.key}"
        elif colon and name == self.other_key.partition(":")[2]:
            parts = f"{rank} should have a different {name}"
        else:
            parts = f"it should contain {self.key}, not {self.other_key}"
        return f"the file is identical to {self.other}, but {parts}"


@dataclass(frozen=True, slots=True)
class _HeldPart:
    """A part of a tensor that a file holds.

    Args:
        key, box: the tensor and its region.
        n_bytes: bytes in the file, from the part's first element on.
        item_bytes: bytes of an element.
    """

    key: str
    box: Box
    n_bytes: int
    item_bytes: int


def find_copied_files(
    catalog: Catalog, store: ReadStore, groups: Collection[Sequence[str]]
) -> list[CopiedFile]:
    """Return the files that were copied over those of other ranks.

    Args:
        catalog: global tensors with the ranks' parts as fragments.
        store: the files.
        groups: groups of files with equal content.
    """
    if not groups:
        return []
    names = {name for group in groups for name in group}
    parts: dict[str, dict[tuple[int, Shape], _HeldPart]] = {name: {} for name in names}
    for key, tensor in catalog.all_tensors():
        for fragment in tensor.fragments():
            array = fragment.array
            if array is None or array.extent.file not in names or not fragment.box.n_elements:
                continue
            extent = array.extent
            is_dense = extent.strides in (None, c_strides(array.shape)) and extent.axes is None
            if is_dense and extent.encoding is None and not extent.is_late:
                address, part = _part_of(key, fragment)
                parts[extent.file][address, fragment.box.shape] = part
    copies = []
    for group in groups:
        first, *others = group
        for name in others:
            copied = _compare(store, name, parts[name], first, parts[first])
            if copied is not None:
                copies.append(copied)
    return copies


def _part_of(key: str, fragment: Fragment) -> tuple[int, _HeldPart]:
    """Return the address of a fragment's first element, and the part that begins there.

    Args:
        key: key of the tensor.
        fragment: a part of a dense array.
    """
    array = fragment.array
    assert array is not None
    size = itemsize(array.dtype)
    strides = c_strides(array.shape)
    start = sum(index * step for index, step in zip(fragment.at, strides, strict=True))
    # Of a part of an array with more than one axis, only the first row is sure to be contiguous.
    is_contiguous = prod(array.shape) == fragment.box.n_elements or len(array.shape) == 1
    n = fragment.box.n_elements if is_contiguous else fragment.box.shape[-1]
    return array.extent.offset + start * size, _HeldPart(key, fragment.box, n * size, size)


def _compare(
    store: ReadStore,
    file: str,
    parts: dict[tuple[int, Shape], _HeldPart],
    other: str,
    other_parts: dict[tuple[int, Shape], _HeldPart],
) -> CopiedFile | None:
    """Return what two files with equal content prove; None if they may be equal.

    Args:
        parts, other_parts: (address, shape) → what each file holds there.
    """
    suspicion = None
    for (address, shape), part in parts.items():
        like = other_parts.get((address, shape))
        if like is None or (like.key, like.box) == (part.key, part.box):
            continue
        name, like_name = (_RANK_IN_KEY.sub("", item.key) for item in (part, like))
        if like.key != part.key and like_name == name:
            continue
        is_proven = like.key == part.key or is_moment(part.key)
        if (suspicion is not None and not is_proven) or _is_constant(store, file, address, part):
            continue
        copied = CopiedFile(file, other, part.key, like.key, is_proven)
        if is_proven:
            return copied
        suspicion = copied
    return suspicion


def _is_constant(store: ReadStore, file: str, address: int, part: _HeldPart) -> bool:
    """Return whether elements spread over a part are all equal."""
    first = store.read(file, address, part.item_bytes)
    return all(
        data == first * (len(data) // part.item_bytes)
        for data in _windows(store, file, address, part)
    )


def _windows(store: ReadStore, file: str, address: int, part: _HeldPart) -> Iterator[bytes]:
    """Yield windows of a part, spread evenly."""
    n_items = part.n_bytes // part.item_bytes
    per_window = min(n_items, _WINDOW_BYTES // part.item_bytes)
    n_windows = min(_N_WINDOWS, -(-n_items // per_window))
    for number in range(n_windows):
        start = (n_items - per_window) * number // max(1, n_windows - 1)
        yield store.read(file, address + start * part.item_bytes, per_window * part.item_bytes)
