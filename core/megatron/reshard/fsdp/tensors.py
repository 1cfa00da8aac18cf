"""The tensors of an ``fsdp_dtensor`` checkpoint: whole ones, halves, and padding rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.catalog.catalog import Catalog, TargetCatalog
from core.catalog.facets import FsdpDtensorFacts
from core.catalog.optimizer_keys import MASTER, param_of, state_key, state_of
from core.catalog.stored import PlannedArray
from core.catalog.tensor import Tensor, whole_tensor
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER
from core.megatron.model.cut import Cut
from core.megatron.reshard.fsdp.names import FORMAT, FsdpNames
from core.values import dataclass

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
    by_key: dict[str, Tensor] = {}
    for stored in tensors:
        tensor = catalog.tensors[stored.key]
        # Of a parameter that is stored in halves, the rows of the half.
        if stored.n_rows is not None:
            tensor = tensor.narrow(0, stored.start, stored.n_rows)
        by_key[".".join(stored.path)] = tensor
    return replace(catalog, tensors=by_key)


def with_padding(target: TargetCatalog) -> TargetCatalog:
    """Return the target with the padding rows of the vocabulary, which are zero.

    Args:
        target: made from the result of ``to_fsdp_dtensor``.
    """
    facts = target.facet(FsdpDtensorFacts)
    assert facts is not None, "the target is an fsdp_dtensor checkpoint"
    tensors = dict(target.tensors)
    for key, tensor in target.tensors.items():
        shape = facts.shapes[key]
        if shape != tensor.shape:
            padded = whole_tensor(PlannedArray(key, tensor.dtype, shape))
            tensors[key] = replace(tensor, shape=shape, tiling=padded.tiling, flexible=True)
    return replace(target, tensors=tensors)
