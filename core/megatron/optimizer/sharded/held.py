"""The parameters of each rank of the run that saved, in order and with their cuts.

They are computed from the model's global form.
"""

from __future__ import annotations

from dataclasses import replace

from core.arrays.sharding import ShardPiece, trim_piece
from core.catalog.catalog import Catalog
from core.megatron.extras.order import Place, place_of
from core.megatron.model.cut import Cut, cuts_of
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Rank
from core.megatron.model.vocabulary import rows_of
from core.megatron.placement.homes import Home, by_chunk, by_file_order, homes_at, tied_of
from core.megatron.rules.rules import Rules
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class BucketParam:
    """A parameter of a rank.

    Args:
        key: global name of the tensor.
        name: name of the parameter in the rank's file.
        vp_rank: number of the model chunk.
        cut: cut of the tensor; its shape is that of the run, with vocabulary padding.
        pieces: regions of the global tensor in the rank's shard, without vocabulary padding.
    """

    key: str
    name: str
    vp_rank: int
    cut: Cut
    pieces: tuple[ShardPiece, ...]


class Holdings:
    """The parameters of all ranks of the run that saved.

    Args:
        model: the global per-layer form, without an optimizer.
        facts: facts about the run.

    Raises:
        UnsupportedError, CorruptError: as for ``core.megatron.model.cut.cuts_of`` and
        ``core.megatron.placement.homes.Homes.home``.
    """

    def __init__(self, model: Catalog, facts: ModelFacts, rules: Rules) -> None:
        self._model = model
        self._rules = rules
        # The run's own padding is recorded, and need not be that of a divisor times TP.
        n_padded, tp = facts.sizes.get("padded_vocab_size"), facts.topology.tp
        if n_padded is not None and n_padded % tp == 0:
            facts = replace(facts, divisible_by=n_padded // tp)
        self._cuts = cuts_of(model, facts.topology, facts, rules, n_rows=rows_of(model, None))

        # File positions of every parameter; the last stage has a copy of a tied embedding.
        places = homes_at(model, facts.topology, facts, rules)
        homes = [
            (key, home)
            for key in model.tensors
            if rules.is_param(key)
            for home in places.homes(key)
        ]
        head = facts.kind.head
        tied = tied_of(model, facts, rules) if facts.topology.pp > 1 else None
        if tied is not None:
            homes.append((tied, places.last(head)))

        # The copy is in the position of the output layer, not of the embedding.
        def order(item: tuple[str, Home]) -> Place:
            key, home = item
            return place_of(head if home.name == head else key, rules)

        self._homes = by_chunk(sorted(homes, key=order))

    def of(self, rank: Rank) -> list[BucketParam]:
        """Return the parameters of a rank, chunk by chunk, in the order of its file."""
        params = []
        for (vp_rank, pp_rank), homes in sorted(self._homes.items()):
            if pp_rank != rank.pp:
                continue
            names = [(key, home.name) for key, home in homes if home.has(rank)]
            for key, name in by_file_order(names, self._rules):
                cut = self._cuts[key]
                params.append(BucketParam(key, name, vp_rank, cut, self._pieces(key, cut, rank)))
        return params

    def _pieces(self, key: str, cut: Cut, rank: Rank) -> tuple[ShardPiece, ...]:
        """Return the regions of a tensor in a rank's shard, without vocabulary padding."""
        pieces = cut.pieces(rank)
        axis, shape = cut.axis, self._model.tensors[key].shape
        if axis is None:
            return tuple(pieces)
        kept = (trim_piece(piece, axis, shape[axis]) for piece in pieces)
        return tuple(piece for piece in kept if piece is not None)
