"""Account for the tensors of a source: each is written, or the record says why it is not.

Many steps lead from an opened source to the tensors that are written: they select, rename, join,
cut and compute, and a mistake in any of them could forget a tensor, or a part of it. So the arrays
that opening the source has found are compared with those that the written tensors are made of,
whatever their names and shapes have become (``core.engine.catalog.stored.find_inputs``). The bytes
of an array that are in none of them must be those of a tensor in the record
(``core.engine.catalog.dropped``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import AnyCatalog, Catalog, TargetCatalog
from core.engine.catalog.dropped import FILES_BESIDE, Dropped, dropped_together
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.stored import find_inputs, n_stored_bytes
from core.engine.catalog.tensor import Tensor
from core.errors import UnsupportedError
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG
from core.opening.objects import KEEP_OBJECTS, has_tensors
from core.opening.open import Checkpoint
from core.values import n_text


def check_account(
    opened: Catalog, source: Catalog, target: AnyCatalog, record: Sequence[Dropped]
) -> None:
    """Raise if a part of a tensor is neither written nor recorded as left out.

    Of a tensor of one axis any part is enough: flat buffers have padding.

    Args:
        opened: the source as it was opened; of a merge, the first one (``core.verbs.merge`` matches
            the tensors of the others with its own).
        source: the source under the target's keys.
        target: what is written.
        record: the entries that are not.

    Raises:
        RuntimeError: a step of the conversion has lost a tensor. No checkpoint may cause that.
    """
    lost = _find_unaccounted(opened, source, target, record)
    if lost:
        raise RuntimeError(
            f"{n_text(len(lost), 'source tensor')}, such as {lost[0]}, would be lost in whole or "
            "in part without being reported, so nothing was written"
        )


def check_not_empty(source: Checkpoint, target: TargetCatalog, format: Format) -> None:
    """Raise if the destination would hold no tensor although the source does.

    Raises:
        UnsupportedError: it would; numbers of the source would be lost.
    """
    if target.tensors or has_tensors(target.objects.values()):
        return
    catalog = source.catalog
    if not (catalog.tensors or has_tensors(catalog.objects.values())):
        return
    raise UnsupportedError(
        f"{format.title} would contain no tensors, because everything in the source is left out",
        file=source.store.label,
        hint="exclude fewer entries" if catalog.tensors else KEEP_OBJECTS,
    )


def describe_lost_files(
    source: Checkpoint,
    form: Catalog,
    written: Mapping[str, Tensor | bytes],
    dropped: Sequence[Dropped],
) -> list[Dropped]:
    """Describe the files next to the weights, of the source or made, that are not written.

    Args:
        form: the source's global form.
        written: path → content of the files that are written beside the weights.
        dropped: what is listed already.
    """
    files = {**source.catalog.files, **form.documents}
    # A tokenizer of Megatron is written under other paths.
    copied = set(map(id, written.values()))
    described = {name for entries in dropped for name in entries.names}
    # Of a model that becomes Megatron's, the arguments say what the configuration says.
    described |= {CONFIG} if form.facet(MegatronModel) is not None else set()
    lost = [
        path
        for path, content in files.items()
        if path not in written and id(content) not in copied and path not in described
    ]
    return [*dropped_together(lost, FILES_BESIDE)]


def _find_unaccounted(
    opened: Catalog, source: Catalog, target: AnyCatalog, record: Sequence[Dropped]
) -> list[str]:
    """Return the keys of the tensors of which a part is neither written nor recorded."""
    written = [source.tensor(key) for key, _ in target.all_tensors()]
    recorded = [tensor for entries in record for tensor in entries.tensors]
    # Most tensors only change their name, and are recognized without their fragments. Those of one
    # that is left out may be unreadable.
    unchanged = {id(tensor.tiling) for tensor in (*written, *recorded)}
    missing = {
        key: tensor
        for key, tensor in opened.tensors.items()
        if tensor.n_elements and id(tensor.tiling) not in unchanged
    }
    if not missing:
        return []

    # Find the others by their arrays: of each, as many bytes are written as are in the tensor.
    opened_tilings = {id(tensor.tiling) for tensor in opened.tensors.values()}
    parts = [tensor for tensor in recorded if id(tensor.tiling) not in opened_tilings]
    used: dict[str, dict[int, int]] = {}
    for tensor in (*written, *parts):
        for (file, start, _), n_bytes in _list_uses(tensor):
            in_file = used.setdefault(file, {})
            in_file[start] = in_file.get(start, 0) + n_bytes
    starts = {file: sorted(in_file) for file, in_file in used.items()}
    sums = {
        file: [0, *accumulate(in_file[start] for start in starts[file])]
        for file, in_file in used.items()
    }

    def n_used(file: str, start: int, end: int) -> int:
        """Return how many bytes are written or recorded of arrays that begin in a range."""
        begun, sum_of = starts.get(file, []), sums.get(file, [0])
        return sum_of[bisect_left(begun, end)] - sum_of[bisect_left(begun, start)]

    def is_lost(tensor: Tensor) -> bool:
        needed: dict[_Place, int] = {}
        for place, n_bytes in _list_uses(tensor):
            needed[place] = needed.get(place, 0) + n_bytes
        if len(tensor.shape) == 1:  # a flat buffer may have padding, even in arrays of its own
            return not any(n_used(*place) for place in needed)
        return any(n_used(*place) < n_bytes for place, n_bytes in needed.items())

    return [key for key, tensor in missing.items() if is_lost(tensor)]


_Place = tuple[str, int, int]
"""File, first byte of an array, and the byte after its last; a part of it begins inside."""


def _list_uses(tensor: Tensor) -> Iterator[tuple[_Place, int]]:
    """Yield the places of the arrays that a tensor is made of, and how many bytes it has of each.

    Values in a node of a database have no bytes of their own in a file, so encoded arrays are known
    by their names.
    """
    for fragment in tensor.fragments():
        if fragment.array is None:
            continue
        for array in find_inputs(fragment.array):
            # How much of an input is used is known to the computation alone.
            is_input = array is not fragment.array
            n_elements = prod(array.shape) if is_input else fragment.box.n_elements
            extent = array.extent
            place = extent.file, extent.offset, extent.offset + max(1, n_stored_bytes(array))
            if extent.encoding is not None:
                place = f"{extent.file} {array.name.partition('^')[0]}", 0, 1
            yield place, n_elements * itemsize(array.dtype)
