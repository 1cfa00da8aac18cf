"""Where the tensors of a model live in rank files: in which chunks, and under which names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from core.arrays.fast_value import value
from core.catalog.catalog import Catalog
from core.catalog.facets import MegatronModel
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.pipeline import Pipeline
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Rank, Topology
from core.megatron.rules.rules import Rules

T = TypeVar("T")
FINAL_NORM = "decoder.final_layernorm"


@value(frozen=True, slots=True)
class Home:
    """The place of a tensor, an extra state or a module in the files.

    Args:
        vp, pp: virtual and pipeline stage.
        ep: the expert parallel rank, for experts; None means all of them.
        name: local name of the tensor in the chunk.
    """

    vp: int
    pp: int
    ep: int | None
    name: str

    def has(self, rank: Rank) -> bool:
        """Return whether a rank of this stage holds the tensor."""
        return self.ep in (None, rank.ep)


@dataclass(frozen=True, slots=True)
class Homes:
    """Finds the homes of a model's names in a topology.

    Args:
        expert_names: how files name experts.
        n_local: experts of a rank.
    """

    stages: Stages
    topology: Topology
    rules: Rules
    expert_names: str
    n_local: int

    def home(self, key: str) -> Home:
        """Return the home of a tensor or extra state.

        Raises:
            CorruptError: the model has no such layer.
            UnsupportedError: no row says where it lives.
        """
        rules = self.rules
        layer = rules.layer_of(key)
        if layer is None:
            place = rules.stage_of(key)
            if place is None:
                raise UnsupportedError(
                    "no rule assigns this tensor to a pipeline stage",
                    key=key,
                    hint=f"pass a file with --rules that says: [[stage]] pattern = '^{key}$' stage = \"last\"",
                )
            if self.stages.n_layers(PREDICTION_STACK) and key.startswith(FINAL_NORM):
                place = (
                    "last_layer"  # multi-token prediction may be in a chunk of its own behind it
                )
            return Home(*self.stages.chunk_at(place), None, key)
        if layer.number >= self.stages.n_layers(layer.stack):
            n_layers = self.stages.n_layers(layer.stack)
            raise CorruptError(
                f"there is no layer {layer.number} in a model of {n_layers}", key=key
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
        """Return all homes of a tensor or extra state.

        Multi-token prediction has a copy of the embedding at its stage.
        """
        home = self.home(key)
        if not self.stages.n_layers(PREDICTION_STACK) or self.rules.stage_of(key) != "first":
            return [home]
        vp, pp, _ = self.stages.chunk_of(PREDICTION_STACK, 0)
        return [home] if (vp, pp) == (home.vp, home.pp) else [home, replace(home, vp=vp, pp=pp)]

    def last(self, name: str) -> Home:
        """Return the home of a name in the last chunk of the last stage."""
        return Home(*self.stages.chunk_at("last"), None, name)

    def module(self, name: str) -> list[Home]:
        """Return the homes of a module; none where it does not exist, all where no row says."""
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
    """Return the finder of the homes of a model in a topology.

    Args:
        model: the global per-layer form.
        topology: sizes of the destination.
        facts: facts about the source.
        pipeline: how layers are distributed; None for ``facts.pipeline_at``.
        expert_names: how files name experts; None for the source's way, legacy grouped ones one by
            one.

    Raises:
        UnsupportedError, UsageError, CorruptError: as ``facts.stages``.
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
    """Return the tensor that the output layer of the last of several stages is a copy of.

    None if there is no such copy.
    """
    if not facts.is_tied:
        return None
    shared = rules.rule_of(facts.kind.head).tied
    return shared if shared in model.tensors else None


def by_file_order(names: Iterable[tuple[str, str]], rules: Rules) -> list[tuple[str, str]]:
    """Sort (key, name in the file) pairs as files have them.

    The grouped experts of a layer come linear by linear, not expert by expert.
    """
    pairs = list(names)
    module_of: dict[str, int] = {}
    linear_of: dict[tuple[str, str], int] = {}
    keys: list[tuple[int, ...]] = []
    for place, (_, name) in enumerate(pairs):
        expert = rules.expert_of(name)
        if expert is None or expert.names != "te_grouped":
            keys.append((place,))
            continue
        linear, _, field = expert.rest.partition(".")
        start = module_of.setdefault(expert.before, place)
        keys.append(
            (
                start,
                linear_of.setdefault((expert.before, linear), place),
                field.startswith("_"),
                place,
            )
        )
    return [pairs[place] for place in sorted(range(len(pairs)), key=keys.__getitem__)]


def by_rank(
    items: Iterable[tuple[str, Home]], topology: Topology, rules: Rules
) -> dict[tuple[int, int, int], list[tuple[str, str]]]:
    """Group homes by (vp_rank, pp_rank, ep_rank), in the order of the file.

    Each group lists (key, name in the file).
    """
    names: dict[tuple[int, int, int], list[tuple[str, str]]] = {}
    for key, home in items:
        for ep_rank in range(topology.ep) if home.ep is None else (home.ep,):
            names.setdefault((home.vp, home.pp, ep_rank), []).append((key, home.name))
    return {place: by_file_order(pairs, rules) for place, pairs in names.items()}


def by_chunk(items: Iterable[tuple[T, Home]]) -> dict[tuple[int, int], list[tuple[T, Home]]]:
    """Group homes by chunk: (vp_rank, pp_rank) → (item, home), in order."""
    groups: dict[tuple[int, int], list[tuple[T, Home]]] = {}
    for item, home in items:
        groups.setdefault((home.vp, home.pp), []).append((item, home))
    return groups
