"""The model of a checkpoint with Megatron's names, as far as it is understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog
from core.catalog.facets import RankFacts
from core.errors import CheckpointingException
from core.formats.megatron.format import MODEL_FILE
from core.formats.torch.format import load_object
from core.megatron.reshard.from_global import common_entries
from core.megatron.reshard.from_ranks import ranks_of
from core.megatron.reshard.problems import Understood, understood
from core.megatron.reshard.reshard import is_megatron
from core.megatron.rules.rules import Rules
from core.opening.objects import loaded

if TYPE_CHECKING:
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model under examination.

    Args:
        catalog: its metadata, objects loaded; None if it is not Megatron's, or cannot be read.
        understood: None if nothing is understood.
        problems: what is wrong with its layout.
        is_sample: some ranks stand for all.
    """

    catalog: Catalog | None = None
    understood: Understood | None = None
    problems: tuple[CheckpointingException, ...] = ()
    is_sample: bool = False

    @property
    def args(self) -> object:
        """The training arguments."""
        if self.catalog is None:
            return None
        return self.catalog.args or common_entries(self.catalog).get("args")


def model_view(catalog: Catalog | None, store: ReadStore, rules: Rules) -> ModelView:
    """The model of a catalog, which may be one that was salvaged."""
    ranks = None if catalog is None else catalog.facet(RankFacts)
    if catalog is None or (ranks is not None and ranks.is_single_rank):
        return ModelView()
    try:
        catalog = loaded(catalog, store, load_object)
        if not catalog.is_rank_local and not is_megatron(catalog, rules):
            return ModelView()
    except CheckpointingException:
        return ModelView()  # found where files are looked at
    problems: list[CheckpointingException] = []
    sample = _opened(catalog, store) if ranks is not None and ranks.n_unopened else None
    found = understood(catalog, rules, report=problems.append, sample=sample)
    return ModelView(catalog, found, tuple(problems), is_sample=sample is not None)


def _opened(catalog: Catalog, store: ReadStore) -> set[str]:
    """The rank directories whose files were opened: the first of each pipeline stage and length."""
    first: dict[tuple[object, int], str] = {}
    for coords, (folder, _) in ranks_of(catalog).items():
        first.setdefault((dict(coords).get("pp"), store.sizes(folder)[MODEL_FILE]), folder)
    return set(first.values())
