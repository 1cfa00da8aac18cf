"""Training scripts read checkpoints from object stores, and save into them, as into directories."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from core.arrays.checksum import crc32
from core.dist_checkpointing import (
    ShardedObject,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from core.dist_checkpointing._background.caller import InThread
from core.dist_checkpointing._directory.bucket_publication import BucketPublication
from core.dist_checkpointing._live.upload import upload_files
from core.dist_checkpointing.core import CheckpointingConfig
from core.dist_checkpointing.serialization import load_sharded_metadata
from core.dist_checkpointing.storage_reader import CkptStorageReader
from core.dist_checkpointing.storage_writer import CkptStorageWriter
from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import PlannedArray
from core.errors import CheckpointingException, CorruptError, StorageError, UsageError
from core.files.remote_path import location_of
from tests.dist_checkpointing.ranks import run_ranks
from tests.support.object_stores import s3_server, upload

TORCH_DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"
ZARR = "mcore0121_zarr/dense_gqa/tp2_pp2"
FSDP = "torch_dcp/fsdp2_dp2"


@pytest.fixture(scope="module")
def s3(golden: Path) -> Iterator[Any]:
    """Returns a client of moto's S3, whose bucket ``runs`` holds three checkpoints."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="runs")
        for name in (TORCH_DIST, ZARR, FSDP):
            upload(client, golden / name, "runs", name)
        yield client


def store_environment() -> dict[str, str]:
    """The settings of the store, which ranks do not inherit from the server that forks them."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def iteration_of(folder: Path) -> str:
    """The directory below a training root, as a suffix of its path."""
    inner = sorted(folder.glob("iter_*"))
    return f"/{inner[0].name}" if inner else ""


def assert_same(a: Any, b: Any) -> None:
    """Raises unless two trees are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)


@pytest.mark.parametrize("name", [TORCH_DIST, ZARR])
def test_the_functions_for_loading_take_a_url_for_a_directory(
    s3: Any, golden: Path, name: str
) -> None:
    inner = name + iteration_of(golden / name)
    folder, url = golden / inner, f"s3://runs/{inner}"
    assert check_is_distributed_checkpoint(url)
    assert check_is_distributed_checkpoint(location_of(url))
    assert check_is_distributed_checkpoint(Path(url))
    assert not check_is_distributed_checkpoint("s3://runs/missing")
    for function in (
        load_common_state_dict,
        load_content_metadata,
        load_plain_tensors,
        load_tensors_metadata,
        load_sharded_metadata,
    ):
        assert_same(function(url), function(folder))
    request = load_tensors_metadata(folder)
    assert_same(load(request, url), load(load_tensors_metadata(folder), folder))


def test_the_metadata_of_a_loaded_url_is_read_on_demand(s3: Any, golden: Path) -> None:
    inner = TORCH_DIST + iteration_of(golden / TORCH_DIST)
    strategy = TorchDistLoadShardedStrategy()
    load(load_tensors_metadata(f"s3://runs/{inner}"), f"s3://runs/{inner}", strategy)
    assert strategy.cached_global_metadata is not None


def _load_share(rank: int, world: int, env: dict[str, str], path: str) -> dict[str, bytes]:
    os.environ.update(env)
    metadata = CkptStorageReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    share = dict(sorted(tensors.items())[rank::world])
    dcp.load(share, storage_reader=CkptStorageReader(path))
    return {key: bytes_of(tensor) for key, tensor in share.items()}


def test_ranks_load_their_parts_from_a_url_with_torch(s3: Any, golden: Path) -> None:
    shares = run_ranks(2, _load_share, store_environment(), f"s3://runs/{FSDP}")
    assert all(shares)
    assert shares == run_ranks(2, _load_share, {}, str(golden / FSDP))


def test_a_bucket_that_does_not_exist_is_named(s3: Any) -> None:
    with pytest.raises(StorageError, match="no such bucket: nowhere"):
        load_common_state_dict("s3://nowhere/ckpt")
    with pytest.raises(UsageError, match="s3://runs/missing does not exist"):
        load_common_state_dict("s3://runs/missing")


def test_tensors_of_a_url_are_not_removed(s3: Any, golden: Path) -> None:
    with pytest.raises(UsageError, match="local path"):
        remove_sharded_tensors(f"s3://runs/{TORCH_DIST}", "decoder.")


def sharded(rank: int, world: int) -> dict[str, Any]:
    """A rank's part of two tensors, an object, and common state."""
    rows = torch.arange(6 * 5, dtype=torch.float32).reshape(6, 5)
    part = rows.chunk(world)[rank].contiguous()
    full = torch.arange(7, dtype=torch.int64) * 3
    return {
        "w": ShardedTensor.from_rank_offsets("w", part, (0, rank, world)),
        "t": ShardedTensor.from_rank_offsets("t", part.t(), (1, rank, world)),
        "whole": ShardedTensor.from_rank_offsets("whole", full, replica_id=rank),
        "rng": ShardedObject("rng", {"seed": rank}, (world,), (rank,)),
        "step": 17,
    }


