"""Global tensors under their final names, and what tells the kinds of catalogs apart."""

from __future__ import annotations

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class GlobalForm:
    """Source of a job, ready to be cut and laid out.

    Args:
        catalog: global tensors under their final names, all objects loaded.
        renamed: (old key, new key) of each entry that the user's options renamed.
        notes: notes for the user.
        dropped: entries that are not carried over, with the reasons.
    """

    catalog: Catalog
    renamed: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    dropped: tuple[Dropped, ...]


def is_model_form(catalog: Catalog) -> bool:
    """Return True if a table of rules built the catalog: Megatron's form or Hugging Face's."""
    return catalog.facet(MegatronModel) is not None or catalog.facet(HuggingFaceModel) is not None
