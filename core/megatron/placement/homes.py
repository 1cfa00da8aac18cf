"""Positions of a model's tensors in rank files: the chunks that hold them, and the local names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.pipeline import Pipeline, Stages
from core.megatron.model.topology import Rank, Topology
from core.megatron.rules.rules import Rules, format_table
from core.values import dataclass, n_text

T = TypeVar("T")
FINAL_NORM = "decoder.final_layernorm"


@dataclass(frozen=True, slots=True)
class Home:
    """The position of a tensor, an extra state or a module in rank files.

    Args:
        vp, pp: ranks of the virtual and the pipeline stage.
        ep: the expert parallel rank that holds an expert; None for all ranks.
        name: local name in the chunk.
    """

    vp: int
    pp: int
    ep: int | None
    name: str

    def has(self, rank: Rank) -> bool:
        """Return True if a rank of this stage holds the tensor."""
        return self.ep in (None, rank.ep)


@dataclass(frozen=True, slots=True)
class Homes:
    """A finder of the positions of a model's names in a topology.

    Args:
        expert_names: form of the experts' names (``core.megatron.rules.experts``).
        n_local: number of experts of a layer on a rank.
    """

    stages: Stages
    topology: Topology
    rules: Rules
    expert_names: str
    n_local: int

    def home(self, key: str) -> Home:
        """Return the position of a tensor or extra state, of its original if there are copies.

        Raises:
            CorruptError: the model has no such layer.
            UnsupportedError: no rule assigns the tensor to a pipeline stage.
        """
        rules = self.rules
        layer = rules.layer_of(key)

        # Outside of layers, a rule decides on the first or last stage.
        if layer is None:
            place = rules.stage_of(key)
            if place is None:
                raise UnsupportedError(
                    "no rule assigns this tensor to a pipeline stage",
                    key=key,
                    hint="add this table to a rules file, and pass the file with --rules:\n"
                    + format_table("stage", [key], 'stage = "last"   # or "first"'),
                )

            # Multi-token prediction may be in a chunk of its own after the last layer and its norm.
            if self.stages.n_layers(PREDICTION_STACK) and key.startswith(FINAL_NORM):
                place = "last_layer"
            return Home(*self.stages.chunk_at(place), None, key)
        if layer.number >= self.stages.n_layers(layer.stack):
            n_layers = self.stages.n_layers(layer.stack)
            raise CorruptError(
                f"layer number {layer.number} is out of range: the model has "
                f"{n_text(n_layers, 'layer')}",
                key=key,
            )

        # Layers are numbered anew in every chunk, experts in every expert parallel rank.
        vp, pp, number = self.stages.chunk_of(layer.stack, layer.number)
        name = str(replace(layer, number=number))
        expert = rules.expert_of(name)
        if expert is None or expert.number is None:
            return Home(vp, pp, None, name)
        ep, number = divmod(expert.number, self.n_local)
        return Home(vp, pp, ep, rules.expert_name(expert, names=self.expert_names, number=number))

    def homes(self, key: str) -> list[Home]:
        """Return the positions of all copies of a tensor or extra state.

        Multi-token prediction has a copy of the embedding in its stage.
        """
        home = self.home(key)
        if not self.stages.n_layers(PREDICTION_STACK) or self.rules.stage_of(key) != "first":
            return [home]
        vp, pp, _ = self.stages.chunk_of(PREDICTION_STACK, 0)
        return [home] if (vp, pp) == (home.vp, home.pp) else [home, replace(home, vp=vp, pp=pp)]

    def last(self, name: str) -> Home:
        """Return the position of a name in the last chunk of the last stage."""
        return Home(*self.stages.chunk_at("last"), None, name)

    def module(self, name: str) -> list[Home]:
        """Return the positions of a module; all chunks if no rule assigns it to one.

        There are none if the model has no such layer.
        """
        # A trailing dot makes the module's name the beginning of a parameter's.
        layer = self.rules.layer_of(name + ".")
        if layer is None and self.rules.stage_of(name) is None:
            return [
                Home(vp, pp, None, name)
                for pp in range(self.topology.pp)
                for vp in range(self.topology.vpp)
            ]
        if layer is not None and layer.number >= self.stages.n_layers(layer.stack):
            return []
        homes = self.homes(name + "." if layer is not None else name)
        return [replace(home, name=home.name.removesuffix(".")) for home in homes]


def homes_at(
    model: Catalog,
    topology: Topology,
    facts: ModelFacts,
    rules: Rules,
    *,
    pipeline: Pipeline | None = None,
    expert_names: str | None = None,
) -> Homes:
    """Return the finder of positions for a model in a topology.

    Args:
        model: the global per-layer form.
        topology: sizes of the destination.
        facts: facts about the source.
        pipeline: distribution of the layers; None for ``facts.pipeline_at``.
        expert_names: form of the experts' names in the files; None for the source's form, or
            ``sequential`` if that is the legacy grouped one.

    Raises:
        UnsupportedError, UsageError, CorruptError: the layers cannot be distributed in this way
            (``ModelFacts.stages``).
    """
    if expert_names is None:
        names = (model.facet(MegatronModel) or MegatronModel()).expert_names or facts.expert_names
        expert_names = "sequential" if names is None or names == "grouped" else names
    return Homes(
        stages=facts.stages(topology.pp, topology.vpp, pipeline=pipeline),
        topology=topology,
        rules=rules,
        expert_names=expert_names,
        n_local=(facts.n_experts or 0) // topology.ep,
    )


def tied_of(model: Catalog, facts: ModelFacts, rules: Rules) -> str | None:
    """Return the embedding of which the last stage's output layer is a copy, or None."""
    if not facts.is_tied:
        return None
    shared = rules.rule_of(facts.kind.head).tied
    return shared if shared in model.tensors else None