def _save(rank: int, world: int, env: dict[str, str], path: str, options: dict[str, Any]) -> None:
    os.environ.update(env)
    save(sharded(rank, world), path, **options)


def downloaded(client: Any, prefix: str, folder: Path) -> Path:
    """Copies the objects below a prefix to a directory."""
    for name, data in objects_of(client, prefix).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def objects_of(client: Any, prefix: str) -> dict[str, bytes]:
    listing = client.list_objects_v2(Bucket="runs", Prefix=prefix + "/").get("Contents", [])
    return {
        entry["Key"].removeprefix(prefix + "/"): client.get_object(Bucket="runs", Key=entry["Key"])[
            "Body"
        ].read()
        for entry in listing
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.parametrize("manifest", [False, True])
def test_ranks_save_to_a_url_what_they_save_to_a_directory(
    s3: Any, tmp_path: Path, backend: str, manifest: bool
) -> None:
    prefix, options = f"saved/{backend}{manifest}", {"manifest": manifest}
    options["sharded_strategy"] = (backend, 1)
    (tmp_path / "local").mkdir()
    run_ranks(2, _save, store_environment(), f"s3://runs/{prefix}", options)
    run_ranks(2, _save, {}, str(tmp_path / "local"), options)
    stored, local = objects_of(s3, prefix), contents(tmp_path / "local")
    assert stored == local
    assert not s3.list_multipart_uploads(Bucket="runs").get("Uploads")


def test_torch_reads_what_was_saved_to_a_url(s3: Any, tmp_path: Path) -> None:
    save(sharded(0, 1), "s3://runs/saved/one")
    state = {"w": torch.zeros(6, 5), "t": torch.zeros(5, 6), "whole": torch.zeros(7).long()}
    dcp.load(state, checkpoint_id=downloaded(s3, "saved/one", tmp_path), no_dist=True)
    assert_same(state, {key: item.data for key, item in sharded(0, 1).items() if key in state})


def _save_with_failure(rank: int, world: int, env: dict[str, str], path: str) -> str:
    os.environ.update(env)
    state = sharded(rank, world)
    if rank == 1:
        state["w"].data = torch.empty(3, 5, device="meta")  # found out when its bytes are read
    try:
        save(state, path)
    except CheckpointingException as err:
        return str(err)
    return ""


def test_a_save_that_fails_on_one_rank_leaves_no_objects(s3: Any) -> None:
    errors = run_ranks(2, _save_with_failure, store_environment(), "s3://runs/saved/failed")
    assert "rank 1 failed" in errors[0] and "meta tensor" in errors[1]
    assert objects_of(s3, "saved/failed") == {}
    assert not s3.list_multipart_uploads(Bucket="runs").get("Uploads")


def test_an_interrupted_upload_is_aborted_and_finished_objects_are_deleted(s3: Any) -> None:
    arrays = [
        PlannedArray(name, "uint8", (n_bytes,)) for name, n_bytes in (("a", 9), ("b", 20 << 20))
    ]
    images = [FileImage(f"{a.name}.bin", a.n_bytes, [PlacedArray(0, a)]) for a in arrays]
    n_calls = 0

    def pieces_of(array: PlannedArray) -> Iterator[bytes]:
        nonlocal n_calls
        n_calls += 1
        for number in range(0, array.n_bytes, 5 << 20):
            if n_calls == 4 and number > 10 << 20:  # the second pass over the second file
                raise CorruptError("the memory is damaged")
            yield bytes(min(5 << 20, array.n_bytes - number))

    root = location_of("s3://runs/saved/interrupted")
    with pytest.raises(CorruptError, match="damaged"):
        upload_files(root, images, pieces_of, threads=1)
    assert objects_of(s3, "saved/interrupted") == {}
    assert not s3.list_multipart_uploads(Bucket="runs").get("Uploads")
    n_calls = 10
    uploaded = upload_files(root, images, pieces_of, threads=2)
    stored = objects_of(s3, "saved/interrupted")
    assert {file.path: file.crc for file in uploaded.files} == {
        name: crc32(data) for name, data in stored.items()
    }
    assert len(stored["b.bin"]) == 20 << 20


def test_objects_are_replaced_only_on_request_and_others_stay(s3: Any) -> None:
    url = "s3://runs/saved/again"
    s3.put_object(Bucket="runs", Key="saved/again/notes.txt", Body=b"mine")
    with pytest.raises(UsageError, match="already contains objects"):
        save(sharded(0, 1), url)
    assert list(objects_of(s3, "saved/again")) == ["notes.txt"]
    save(sharded(0, 1), url, overwrite=True)
    before = objects_of(s3, "saved/again")
    with pytest.raises(UsageError, match="already contains a checkpoint"):
        save(sharded(0, 1), url)
    assert objects_of(s3, "saved/again") == before
    s3.put_object(Bucket="runs", Key="saved/again/__7_0.distcp", Body=b"old")
    save(sharded(0, 1) | {"step": 18}, url, overwrite=True)
    after = objects_of(s3, "saved/again")
    assert after.keys() == before.keys() and after["notes.txt"] == b"mine"
    assert load_common_state_dict(url)["step"] == 18


def test_a_second_save_to_the_same_url_is_refused(s3: Any) -> None:
    root = location_of("s3://runs/saved/twice")
    first = BucketPublication(root)
    with pytest.raises(StorageError, match="another save to this URL"):
        save(sharded(0, 1), str(root))
    # What an interrupted save left is deleted on request; that save then cannot be published.
    save(sharded(0, 1), str(root), overwrite=True)
    with pytest.raises(StorageError, match="another save to the URL began"):
        first.publish(CheckpointingConfig("torch_dist"))
    assert check_is_distributed_checkpoint(root) and "common.pt" in objects_of(s3, "saved/twice")


def test_a_web_server_cannot_be_saved_to() -> None:
    with pytest.raises(UsageError, match="ckpt cannot write to a web server"):
        save(sharded(0, 1), "https://example.invalid/ckpt")
    with pytest.raises(UsageError, match="must not contain a query") as refusal:
        save(sharded(0, 1), "https://example.invalid/ckpt?signature=secret")
    assert "secret" not in str(refusal.value)


def _save_shared_chunk(rank: int, world: int, env: dict[str, str], path: str) -> str:
    os.environ.update(env)
    flat = (slice(0, 3), slice(3, 8))[rank]
    part = torch.arange(8, dtype=torch.float32)[flat]
    tensor = ShardedTensor("w", part, part.dtype, (8,), (8,), (0,), (1,), flattened_range=flat)
    try:
        save({"w": tensor}, path, ("zarr", 1), validate_access_integrity=False)
    except CheckpointingException as err:
        return f"{err.message} {err.hint}"
    return ""


def test_a_chunk_of_several_ranks_is_refused_before_anything_is_written(s3: Any) -> None:
    errors = run_ranks(2, _save_shared_chunk, store_environment(), "s3://runs/saved/shared")
    assert all("several ranks hold parts" in error and "torch_dist" in error for error in errors)
    assert objects_of(s3, "saved/shared") == {}


def _save_in_background(
    rank: int, world: int, env: dict[str, str], path: str, persistent: bool, fails: bool
) -> tuple[list[int], str]:
    os.environ.update(env)
    queue = AsyncCallsQueue(persistent=persistent)
    state = sharded(rank, world)
    request = save(state, path, async_sharded_save=True)
    assert request is not None and request.async_fn is not None
    if fails and rank == 1:
        request = request._replace(async_fn=InThread(_fail))
    number = queue.schedule_async_request(request)
    state["w"].data.zero_()
    try:
        return [number, *queue.maybe_finalize_async_calls(blocking=True)], ""
    except CheckpointingException as err:
        return [number], str(err)
    finally:
        queue.close()


def _fail(*args: Any) -> None:
    raise CorruptError("the disk of this rank is gone")


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_asynchronous_saves_upload_what_the_tensors_were(s3: Any, persistent: bool) -> None:
    prefix = f"saved/async{persistent}"
    run_ranks(2, _save, store_environment(), f"s3://runs/{prefix}-sync", {})
    outcome = run_ranks(
        2, _save_in_background, store_environment(), f"s3://runs/{prefix}", persistent, False
    )
    assert outcome == [([0, 0], ""), ([0, 0], "")]
    assert objects_of(s3, prefix) == objects_of(s3, f"{prefix}-sync")


def test_an_asynchronous_save_that_fails_leaves_no_objects(s3: Any) -> None:
    url = "s3://runs/saved/async-failed"
    outcome = run_ranks(2, _save_in_background, store_environment(), url, False, True)
    assert all("disk of this rank is gone" in error for _, error in outcome)
    assert objects_of(s3, "saved/async-failed") == {}


def _plain_state() -> dict[str, Any]:
    return {
        "w": torch.arange(24, dtype=torch.float32).reshape(4, 6),
        "part": torch.arange(30, dtype=torch.int32).reshape(5, 6)[1:4, ::2],
        "half": torch.arange(8).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "nested": {"epoch": 3, "names": ["a", "b"]},
    }


def _dcp_save(rank: int, world: int, env: dict[str, str], path: str, options: Any) -> str:
    os.environ.update(env)
    state = _plain_state()
    mesh = init_device_mesh("cpu", (world,))
    state["w"] = distribute_tensor(state["w"], mesh, [Shard(0)])
    if options.get("manifest"):
        del state["empty"]  # a directory's file with it is read back, which gives it a digest
    planner = _FailingPlanner() if options.pop("fails", False) and rank == 1 else None
    try:
        dcp.save(state, storage_writer=CkptStorageWriter(path, **options), planner=planner)
    except CheckpointException as err:
        text = str(err)
    else:
        return ""
    gc.collect()  # what was uploaded is deleted with the writer
    return text


class _FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise CorruptError("the memory of this rank is gone")


@pytest.mark.each_value
@pytest.mark.parametrize("format", ["dcp", "torch_dist"])
@pytest.mark.parametrize("manifest", [False, True])
def test_torch_saves_to_a_url_what_it_saves_to_a_directory(
    s3: Any, tmp_path: Path, format: str, manifest: bool
) -> None:
    prefix, options = f"saved/dcp-{format}{manifest}", {"format": format, "manifest": manifest}
    run_ranks(2, _dcp_save, store_environment(), f"s3://runs/{prefix}", options)
    run_ranks(2, _dcp_save, {}, str(tmp_path / "local"), options)
    assert objects_of(s3, prefix) == contents(tmp_path / "local")
    if format == "dcp" and not manifest:
        state = {
            key: torch.zeros_like(value)
            for key, value in _plain_state().items()
            if isinstance(value, torch.Tensor)
        }
        dcp.load(state, checkpoint_id=downloaded(s3, prefix, tmp_path / "copy"), no_dist=True)
        assert_same(state, {key: _plain_state()[key] for key in state})


def test_entries_that_hold_tensors_are_saved_to_a_url(s3: Any, tmp_path: Path) -> None:
    state = {"weight": torch.ones(6, 4), "random": (torch.arange(3), "cpu")}
    url = "s3://runs/saved/hidden-tensors"
    for path in (url, tmp_path / "local"):
        dcp.save(state, storage_writer=CkptStorageWriter(path, format="torch_dist"), no_dist=True)
    objects, files = objects_of(s3, "saved/hidden-tensors"), contents(tmp_path / "local")
    assert objects == files and "common.pt" in files


def test_a_dcp_save_that_fails_on_one_rank_leaves_no_objects(s3: Any) -> None:
    url, options = "s3://runs/saved/dcp-failed", {"fails": True}
    errors = run_ranks(2, _dcp_save, store_environment(), url, options)
    assert all("memory of this rank is gone" in error for error in errors)
    assert objects_of(s3, "saved/dcp-failed") == {}


def _dcp_async_save(rank: int, world: int, env: dict[str, str], path: str) -> bool:
    os.environ.update(env)
    state = _plain_state()
    future = dcp.async_save(state, storage_writer=CkptStorageWriter(path))
    state["w"].zero_()
    future.result()
    return True


def test_torch_saves_to_a_url_in_the_background(s3: Any) -> None:
    outcome = run_ranks(2, _dcp_async_save, store_environment(), "s3://runs/saved/dcp-async")
    assert outcome == [True, True]
    state = {"w": torch.zeros(4, 6)}
    dcp.load(state, storage_reader=CkptStorageReader("s3://runs/saved/dcp-async"), no_dist=True)
    assert torch.equal(state["w"], _plain_state()["w"])


def test_formats_whose_files_ranks_share_are_refused_for_urls(s3: Any) -> None:
    for options in ({"format": "safetensors"}, {"format": "megatron"}, {"dtype": "bfloat16"}):
        writer = CkptStorageWriter("s3://runs/saved/refused", **options)
        with pytest.raises(CheckpointException, match="ckpt convert"):
            dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert objects_of(s3, "saved/refused") == {}


def test_an_existing_dcp_checkpoint_is_replaced_only_on_request(s3: Any) -> None:
    url = "s3://runs/saved/dcp-again"
    for overwrite in (False, True):
        dcp.save(
            {"w": torch.full((3,), float(overwrite))},
            storage_writer=CkptStorageWriter(url, overwrite=overwrite),
            no_dist=True,
        )
        with pytest.raises(CheckpointException, match="already contains objects"):
            dcp.save({"w": torch.ones(3)}, storage_writer=CkptStorageWriter(url), no_dist=True)
        state = {"w": torch.zeros(3)}
        dcp.load(state, storage_reader=CkptStorageReader(url), no_dist=True)
        assert state["w"].tolist() == [float(overwrite)] * 3
