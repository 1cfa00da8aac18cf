"""Damaged and hostile checkpoints end in one error of the right kind, and leave nothing behind."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from core.errors import (
    CapacityError,
    CheckpointingException,
    CorruptError,
    MissingShardError,
    ReplicaMismatchError,
    StorageError,
    TruncatedError,
    UnsafeError,
)
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, TopologyChange, run

RANKS = "mcore_legacy/dense_gqa/tp2_pp2"
DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"
DCP = "torch_dcp/fsdp2_dp2"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return tmp_path / "src"


def copy(golden: Path, name: str, src: Path) -> Path:
    """A writable copy; returns the iteration's directory."""
    shutil.copytree(golden / name, src, copy_function=shutil.copyfile)
    return src / "iter_0000010"


def refused(
    src: Path, error: type[CheckpointingException], *, to: str = "torch"
) -> CheckpointingException:
    """Converts, expects the error, and that nothing remains."""
    dst = src.parent / "out"
    before = sorted(src.parent.iterdir())
    with pytest.raises(error) as caught:
        run(Job(src=src, dst=dst, to=to, fsync=False))
    assert sorted(src.parent.iterdir()) == before
    return caught.value


def rewritten(path: Path, record: str, change: bytes) -> None:
    """A zip with the first bytes of a record replaced, its CRC right."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = [name for name in entries if name.endswith(record)]
    entries[name] = change + entries[name][len(change) :]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def test_an_absent_rank_is_named(golden: Path, src: Path) -> None:
    shutil.rmtree(copy(golden, RANKS, src) / "mp_rank_01_001")
    assert "mp_rank_01_001" in str(refused(src, MissingShardError))


def test_an_unexpected_rank_is_named(golden: Path, src: Path) -> None:
    folder = copy(golden, RANKS, src)
    shutil.copytree(folder / "mp_rank_01_001", folder / "mp_rank_02_001")
    assert "mp_rank_02_001" in str(refused(src, CorruptError))


def test_an_absent_data_file_is_named(golden: Path, src: Path) -> None:
    (copy(golden, DIST, src) / "__1_0.distcp").unlink()
    error = refused(src, MissingShardError)
    assert error.file == "iter_0000010/__1_0.distcp"
    assert error.key is not None


@pytest.mark.parametrize("size", [0, 1, 100, 5000, 100_000])
def test_a_truncated_rank_file_is_named(golden: Path, src: Path, size: int) -> None:
    path = copy(golden, RANKS, src) / "mp_rank_01_000/model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:size])
    assert "mp_rank_01_000" in str(refused(src, CorruptError))


@pytest.mark.parametrize("size", [0, 100, 5000, 100_000])
def test_a_truncated_data_file_is_named(golden: Path, src: Path, size: int) -> None:
    path = copy(golden, DIST, src) / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:size])
    assert refused(src, TruncatedError).file == "iter_0000010/__2_0.distcp"


@pytest.mark.parametrize("size", [0, 1, 1000, 20_000])
def test_truncated_metadata_is_an_error(golden: Path, src: Path, size: int) -> None:
    path = copy(golden, DIST, src) / ".metadata"
    path.write_bytes(path.read_bytes()[:size])
    assert refused(src, CorruptError).file == "iter_0000010/.metadata"


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_bad_json_is_an_error_that_names_the_file(golden: Path, src: Path, text: str) -> None:
    (copy(golden, DIST, src) / "metadata.json").write_text(text)
    assert "metadata.json" in str(refused(src, CheckpointingException))


def test_a_flipped_bit_in_a_rank_file_is_found_by_its_crc(golden: Path, src: Path) -> None:
    path = copy(golden, RANKS, src) / "mp_rank_00_001/model_optim_rng.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    error = refused(src, CorruptError)
    assert "CRC" in error.message
    assert error.file == "mp_rank_00_001/model_optim_rng.pt"


@pytest.mark.parametrize("folder", [DIST, DCP], ids=["torch_dist", "dcp"])
def test_a_flipped_bit_in_a_distcp_file_is_found_by_its_crc(
    golden: Path, src: Path, folder: str
) -> None:
    copy(golden, folder, src)
    path = max(src.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    opened = open_checkpoint(path.parent)
    pieces = [
        piece.array for key in opened.catalog.tensors for piece in opened.catalog.fragments(key)
    ]
    largest = max(
        (piece for piece in pieces if piece is not None and piece.extent.file == path.name),
        key=lambda piece: piece.n_bytes,
    )
    bound = largest.locate(opened.store)
    opened.store.close()
    data = bytearray(path.read_bytes())
    data[bound.extent.offset + largest.n_bytes // 2] ^= 1
    path.write_bytes(data)
    error = refused(src, CorruptError)
    assert "CRC" in error.message
    assert error.file == path.name


def test_ranks_that_disagree_about_a_replicated_tensor_are_named(golden: Path, src: Path) -> None:
    folder = copy(golden, RANKS, src)
    rewritten(folder / "mp_rank_01_000/model_optim_rng.pt", "data/1", b"\x01\x02\x03\x04")
    error = refused(src, ReplicaMismatchError)
    assert error.key is not None
    assert "input_layernorm" in error.key
    assert "mp_rank_01_000" in str(error)


def test_ranks_with_other_sizes_in_their_arguments_are_refused(golden: Path, src: Path) -> None:
    folder = copy(golden, RANKS, src)
    other = golden / "mcore_legacy/dense_gqa/tp4_pp1/iter_0000010/mp_rank_01/model_optim_rng.pt"
    shutil.copyfile(other, folder / "mp_rank_01_000/model_optim_rng.pt")
    refused(src, CorruptError)


class _Gadget:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        import os

        return os.system, (f"touch {self.marker}",)


def test_hostile_pickles_run_nothing(golden: Path, src: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = copy(golden, DIST, src)
    hostile = pickle.dumps({"state_dict_metadata": _Gadget(marker)})
    for data in (pickle.dumps(_Gadget(marker)), hostile, pickle.dumps([_Gadget(marker)], 0)):
        (folder / ".metadata").write_bytes(data)
        refused(src, CheckpointingException)
        assert not marker.exists()


def test_a_dangerous_object_inside_a_checkpoint_is_refused(
    golden: Path, src: Path, tmp_path: Path
) -> None:
    import torch

    marker = tmp_path / "marker"
    src.mkdir()
    torch.save({"w": torch.zeros(2), "extra": _Gadget(marker)}, src / "model.pt")
    assert "system" in str(refused(src / "model.pt", UnsafeError, to="dcp"))
    assert not marker.exists()


def dropping(module: bytes, name: bytes) -> bytes:
    """Opcodes that call something and forget the result."""
    return b"c" + module + b"\n" + name + b"\nX\x02\x00\x00\x00id\x85R0"


def test_a_name_that_a_pickle_drops_again_is_refused(src: Path) -> None:
    src.mkdir()
    with zipfile.ZipFile(src / "model.pt", "w") as archive:
        archive.writestr(
            "m/data.pkl",
            b"\x80\x02" + dropping(b"posix", b"system") + pickle.dumps({"a": 1}, 2)[2:],
        )
        archive.writestr("m/version", "3\n")
    assert "posix.system" in refused(src / "model.pt", UnsafeError, to="dcp").message


@pytest.mark.parametrize(
    "is_large", [False, True], ids=["small", "large enough for the fast reader"]
)
def test_a_name_that_metadata_drops_again_is_refused(
    golden: Path, src: Path, is_large: bool
) -> None:
    path = copy(golden, DIST, src) / ".metadata"
    padding = b"\x8e" + (1 << 20).to_bytes(8, "little") + bytes(1 << 20) + b"0" if is_large else b""
    data = path.read_bytes()
    assert data[:2] == b"\x80\x04"
    path.write_bytes(
        b"\x80\x04"
        + padding
        + dropping(b"posix", b"system")
        + data[2:].replace(b"\x95", b"\x95", 1)
    )
    assert "posix.system" in refused(src, UnsafeError, to="dcp").message


def test_a_name_in_an_object_of_a_linked_copy_is_refused(
    golden: Path, src: Path, tmp_path: Path
) -> None:
    import torch
    from torch.distributed import checkpoint

    marker = tmp_path / "marker"
    checkpoint.save({"w": torch.zeros(2), "evil": _Gadget(marker)}, checkpoint_id=src, no_dist=True)
    with pytest.raises(UnsafeError, match="system"):
        run(Job(src=src, dst=tmp_path / "out", to="dcp", metadata_only=True, fsync=False))
    assert not marker.exists()


def test_an_unknown_class_is_refused_or_dropped_by_request(src: Path) -> None:
    import torch

    src.mkdir()
    torch.save({"w": torch.zeros(2), "extra": Job(src=src)}, src / "model.pt")
    error = refused(src / "model.pt", CheckpointingException, to="dcp")
    assert error.exit_code == 4
    assert "core.verbs.convert.job.Job" in error.message
    report = run(
        Job(src=src / "model.pt", dst=src / "out", to="dcp", drop_unknown=True, fsync=False)
    )
    assert any("extra" in text for text in report.dropped)


def test_names_that_leave_the_directory_are_refused(golden: Path, src: Path) -> None:
    path = copy(golden, DIST, src) / ".metadata"
    data = path.read_bytes()
    assert b"__1_0.distcp" in data
    path.write_bytes(data.replace(b"__1_0.distcp", b"../etc/passw"))
    assert refused(src, UnsafeError).exit_code == 5


def test_an_existing_destination_is_left_alone_and_replaced_by_request(
    golden: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    job = Job(src=golden / "torch_dcp/fsdp2_dp2", dst=out, to="torch", fsync=False)
    with pytest.raises(CheckpointingException, match="exists") as caught:
        run(job)
    assert caught.value.exit_code == 2
    assert (out / "precious").read_text() == "x"
    with pytest.raises(CheckpointingException, match="ckpt replaces only checkpoints"):
        run(Job(src=job.src, dst=out, to="torch", force=True, fsync=False))
    assert (out / "precious").read_text() == "x"
    old = tmp_path / "old"
    run(Job(src=job.src, dst=old, to="dcp", fsync=False))
    run(Job(src=job.src, dst=old, to="torch", force=True, fsync=False))
    assert sorted(path.name for path in old.iterdir()) == ["checkpoint.pt", "ckpt-manifest.json"]


def test_force_does_not_remove_other_iterations(golden: Path, src: Path) -> None:
    copy(golden, RANKS, src)
    (src / "iter_0000010").rename(src / "iter_0000005")
    (src / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(CheckpointingException, match="iter_0000005"):
        run(Job(src=golden / RANKS, dst=src, to="megatron", force=True, fsync=False))
    assert (src / "iter_0000005/mp_rank_00_000/model_optim_rng.pt").is_file()


def test_the_source_is_never_replaced_by_its_own_result(golden: Path, src: Path) -> None:
    copy(golden, RANKS, src)
    with pytest.raises(CheckpointingException, match="would remove"):
        run(Job(src=src, dst=src, topology=TopologyChange(tp=1), is_reshard=True, force=True))
    assert (src / "iter_0000010/mp_rank_01_001/model_optim_rng.pt").is_file()


def test_a_parent_that_cannot_be_made_is_a_storage_error(golden: Path) -> None:
    with pytest.raises(StorageError):
        run(Job(src=golden / "torch_dcp/fsdp2_dp2", dst=Path("/proc/absent/out"), to="torch"))


def test_too_little_memory_is_said_before_anything_is_written(golden: Path, tmp_path: Path) -> None:
    job = Job(
        src=golden / "torch_dcp/fsdp2_dp2", dst=tmp_path / "out", to="torch", memory_bytes=1 << 20
    )
    with pytest.raises(CapacityError, match="memory"):
        run(job)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(golden: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: both end in the same errno family, at the same
    calls.
    """
    import resource
    import subprocess
    import sys

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    command = [sys.executable, "-m", "ckpt_cli", "convert", str(golden / "torch_dcp/fsdp2_dp2")]
    done = subprocess.run(
        [*command, str(tmp_path / "out.pt"), "--to", "torch"],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
