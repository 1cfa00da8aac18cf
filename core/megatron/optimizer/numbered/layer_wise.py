"""An optimizer that is distributed by layers: every data parallel rank has whole parameters.

On disk, next to ``model_optim_rng.pt``::

    mp_rank_01/
    ├── model_optim_rng.pt          its entry ``optimizer`` repeats the file of data parallel rank 0
    ├── layer_wise_optimizer_0.pt   data parallel rank 0: the chain of ``core.megatron.optimizer.
    └── layer_wise_optimizer_1.pt   numbered.content``, all groups, but the rank's parameters only

With expert parallelism, the directories of one tensor and pipeline parallel rank share the data
parallel ranks.

Which parameters a rank has follows from their number of elements: sorted by it, they are dealt to
the ranks forwards and backwards in turn; experts that expert parallelism distributes are dealt to
their own data parallel ranks.

Versions: megatron-core 0.16.1 (``--optimizer dist_muon``), and Megatron-LM HEAD of 2026-08 with
``--no-use-layer-wise-param-layout``; without it, HEAD cannot write these files (its
``ChainedOptimizer`` has no ``save_state_dict_to_file``), and chains Muon with a distributed
optimizer of the other parameters.

Not supported: context parallelism, whose ranks overwrite each other's file; writing these files.

Source: megatron-core 0.16.1 ``core/optimizer/layer_wise_optimizer.py`` ``shard_params``;
Megatron-LM HEAD ``_shard_params_ping_pong``, ``training/checkpointing.py`` ``save_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle
from math import prod

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts
from core.errors import MissingShardError, UnsupportedError
from core.megatron.model.args import fields_of
from core.megatron.model.topology import Topology
from core.megatron.optimizer.groups import EXPERT, HINT, Assignment, Slots, Trained
from core.megatron.optimizer.rank_state import RankFile
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class DataRank:
    """A data parallel rank, among the copies of the dense parameters and among those of experts.

    Args:
        number, size: rank and size of the group of dense parameters.
        expert_number, expert_size: rank and size of the group of experts.
    """

    number: int
    size: int
    expert_number: int
    expert_size: int

    def share(
        self, assignment: Assignment, params: Sequence[Trained], groups: Sequence[Slots]
    ) -> Assignment:
        """Return the parameters of every group that this rank has, in the order of its file.

        Args:
            assignment: all parameters of every group.
            params, groups: as for ``core.megatron.optimizer.groups.assign``.
        """
        if self.size == 1:
            return assignment
        members: list[list[int]] = [[] for _ in groups]
        dense, experts = _deal(self.size), _deal(self.expert_size)
        listed = [(i, number) for number, group in enumerate(assignment) for i in group]
        for i, number in sorted(listed, key=lambda pair: prod(params[pair[0]].shape)):
            is_expert = bool(groups[number].settings.get(EXPERT))
            if next(experts if is_expert else dense) == (
                self.expert_number if is_expert else self.number
            ):
                members[number].append(i)
        return tuple(map(tuple, members))


def _deal(size: int) -> Iterator[int]:
    """Yield the ranks that get one parameter after the other: 0, 1, 2, 2, 1, 0, 0, 1 …"""
    return cycle(chain(range(size), reversed(range(size))))


def layer_wise_files(
    catalog: Catalog, files: Sequence[RankFile], topology: Topology
) -> Iterator[tuple[RankFile, str, object, DataRank]]:
    """Yield (rank file, file of the optimizer, its content, data parallel rank).

    Args:
        catalog: a rank catalog whose optimizer is distributed by layers.
        files: the model files of all ranks.

    Raises:
        UnsupportedError: the run had context parallelism.
        MissingShardError: a file of the optimizer is missing.
    """
    facts, args = catalog.facet(RankFacts), fields_of(catalog.args)
    assert facts is not None, "a rank catalog lists the content of its files"
    cp = args.get("context_parallel_size")
    if type(cp) is int and cp > 1:
        raise UnsupportedError(
            f"the layer-wise optimizer was saved with CP {cp}, and the CP ranks overwrote each "
            "other's layer_wise_optimizer_N.pt, so states are missing",
            hint=HINT,
        )

    # The arguments tell how many files there were; some older ones do not.
    contents: dict[str, Mapping[int, object]] = {}
    for file in files:
        content = facts.optim_files.get(topology.coords(file.rank))
        contents[file.folder] = content if isinstance(content, dict) else {}
    size = args.get("data_parallel_size")
    if type(size) is not int:
        size = 1 + max(number for content in contents.values() for number in content)

    # Data parallel ranks follow each other within a stage; experts have the same ranks in turn.
    expert_ranks = topology.expert_tp * topology.ep
    for file in files:
        for number in range(size):
            place = file.rank.tp + topology.tp * number
            if place // topology.expert_tp % topology.ep != file.rank.ep:
                continue
            name = f"layer_wise_optimizer_{number}.pt"
            if number not in contents[file.folder]:
                raise MissingShardError(
                    f"{name}, which contains the states of some parameters, is missing",
                    rank=file.folder,
                    hint="copy the checkpoint again, with all of its files, or drop the optimizer "
                    "with --no-optim",
                )
            data_rank = DataRank(
                number,
                size,
                place // expert_ranks,
                max(1, topology.tp * size // expert_ranks),
            )
            yield file, f"{file.folder}/{name}", contents[file.folder][number], data_rank
