"""The canonical form of a checkpoint: the same tensors whatever its format and layout.

Fingerprints, ``ckpt diff`` and the checks of a layout compare checkpoints in it: global tensors, one key a layer and an
expert, without padding rows, under Megatron's names where those are known, else under the names that they have.
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
    """The canonical form, as far as there is one.

    Args:
        catalog: the tensors. Rank by rank, as stored, if the layout is not understood.
        is_global: whether the keys are those of whole tensors; false for rank files that are not understood.
        has_layout: whether the layout's rules named and joined the tensors.
        failure: why the layout, or the optimizer in it, is not understood; None if it is, or if there is none.
    """

    catalog: Catalog
    is_global: bool
    has_layout: bool
    failure: CheckpointingException | None = None


def canonical(source: Checkpoint, *, rules: Rules) -> Canonical:
    """The canonical form of an opened checkpoint; does not raise for what the layout does not explain."""
    return canonical_of(source.catalog, source.store, rules=rules)


def canonical_of(found: Catalog, store: ReadStore, *, rules: Rules) -> Canonical:
    """The canonical form of a catalog whose files are in a store; as ``canonical``."""
    is_rank_local = found.is_rank_local
    try:
        catalog = loaded(found, store, load_object)
        if not is_rank_local and not is_megatron(catalog, rules):
            return Canonical(catalog, is_global=True, has_layout=False)
    except CheckpointingException as err:
        return Canonical(found, is_global=not is_rank_local, has_layout=False, failure=err)
    failure: CheckpointingException | None = None
    for optim in ("carry", "drop"):
        try:
            made = unshard(catalog, rules=rules, optim=optim, store=store if optim == "carry" else None)
            return Canonical(made, is_global=True, has_layout=True, failure=failure)
        except CheckpointingException as err:
            failure = failure or err
    return Canonical(catalog, is_global=not is_rank_local, has_layout=False, failure=failure)
