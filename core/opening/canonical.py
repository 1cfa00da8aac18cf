"""Bring a checkpoint into its canonical form, which does not depend on format and layout.

Fingerprints, ``ckpt diff`` and the checks of a layout compare checkpoints in this form: global
tensors, one key per layer and expert, without padding rows, under Megatron's names if the layout is
understood, else under their stored names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException
from core.files.store import ReadStore
from core.opening.config_beside import may_have_arguments
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.copied_files import CopiedFile
    from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True)
class Canonical:
    """The canonical form of a checkpoint, or the closest form that could be built.

    Args:
        catalog: the tensors; rank by rank, as stored, if the layout is not understood.
        is_global: the keys are those of global tensors; false for rank files whose layout is not
            understood.
        has_layout: the layout's rules named and joined the tensors.
        failure: why the layout or its optimizer is not understood; None if both are, or if there is
            no layout.
    """

    catalog: Catalog
    is_global: bool
    has_layout: bool
    failure: CheckpointingException | None = None


def canonical(source: Checkpoint, *, rules: Rules | None) -> Canonical:
    """Return the canonical form of an opened checkpoint; see ``canonical_of``."""
    return canonical_of(source.catalog, source.store, rules=rules)


def canonical_of(stored: Catalog, store: ReadStore, *, rules: Rules | None) -> Canonical:
    """Return the canonical form of a catalog whose files are in a store.

    Args:
        rules: layout rules; None for those of the table alone.

    Objects that cannot be read, and a layout that is not understood, are recorded in the result as
    its ``failure``; they do not raise.
    """
    is_rank_local = stored.is_rank_local
    try:
        catalog = loaded(stored, store)
        if not is_rank_local and not may_have_arguments(catalog):
            return Canonical(catalog, is_global=True, has_layout=False)
        from core.megatron.extras.common_state import is_megatron
        from core.megatron.reshard.unshard import unshard
        from core.megatron.rules.tables import load_rules

        if rules is None:
            rules = load_rules(None)
        if not is_rank_local and not is_megatron(catalog, rules):
            return Canonical(catalog, is_global=True, has_layout=False)
    except CheckpointingException as err:
        return Canonical(stored, is_global=not is_rank_local, has_layout=False, failure=err)
    # An optimizer that is not understood is dropped, so that at least the model can be compared.
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


def copied_files_of(
    form: Canonical, stored: Catalog, store: ReadStore, groups: Sequence[Sequence[str]]
) -> list[CopiedFile]:
    """Return the files that were copied over those of other ranks.

    Args:
        form: the canonical form of ``stored``.
        stored: the catalog of the checkpoint, as its format reads it.
        groups: groups of files with equal content.
    """
    from core.engine.catalog.copied_files import find_copied_files

    if not form.is_global:
        return []
    files = list_tensor_files(form.catalog)
    copies = find_copied_files(form.catalog, store, without_other_files(groups, files))
    # If the master weights in a rank's buffers are not those of its weights, the form has no
    # optimizer. A copied file is a reason; by rank, all its moments should differ.
    if form.failure is not None and form.failure.rule == "optim.buffers":
        others = without_other_files(groups, list_tensor_files(stored) - files)
        copies += [c for c in find_copied_files(stored, store, others) if c.is_proven]
    return copies


def list_tensor_files(catalog: Catalog) -> set[str]:
    """Return the files that hold the tensors of a catalog."""
    return {fragment.array.extent.file for fragment in catalog.all_fragments() if fragment.array}


def without_other_files(groups: Sequence[Sequence[str]], files: Collection[str]) -> list[list[str]]:
    """Return groups of files without those that are not among ``files``, if two remain."""
    reduced = ([file for file in group if file in files] for group in groups)
    return [group for group in reduced if len(group) > 1]
