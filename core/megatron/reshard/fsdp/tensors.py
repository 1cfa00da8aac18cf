"""The tensors of an ``fsdp_dtensor`` checkpoint: whole ones, halves, and padding rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, TargetCatalog
from core.catalog.facets import FsdpDtensorFacts
from core.catalog.optimizer_keys import MASTER, param_of, state_key, state_of
from core.catalog.stored import PlannedArray
from core.catalog.tensor import Tensor, whole_tensor
from core.errors import UnsupportedError
from core.megatron.extras.common_state import EXTRA_STATE, OPTIMIZER
from core.megatron.model.cut import Cut
from core.megatron.reshard.fsdp.names import FORMAT, FsdpNames

_UNSPLIT = "use --tp-new 1"


def fsdp_tensors(
    catalog: Catalog, cuts: Mapping[str, Cut], names: FsdpNames
) -> dict[tuple[str, ...], tuple[Tensor, Shape]]:
    """Return the tensors of the destination, and their shapes there, which may have padding.

    Returns:
        By path: the keys of the containers around a tensor, and its own.

    Raises:
        UnsupportedError: the parts of a parameter are not kept together at this TP size.
    """
    stored: dict[tuple[str, ...], tuple[Tensor, Shape]] = {}
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
        tensor = catalog.tensors[master if state is None and master in catalog.tensors else key]
        for number, half in enumerate(halves):
            if state is None:
                path: tuple[str, ...] = ("model", names.in_model(name) + half)
            else:
                path = (OPTIMIZER, "state", names.in_optimizer(name) + half, state[0])
            if len(halves) > 1:
                n_rows = cut.shape[0] // 2
                rows = tensor.narrow(0, number * n_rows, n_rows)
                stored[path] = (rows, (n_rows, *cut.shape[1:]))
            else:
                stored[path] = (tensor, cut.shape)
    return stored


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
