"""Several workers write one destination: the same bytes as one process, whatever the format, and
whoever is killed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.team.protocol import Team, is_final, summarize_figures
from core.errors import CorruptError, SourceChangedError, StorageError, UsageError, WorkerError
from core.progress import bytes_only
from core.publish.stage.shared import SharedDirectory
from core.verbs.convert.run import Job, TopologyChange, run
from core.verbs.convert.workers.run import WorkSizes, run_shared
from core.verbs.convert.workers.share import WorkerShare, WorkOrder
from tests.support.teams import PipeTeam, run_team

FINE = WorkSizes(item_bytes=6 << 10, buffer_bytes=24 << 10, batch_bytes=16 << 10)
"""So that even the tensors of small checkpoints are cut."""


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a directory, or the file."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def convert(team: Team, job: Job, sizes: WorkSizes = FINE) -> dict[str, Any]:
    """One worker of a conversion."""
    report = run_shared(job, team, sizes=sizes)
    return {**report.as_dict(), "launch": summarize_figures(report.workers)}


SHARDED = "mcore_legacy/dense_gqa/tp2_pp2"
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": (SHARDED, {"to": "torch"}),
    "dcp": (SHARDED, {"to": "dcp"}),
    "safetensors": ("torch_dcp/tp2_fsdp2_dp2", {"to": "safetensors"}),
    "zarr3": (SHARDED, {"to": "zarr3"}),
    "zarr": (SHARDED, {"to": "zarr"}),
    "torch_dist": (SHARDED, {"to": "torch_dist"}),
    "megatron": (SHARDED, {"topology": TopologyChange(tp=4, pp=1), "is_reshard": True}),
    "links": ("torch_dcp/fsdp2_dp2", {"metadata_only": True}),
    "deepspeed_universal": ("deepspeed/zero1_dp2_bf16", {"to": "deepspeed_universal"}),
}


def job_of(target: str, golden: Path, dst: Path) -> Job:
    source, options = TARGETS[target]
    return Job(src=golden / source, dst=dst, fsync=False, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("target", TARGETS)
def test_any_number_of_workers_writes_the_same_bytes(
    target: str, n: int, golden: Path, tmp_path: Path
) -> None:
    run(job_of(target, golden, tmp_path / "one" / "out"))
    wanted = tree(tmp_path / "one")
    reports = run_team(n, convert, job_of(target, golden, tmp_path / "many" / "out"))
    assert tree(tmp_path / "many") == wanted
    assert os.listdir(tmp_path / "many") == ["out"]
    figures = reports[0]["launch"]["workers"]
    assert len(figures) == n and reports[0]["launch"]["balance"] < n


def test_values_that_a_cast_made_infinite_are_counted_by_all_workers(tmp_path: Path) -> None:
    values = torch.arange(40_000, dtype=torch.float32).reshape(2, -1)
    values[0, 0], values[0, 1], values[1, 0], values[1, 1] = 1e6, float("inf"), -65_520, 65_519
    save_file({"w": values, "fine": torch.ones(3)}, tmp_path / "in.safetensors")
    for n, name in ((1, "one"), (2, "two")):
        dst = tmp_path / f"{name}.safetensors"
        dtype = (("*", "float16"),)
        job = Job(src=tmp_path / "in.safetensors", dst=dst, dtype=dtype, fsync=False)
        notes = run(job).as_dict()["notes"] if n == 1 else run_team(n, convert, job)[0]["notes"]
        assert any(note.startswith("2 finite values of w became infinite") for note in notes)
        assert load_file(dst)["w"].isinf().sum() == 3


@dataclass
class Mortal:
    """A team whose worker is killed once it has written some bytes."""

    team: Any
    after_bytes: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.team, name)

    def advance(self, n_bytes: int) -> None:
        self.team.advance(n_bytes)
        if self.team.done_bytes >= self.after_bytes:
            os.kill(os.getpid(), signal.SIGKILL)


def convert_or_die(team: Team, job: Job, victim: int, after_bytes: int) -> dict[str, Any]:
    return convert(Mortal(team, after_bytes) if team.rank == victim else team, job)


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["megatron", "dcp", "safetensors", "zarr3"])
@pytest.mark.parametrize(("victim", "n", "n_after"), [(0, 3, 2), (2, 3, 3), (1, 2, 1)])
def test_after_a_worker_was_killed_any_number_goes_on_with_the_same_bytes(
    target: str, victim: int, n: int, n_after: int, golden: Path, tmp_path: Path
) -> None:
    run(job_of(target, golden, tmp_path / "one" / "out"))
    wanted = tree(tmp_path / "one")
    job = job_of(target, golden, tmp_path / "many" / "out")
    outcomes = run_team(n, convert_or_die, job, victim, 60 << 10, allow_failure=True)
    assert outcomes[victim] is None and all(
        outcomes[rank] is not None for rank in range(n) if rank != victim
    )
    assert all(
        isinstance(error, WorkerError) and not is_final(error)
        for error in outcomes
        if error is not None
    )
    assert os.listdir(tmp_path / "many") == [".out.ckpt-stage"]
    reports = run_team(n_after, convert_finely, job)
    assert tree(tmp_path / "many") == wanted
    assert os.listdir(tmp_path / "many") == ["out"]
    assert reports[0]["bytes_resumed"] > 0
    assert "continuing an interrupted run" in reports[0]["notes"]


def convert_finely(team: Team, job: Job) -> dict[str, Any]:
    """The same, also as a team of one, whose items are as fine."""
    return run_shared(job, team, sizes=FINE).as_dict()


def wrong_plan(team: Team, job: Job) -> None:
    """The lead's plan changes on its way to one of the workers."""
    run_shared(job, Lying(team) if team.rank == 1 else team, sizes=FINE)