def by_file_order(names: Iterable[tuple[str, str]], rules: Rules) -> list[tuple[str, str]]:
    """Sort (key, name in the file) pairs as rank files have them.

    Args:
        names: pairs in the order of the model, in which experts come one after the other.
    """
    pairs = list(names)
    module_index: dict[str, int] = {}
    linear_index: dict[tuple[str, str], int] = {}
    sort_keys: list[tuple[int, ...]] = []
    for index, (_, name) in enumerate(pairs):
        expert = rules.expert_of(name)
        if expert is None or expert.names != "te_grouped":
            sort_keys.append((index,))
            continue

        # A grouped linear holds all experts of a rank, so names come linear by linear: its
        # parameters first, then its extra state.
        linear, _, field = expert.rest.partition(".")
        of_module = module_index.setdefault(expert.before, index)
        of_linear = linear_index.setdefault((expert.before, linear), index)
        sort_keys.append((of_module, of_linear, field.startswith("_"), index))
    return [pairs[index] for index in sorted(range(len(pairs)), key=sort_keys.__getitem__)]


def by_rank(
    items: Iterable[tuple[str, Home]], topology: Topology, rules: Rules
) -> dict[tuple[int, int, int], list[tuple[str, str]]]:
    """Group positions by (vp_rank, pp_rank, ep_rank), as (key, name) in the order of the file."""
    # A tensor that is not an expert is in the files of all EP ranks.
    names: dict[tuple[int, int, int], list[tuple[str, str]]] = {}
    for key, home in items:
        for ep_rank in range(topology.ep) if home.ep is None else (home.ep,):
            names.setdefault((home.vp, home.pp, ep_rank), []).append((key, home.name))
    return {place: by_file_order(pairs, rules) for place, pairs in names.items()}


def by_chunk(items: Iterable[tuple[T, Home]]) -> dict[tuple[int, int], list[tuple[T, Home]]]:
    """Group positions by chunk: (vp_rank, pp_rank) → (item, position), in order."""
    groups: dict[tuple[int, int], list[tuple[T, Home]]] = {}
    for item, home in items:
        groups.setdefault((home.vp, home.pp), []).append((item, home))
    return groups
