"""Bring a checkpoint into its canonical form: the same tensors whatever its format and layout.

Fingerprints, ``ckpt diff`` and the checks of a layout compare checkpoints in this form: global
tensors, one key per layer and expert, without padding rows, under Megatron's names where those are
known, else under the names that they have.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.catalog.catalog import Catalog
from core.errors import CheckpointingException
from core.files.store import ReadStore
from core.formats.torch.format import load_object
from core.megatron.reshard.reshard import Rules, is_megatron, unshard
from core.opening.objects import loaded
from core.opening.open import Checkpoint


@dataclass(frozen=True, slots=True)
class Canonical:
    """The canonical form of a checkpoint, as far as there is one.

    Args:
        catalog: the tensors; rank by rank, as stored, if the layout is not understood.
        is_global: the keys are those of whole tensors; false for rank files that are not
        understood.
        has_layout: the layout's rules named and joined the tensors.
        failure: why the layout, or the optimizer in it, is not understood; None if it is, or if
        there is none.
    """

    catalog: Catalog
    is_global: bool
    has_layout: bool
    failure: CheckpointingException | None = None


def canonical(source: Checkpoint, *, rules: Rules) -> Canonical:
    """Return the canonical form of an opened checkpoint.

    A layout that is not understood is recorded in the result, and does not raise.
    """
    return canonical_of(source.catalog, source.store, rules=rules)


def canonical_of(stored: Catalog, store: ReadStore, *, rules: Rules) -> Canonical:
    """Return the canonical form of a catalog whose files are in a store.

    A layout that is not understood is recorded in the result, and does not raise.
    """
    is_rank_local = stored.is_rank_local
    try:
        catalog = loaded(stored, store, load_object)
        if not is_rank_local and not is_megatron(catalog, rules):
            return Canonical(catalog, is_global=True, has_layout=False)
    except CheckpointingException as err:
        return Canonical(stored, is_global=not is_rank_local, has_layout=False, failure=err)
    failure: CheckpointingException | None = None
    for optim in ("carry", "drop"):
        try:
            result = unshard(
                catalog, rules=rules, optim=optim, store=store if optim == "carry" else None
            )
            return Canonical(result, is_global=True, has_layout=True, failure=failure)
        except CheckpointingException as err:
            failure = failure or err
    return Canonical(catalog, is_global=not is_rank_local, has_layout=False, failure=failure)
