"""``all_local_plans``: written for torch, read again by both readers, absent where malformed."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from core.formats.dcp import plans as dcp_plans
from core.formats.dcp.metadata import parse_metadata
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.plans import PlanRow, TensorData, parse_plans
from core.formats.dcp.records import FAST_FROM_BYTES

N_RANKS = 3


def metadata_with_plans(n_keys: int) -> tuple[bytes, list[list[PlanRow]]]:
    """``.metadata`` of tensors that all ranks share, and the plans of the ranks; one has none."""
    plans: list[list[PlanRow]] = [[] for _ in range(N_RANKS)]
    rows: list[TensorRow | ObjectRow] = []
    for number in range(n_keys):
        key, shape = f"model.{number}", (2 * number + 2, 3, 1, 5)
        chunks = []
        for rank in range(N_RANKS - 1):
            offset, size = (rank * (number + 1), 0, 0, 0), (number + 1, 3, 1, 5)
            chunks.append(ChunkRow(offset, size, f"__{rank}_0.distcp", 64 * number, 64))
            plans[rank].append(PlanRow(key, TensorData("bfloat16", shape, offset, size)))
        rows.append(TensorRow(key, "bfloat16", shape, chunks))
    rows.append(ObjectRow("rng/shard_0_1", "__1_0.distcp", 0, 9))
    plans[1].append(PlanRow("rng/shard_0_1"))
    return write_metadata(rows, planner_data=None, plans=plans), plans


def test_plans_are_read_as_written_and_change_nothing_else() -> None:
    data, plans = metadata_with_plans(4)
    assert parse_plans(data, label="x") == plans
    metadata = parse_metadata(data, label="x")
    assert metadata.extras == ("all_local_plans",)
    assert len(metadata.tensors) == 4 and not metadata.orphans


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")
def test_large_metadata_are_read_in_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    data, plans = metadata_with_plans(4000)
    assert len(data) > FAST_FROM_BYTES
    monkeypatch.setattr(dcp_plans, "parse_by_machine", None)
    assert parse_plans(data, label="x") == plans


def test_torch_reads_the_plans_as_its_own() -> None:
    planner = pytest.importorskip("torch.distributed.checkpoint.planner")
    metadata = pickle.loads(metadata_with_plans(2)[0])
    assert [len(plan.items) for plan in metadata.all_local_plans] == [2, 3, 0]
    assert type(metadata.all_local_plans[0]) is planner.SavePlan
    last = metadata.all_local_plans[1].items[-1]
    assert last.type is planner.WriteItemType.BYTE_IO and last.tensor_data is None


def test_plans_of_megatron_are_read(golden: Path) -> None:
    paths = sorted((golden / "mcore0161_torch_dist").rglob(".metadata"))
    assert paths
    for path in paths:
        data = path.read_bytes()
        metadata = parse_metadata(data, label="x")
        plans = parse_plans(data, label="x")
        assert plans is not None
        planned = {row.key for plan in plans for row in plan}
        assert planned == {*metadata.tensors, *metadata.objects}


def test_missing_and_malformed_plans_are_none() -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    planner = pytest.importorskip("torch.distributed.checkpoint.planner")
    index = checkpoint.metadata.MetadataIndex("w")
    for plans in (
        None,
        5,
        [5],
        [planner.SavePlan(None)],
        [planner.SavePlan([index])],
        [planner.SavePlan([planner.WriteItem(index, None, tensor_data=index)])],
    ):
        metadata = checkpoint.Metadata({})
        metadata.all_local_plans = plans
        assert parse_plans(pickle.dumps(metadata), label="x") is None
