"""The Megatron model in a checkpoint, as far as its layout can be determined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.errors import CheckpointingException
from core.opening.config_beside import may_have_arguments
from core.opening.objects import loaded
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.megatron.reshard.problems import Understood
    from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True)
class ModelView:
    """The Megatron model of the examined checkpoint.

    Args:
        catalog: metadata with objects loaded; None if it is not Megatron's or cannot be read.
        understood: the model and its layout; None if no layout could be determined.
        problems: errors in the layout.
        is_sample: only some rank files were opened; they represent the others.
    """

    catalog: Catalog | None = None
    understood: Understood | None = None
    problems: tuple[CheckpointingException, ...] = ()
    is_sample: bool = False

    @property
    def args(self) -> object:
        """The training arguments; None if the checkpoint has none."""
        if self.catalog is None:
            return None
        from core.megatron.extras.common_state import common_entries

        return self.catalog.args or common_entries(self.catalog).get("args")


def model_view(
    catalog: Catalog | None, store: ReadStore, own_rules: Rules | None, *, is_quick: bool
) -> ModelView:
    """Find the Megatron model in a catalog, which may be incomplete (salvaged).

    Args:
        own_rules: layout rules; None for those of the table alone.
        is_quick: compare the shards of one tensor of each kind only.
    """
    # A single rank file is only part of a model.
    ranks = None if catalog is None else catalog.facet(RankFacts)
    if catalog is None or (ranks is not None and ranks.is_single_rank):
        return ModelView()
    try:
        catalog = loaded(catalog, store)
        if not catalog.is_rank_local and not may_have_arguments(catalog):
            return ModelView()
        from core.megatron.extras.common_state import is_megatron
        from core.megatron.rules.tables import load_rules

        rules = own_rules or load_rules(None)
        if not catalog.is_rank_local:
            from core.megatron.reshard.from_global import is_one_rank

            if not is_megatron(catalog, rules) or is_one_rank(catalog, rules):
                return ModelView()
    except CheckpointingException:
        return ModelView()  # reported by the checks of files
    from core.formats.megatron.format import choose_model_file
    from core.megatron.reshard.from_ranks import ranks_of
    from core.megatron.reshard.problems import understood

    # If one rank file per pipeline stage and file size was opened, compare only those: the others
    # have no tensors in the catalog and would seem to lack them.
    sample: set[str] | None = None
    if ranks is not None and ranks.n_unopened:
        opened: dict[tuple[object, int], str] = {}
        for coords, (folder, _) in ranks_of(catalog).items():
            sizes = store.sizes(folder)
            size = sizes[choose_model_file(sizes) or ""]
            opened.setdefault((dict(coords).get("pp"), size), folder)
        sample = set(opened.values())
    problems: list[CheckpointingException] = []
    model = understood(
        catalog, rules, store, report=problems.append, sample=sample, is_quick=is_quick
    )
    return ModelView(catalog, model, tuple(problems), is_sample=sample is not None)
