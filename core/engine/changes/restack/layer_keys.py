"""The keys of layers and of stacked tensors, and what both directions of restacking share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel, TorchDistFacts
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.values import dataclass

LAYERS = ("layers", "layer", "h", "blocks", "block")
"""Names that come before the number of a model's layer."""

_NAMES = "|".join(LAYERS)
ONE_LAYER = re.compile(
    rf"(?P<head>(?:.*?\.)??(?:{_NAMES}))\.(?P<number>0|[1-9]\d{{0,8}})\.(?P<tail>.+)", re.DOTALL
)
ALL_LAYERS = re.compile(rf"(?P<head>(?:.*?\.)??(?:{_NAMES}))\.(?P<tail>(?!\d+\.).+)", re.DOTALL)
USUAL_STACK = re.compile(rf"(?:.*?\.)??{LAYERS[0]}\.(?!\d+\.).+", re.DOTALL)
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.[^.]+$")
MAX_LAYERS = 10_000
"""Maximum length of an axis of layers."""


@dataclass(frozen=True, slots=True)
class RestackedCatalog:
    """A catalog with its layers stacked or unstacked.

    Args:
        catalog: the changed catalog.
        n_groups: number of stacked tensors that were created or split.
        notes: layers that are unchanged, and why.
    """

    catalog: Catalog
    n_groups: int
    notes: tuple[str, ...] = ()


def numbered_state_notes(catalog: Catalog) -> list[str]:
    """Return a note if the optimizer refers to parameters by number, as their numbers changed."""
    if not any(_NUMBERED.search(key) and is_optimizer_key(key) for key in catalog.tensors):
        return []
    note = (
        "the optimizer state was left unchanged; it refers to parameters by number, "
        "so it no longer matches the model"
    )
    return [note]


def without_replaced(catalog: Catalog, new_of: Mapping[str, Sequence[str]]) -> Catalog:
    """Remove replaced tensors from the order and the torch_dist facts of a catalog."""
    model, torch_dist = catalog.facet(MegatronModel), catalog.facet(TorchDistFacts)
    if model is not None and model.order is not None:
        order = tuple(dict.fromkeys(new for key in model.order for new in new_of.get(key, (key,))))
        catalog = catalog.with_facet(replace(model, order=order))
    if torch_dist is not None and torch_dist.mcore_data is not None:
        mcore_data = {
            key: facts for key, facts in torch_dist.mcore_data.items() if key not in new_of
        }
        catalog = catalog.with_facet(replace(torch_dist, mcore_data=mcore_data))
    return catalog
