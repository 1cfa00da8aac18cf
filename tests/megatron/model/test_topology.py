"""core.megatron.model.topology: sizes, rank directories, layers of stages."""

from __future__ import annotations

import pytest

from core.errors import CorruptError, MissingShardError, UnsupportedError, UsageError
from core.megatron.model.topology import Topology, matched_dirs, rank_dir, rank_dirs


def names(topology: Topology, **options: int) -> list[list[str]]:
    return [sorted(candidate) for candidate in rank_dirs(topology, **options)]


def test_names_without_pipeline_have_one_number() -> None:
    assert names(Topology(tp=2)) == [["mp_rank_00", "mp_rank_01"]]


def test_names_with_a_pipeline_have_two_numbers() -> None:
    assert names(Topology(tp=1, pp=2)) == [["mp_rank_00_000", "mp_rank_00_001"]]


def test_one_name_is_a_pipeline_stage_or_an_expert_rank_by_the_sizes() -> None:
    (by_pp,) = rank_dirs(Topology(pp=2))
    (by_ep,) = rank_dirs(Topology(ep=2))
    assert by_pp["mp_rank_00_001"] == (("tp", 0), ("pp", 1))
    assert by_ep["mp_rank_00_001"] == (("tp", 0), ("pp", 0), ("ep", 1))


@pytest.mark.parametrize(
    ("topology", "world_size", "expected"),
    [
        (Topology(tp=2, ep=2, etp=2), 4, [["00_000", "00_001", "01_000", "01_001"]]),
        (
            Topology(tp=4, ep=8, etp=1),
            8,
            [[f"{q % 4:02d}_{q:03d}" for q in (0, 4, 1, 5, 2, 6, 3, 7)]],
        ),
        (
            Topology(tp=4, ep=2, etp=1),
            8,
            [["00_000", "01_001", "02_000", "03_001"], ["00_000", "01_001"]],
        ),
        (Topology(tp=2, ep=2, etp=1), 2, [["00_000", "01_001"]]),
        (
            Topology(tp=4, ep=3, etp=2),
            12,
            [
                ["00_000", "01_000", "02_001", "03_001", "00_002", "01_002"],
                [f"{t:02d}_{e:03d}" for t in range(4) for e in range(3)],
            ],
        ),
        (
            Topology(tp=1, pp=2, ep=2, etp=1),
            4,
            [["00_000_000", "00_000_001", "00_001_000", "00_001_001"]],
        ),
    ],
)
def test_expert_ranks_covary_with_tensor_ranks(
    topology: Topology, world_size: int, expected: list[list[str]]
) -> None:
    wanted = [sorted(f"mp_rank_{name}" for name in candidate) for candidate in expected]
    assert names(topology, world_size=world_size) == wanted


@pytest.mark.parametrize(
    ("topology", "world_size"),
    [
        (Topology(ep=2, etp=2), 4),
        (Topology(tp=2, ep=2, etp=4), 8),
        (Topology(etp=2), 2),
        (Topology(tp=3, ep=2, etp=2), 12),
    ],
)
def test_expert_shards_that_overwrote_each_other_are_refused(
    topology: Topology, world_size: int
) -> None:
    with pytest.raises(UnsupportedError, match="ETP"):
        rank_dirs(topology, world_size=world_size)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2, 3, 8])
@pytest.mark.parametrize("etp", [None, 1, 2])
def test_every_rank_has_a_file_of_its_own_with_all_shards(
    tp: int, ep: int, etp: int | None
) -> None:
    topology = Topology(tp=tp, pp=2, ep=ep, etp=etp if etp is None else min(etp, tp))
    ranks = list(topology.ranks())
    assert (
        len({rank_dir(topology, rank) for rank in ranks}) == len(ranks) == 2 * topology.stage_size
    )
    assert [topology.rank_at(topology.coords(rank)) for rank in ranks] == ranks
    assert {(rank.pp, rank.tp) for rank in ranks} == {(p, t) for p in range(2) for t in range(tp)}
    assert {(rank.ep, rank.etp) for rank in ranks} == {
        (e, t) for e in range(ep) for t in range(topology.expert_tp)
    }
    for rank in ranks:
        assert (rank.within("tp"), rank.within("etp")) == (rank.tp, rank.etp)
    assert (topology.size_of("tp"), topology.size_of("etp")) == (tp, topology.expert_tp)


def test_missing_and_unexpected_directories_are_listed() -> None:
    topology = Topology(tp=2, pp=2)
    with pytest.raises(
        MissingShardError, match=r"mp_rank_01_001 is missing and mp_rank_07 is unexpected"
    ):
        matched_dirs(
            ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_07"],
            rank_dirs(topology),
            topology=topology,
        )
    with pytest.raises(CorruptError, match="mp_rank_02 is unexpected"):
        matched_dirs(
            ["mp_rank_00", "mp_rank_01", "mp_rank_02"],
            rank_dirs(Topology(tp=2)),
            topology=Topology(tp=2),
        )


def test_the_older_set_of_expert_writers_is_found() -> None:
    topology = Topology(tp=4, ep=2, etp=1)
    folders = matched_dirs(
        ["mp_rank_00_000", "mp_rank_01_001"], rank_dirs(topology, world_size=8), topology=topology
    )
    assert list(folders) == ["mp_rank_00_000", "mp_rank_01_001"]


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_size_that_is_no_positive_integer_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="TP size"):
        Topology(tp=size)