@dataclass
class Lying:
    """A team in which this worker hears of another plan than the lead has written."""

    team: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.team, name)

    def broadcast(self, data: bytes) -> bytes:
        value, error = pickle.loads(self.team.broadcast(data))
        if isinstance(value, WorkOrder):
            value = replace(value, digest="0" * 64)
        return pickle.dumps((value, error))


def test_nothing_is_written_where_workers_have_different_plans(
    golden: Path, tmp_path: Path
) -> None:
    job = job_of("dcp", golden, tmp_path / "out")
    for error in run_team(3, wrong_plan, job, allow_failure=True):
        assert isinstance(error, CorruptError) and "SHA-256" in error.message
    stage = tmp_path / ".out.ckpt-stage"
    assert not (tmp_path / "out").exists()
    assert all(not any(data) for data in tree(stage / "data").values())


def test_fingerprints_and_the_comparison_are_shared(golden: Path, tmp_path: Path) -> None:
    for target in ("megatron", "safetensors"):
        jobs = [
            replace(
                job_of(target, golden, tmp_path / place / target), verify=True, fingerprint=True
            )
            for place in ("one", "many")
        ]
        alone = run(jobs[0]).as_dict()
        shared = run_team(3, convert, jobs[1])[0]
        same = ("bytes_verified", "n_fingerprints", "n_copies", "bytes_written")
        assert [shared[name] for name in same] == [alone[name] for name in same]
        assert shared["bytes_verified"] > 0 and shared["n_fingerprints"] > 0
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


@dataclass
class Vandal:
    """A team in which this worker damages a byte of the stage before it compares its share."""

    team: Any
    stage_dir: Path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.team, name)

    def expect(self, n_bytes: int) -> None:
        if (self.stage_dir / "plan-to-verify").exists():
            for path in sorted((self.stage_dir / "data").glob("*.safetensors")):
                with path.open("r+b") as file:
                    file.seek(-3, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-3, os.SEEK_END)
                    file.write(bytes([byte[0] ^ 1]))


def convert_damaged(team: Team, job: Job) -> None:
    assert job.dst is not None
    convert(
        Vandal(team, job.dst.parent / f".{job.dst.name}.ckpt-stage") if team.rank == 1 else team,
        job,
    )


def test_a_byte_that_changes_before_the_comparison_is_found(golden: Path, tmp_path: Path) -> None:
    job = replace(job_of("safetensors", golden, tmp_path / "out"), verify=True)
    for error in run_team(2, convert_damaged, job, allow_failure=True):
        assert isinstance(error, CorruptError) and "of the written file is" in error.message
    assert os.listdir(tmp_path) == [".out.ckpt-stage"]


def convert_usually_or_die(team: Team, job: Job, victim: int, after_bytes: int) -> dict[str, Any]:
    return run_shared(job, Mortal(team, after_bytes) if team.rank == victim else team).as_dict()


def test_what_several_workers_began_one_process_continues_and_the_other_way_round(
    golden: Path, tmp_path: Path
) -> None:
    run(job_of("megatron", golden, tmp_path / "one" / "out"))
    job = job_of("megatron", golden, tmp_path / "many" / "out")
    assert run_team(3, convert_usually_or_die, job, 0, 1, allow_failure=True)[0] is None
    report = run(replace(job, resume=True))
    assert report.bytes_resumed > 0 and "continuing an interrupted run" in report.notes
    assert tree(tmp_path / "many") == tree(tmp_path / "one")

    def stop(done: int, of: int) -> None:
        if done > of // 2:
            raise StorageError("made to fail")

    back = replace(job_of("megatron", golden, tmp_path / "back" / "out"), resume=True)
    with pytest.raises(StorageError):
        run(back, progress=bytes_only(stop))
    continued = run_team(2, convert_usually_or_die, back, -1, 0)[0]
    assert continued["bytes_resumed"] > 0
    assert tree(tmp_path / "back") == tree(tmp_path / "one")


@dataclass
class TouchingTeam(PipeTeam):
    """A team whose lead's source changes right after it was planned."""

    src: Path = Path()

    def broadcast(self, data: bytes) -> bytes:
        for path in self.src.iterdir():
            os.utime(path, (1, 1))
        return super().broadcast(data)


def convert_what_changes(team: PipeTeam, job: Job) -> None:
    if team.rank == 0:
        team = TouchingTeam(team.rank, team.size, team.pipes, team.alarmed, src=job.src)
    convert(team, job)


def test_a_source_that_changes_is_not_taken_for_another_host_s(
    golden: Path, tmp_path: Path
) -> None:
    shutil.copytree(golden / "torch_dcp/tp2_fsdp2_dp2", tmp_path / "src")
    job = Job(src=tmp_path / "src", dst=tmp_path / "out", to="safetensors", fsync=False)
    for error in run_team(2, convert_what_changes, job, allow_failure=True):
        assert isinstance(error, SourceChangedError)
    assert not job.dst.exists()


def test_a_host_that_sees_other_directories_is_named(tmp_path: Path) -> None:
    order = WorkOrder(
        stage=SharedDirectory(
            tmp_path / ".out.ckpt-stage", "0" * 32, "identity", fsync=False, batch_bytes=1
        ),
        plan=tmp_path / "plan",
        digest="0" * 64,
        written=tmp_path / ".out.ckpt-stage" / "data",
        source=tmp_path,
        threads=1,
        memory_bytes=64 << 20,
    )
    team = PipeTeam(1, 2, [None], None)
    with (
        pytest.raises(UsageError, match="worker 1 on host host1 cannot see") as error,
        WorkerShare(order, team, patience_s=0),
    ):
        pass
    assert error.value.file == str(tmp_path / ".out.ckpt-stage" / "data")
    assert "shared file system" in (error.value.hint or "")
