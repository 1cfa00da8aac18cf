"""The tensors of an ``fsdp_dtensor`` checkpoint: whole ones, halves, and padding rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box, full_box
from core.catalog.catalog import (
    Catalog,
    Fragment,
    TargetCatalog,
    TargetFragment,
    TensorMeta,
    clip_fragment,
)
from core.catalog.facets import FsdpDtensorFacts
from core.catalog.optimizer_keys import MASTER, param_of, state_key, state_of
from core.catalog.stored import PlannedArray
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER
from core.megatron.model.cut import Cut
from core.megatron.reshard.fsdp.names import FORMAT, FsdpNames

_UNSPLIT = "use --tp-new 1"


@dataclass(frozen=True, slots=True)
class FsdpTensor:
    """A tensor of the destination: a whole one of the global form, or the half of one.

    Args:
        path: keys of the containers around it, and its own; joined by dots they are its key.
        key: global key of the tensor from which it is taken.
        start: its first row there.
        n_rows: its number of rows in the source; None for all.
        shape: its shape in the destination.
    """

    path: tuple[str, ...]
    key: str
    start: int
    n_rows: int | None
    shape: tuple[int, ...]


def fsdp_tensors(catalog: Catalog, cuts: Mapping[str, Cut], names: FsdpNames) -> list[FsdpTensor]:
    """Return the tensors of the destination.

    Raises:
        UnsupportedError: the parts of a parameter are not kept together at this TP size.
    """
    stored = []
    for key, cut in cuts.items():
        state, name = state_of(key), param_of(key)
        if name.endswith(EXTRA_STATE) or (state is not None and state[0] == MASTER):
            continue
        halves = names.halves(name)
        if cut.n > 1 and len(cut.parts) > 1 and len(halves) == 1:
            raise UnsupportedError(
                f"each of {cut.n} TP ranks has a piece of every part of this parameter, which "
                f"{FORMAT} stores one after the other; writing it so is not supported",
                key=key,
                hint=_UNSPLIT,
            )
        master = state_key(MASTER, name)
        source = master if state is None and master in catalog.tensors else key
        is_half = len(halves) > 1
        n_rows = cut.shape[0] // 2 if is_half else 0
        for number, half in enumerate(halves):
            if state is None:
                path: tuple[str, ...] = ("model", names.in_model(name) + half)
            else:
                path = (OPTIMIZER, "state", names.in_optimizer(name) + half, state[0])
            stored.append(
                FsdpTensor(
                    path,
                    source,
                    start=number * n_rows,
                    n_rows=n_rows if is_half else None,
                    shape=(n_rows, *cut.shape[1:]) if is_half else cut.shape,
                )
            )
    return stored


def with_tensors(catalog: Catalog, tensors: Sequence[FsdpTensor]) -> Catalog:
    """Return a catalog with the tensors of the destination, of the source's extent."""
    by_key = {".".join(stored.path): stored for stored in tensors}
    metas: dict[str, TensorMeta] = {}
    for key, stored in by_key.items():
        meta = catalog.tensors[stored.key]
        shape = meta.shape if stored.n_rows is None else stored.shape
        metas[key] = replace(meta, key=key, shape=shape)

    def fragments_of(key: str) -> Sequence[Fragment]:
        stored = by_key.get(key)
        if stored is None:
            return catalog.fragments(key)
        pieces = [replace(piece, key=key) for piece in catalog.fragments(stored.key)]
        if stored.n_rows is None:
            return pieces

        # Of every piece, the rows that lie in the half.
        halves = (
            clip_fragment(piece, key, start=stored.start, extent=stored.n_rows) for piece in pieces
        )
        return [half for half in halves if half is not None]

    return replace(catalog, tensors=metas, fragments_of=fragments_of)


def with_padding(target: TargetCatalog) -> TargetCatalog:
    """Return the target with the padding rows of the vocabulary, which are zero.

    Args:
        target: made from the result of ``to_fsdp_dtensor``.
    """
    facts = target.facet(FsdpDtensorFacts)
    assert facts is not None, "the target is an fsdp_dtensor checkpoint"
    padded = {
        key: replace(meta, shape=facts.shapes[key])
        for key, meta in target.tensors.items()
        if facts.shapes[key] != meta.shape
    }
    zeros: dict[str, Sequence[Box]] = {}
    for key, meta in padded.items():
        rows, rest = target.tensors[key].shape[0], meta.shape[1:]
        offset = (rows, *(0 for _ in rest))
        zeros[key] = [Box(offset, (meta.shape[0] - rows, *rest))]

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        meta = padded.get(key)
        if meta is None:
            return target.fragments(key)
        array = PlannedArray(key, meta.dtype, meta.shape)
        return (Fragment(key, full_box(meta.shape), array, (0,) * len(meta.shape)),)

    return replace(
        target, tensors={**target.tensors, **padded}, fragments_of=fragments_of, zeros=zeros
    )
