"""Any format into any other: sources that other software wrote, results that other software
reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine.catalog.decoded import DecodedStore
from core.errors import CheckpointingException, UnsupportedError
from core.formats.registry import formats
from core.verbs.convert.prepare import prepare
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.run import Job, run
from tests.support.archives import unpacked
from tests.support.covering import covering_cases
from tests.support.local_checkpoint import saved
from tests.support.materialize import tensor_bytes
from tests.support.nemo_archive import nemo_archive
from tests.support.real_readers import READERS, Tensors, of_tensor


def _gold(path: str) -> Callable[[Path, Path], Path]:
    return lambda golden, folder: golden / path


def _flax(golden: Path, folder: Path) -> Path:
    return unpacked("flax", folder / "flax") / "single"


def _zarr3_by_zarr_python(golden: Path, folder: Path) -> Path:
    import zarr

    group = zarr.open_group(folder / "zarr3", mode="w", zarr_format=3)
    values = np.arange(24 * 10, dtype="float32").reshape(24, 10)
    group.create_array("plain", data=values, chunks=(6, 10), compressors=None)
    group.create_array("packed", data=values + 0.5, chunks=(6, 5))
    group.create_array(
        "sharded", data=values - 7, chunks=(3, 10), shards=(12, 10), compressors=None
    )
    group.create_array("layers.0.bias", data=np.arange(7, dtype="int64"))
    return folder / "zarr3"


def _orbax_by_tensorstore(golden: Path, folder: Path) -> Path:
    import ml_dtypes
    import tensorstore as ts

    for key, compressor in (
        ("params.dense.kernel", None),
        ("params.dense.bias", {"id": "zstd", "level": 1}),
    ):
        data = np.arange(64 * 33, dtype="float32").reshape(64, 33).astype(ml_dtypes.bfloat16)
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/orbax/", "path": f"{key}/"},
            "metadata": {"chunks": [32, 33], "compressor": compressor, "dtype": "bfloat16"},
        }
        ts.open(spec, create=True, shape=[64, 33], dtype=ts.bfloat16).result().write(data).result()
    return folder / "orbax"


def _state() -> dict[str, Any]:
    weight = torch.arange(40 * 6, dtype=torch.float32).reshape(40, 6)
    return {
        "model": {"w": weight.to(torch.bfloat16), "b": weight[0] + 0.25, "n": torch.tensor(7)},
        "epoch": 3,
    }


def _dcp_zstd(golden: Path, folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._extension import ZStandard

    writer = dcp.FileSystemWriter(folder / "zstd", _extensions=[ZStandard()])
    dcp.save(_state(), storage_writer=writer, no_dist=True)
    return folder / "zstd"


def _local(golden: Path, folder: Path) -> Path:
    return saved(folder / "local")


def _torch_sharded(golden: Path, folder: Path) -> Path:
    return unpacked("dtensor", folder / "dtensor") / "tp2_fsdp2_dp2"


def _nemo(golden: Path, folder: Path) -> Path:
    return nemo_archive(folder, _state()["model"])


SOURCES: dict[str, Callable[[Path, Path], Path]] = {
    "megatron": _gold("mcore_legacy/dense_gqa/tp2_pp2"),
    "megatron-gelu": _gold("mcore_legacy/dense_gelu/tp1_pp2"),
    "megatron-moe": _gold("mcore_legacy/moe_seq/tp2_pp1_ep2"),
    "torch_dist": _gold("mcore_torch_dist/dense_gqa/tp2_pp2"),
    "torch_dist-0.12": _gold("mcore0121_torch_dist/dense_gqa/tp2_pp2"),
    "torch_dist-moe": _gold("mcore_torch_dist/moe_seq/tp2_pp2_ep2"),
    "zarr": _gold("mcore0121_zarr/dense_gqa/tp2_pp2"),
    "zarr-moe": _gold("mcore0121_zarr/moe_seq/tp2_pp2_ep2"),
    "mcore_local": _local,
    "nemo": _nemo,
    "flax": _flax,
    "dcp": _gold("torch_dcp/fsdp2_dp4"),
    "dcp-tp": _gold("torch_dcp/tp2_fsdp2_dp2"),
    "dcp-zstd": _dcp_zstd,
    "dcp-hf": _gold("torch_dcp/hf_storage_dp2"),
    "torch_sharded": _torch_sharded,
    "torch": _gold("hf/llama/torch_single/nested_zip.pt"),
    "torch-legacy": _gold("hf/llama/torch_single/nested_legacy.pt"),
    "torch_bin": _gold("hf/qwen2_tied/bin_sharded"),
    "safetensors": _gold("hf/llama/safetensors_sharded"),
    "safetensors-one": _gold("hf/qwen2_tied/safetensors_single"),
    "zarr3": _zarr3_by_zarr_python,
    "orbax": _gold("orbax/ocdbt_zarr2"),
    "orbax-raw": _orbax_by_tensorstore,
    "orbax-manager": _gold("orbax/manager"),
    "deepspeed-0": _gold("deepspeed/zero0_dp2_bf16"),
    "deepspeed-1": _gold("deepspeed/zero1_dp2_bf16"),
    "deepspeed-2": _gold("deepspeed/zero2_dp2_fp32"),
    "deepspeed-3": _gold("deepspeed/zero3_dp2_bf16"),
    "universal": _gold("deepspeed_universal/zero1_dp2_bf16"),
}
MEGATRON = {
    name
    for name in SOURCES
    if name.startswith(("megatron", "torch_dist", "zarr")) and name != "zarr3"
}
HUGGING_FACE = {"safetensors", "safetensors-one", "torch_bin"}
TARGETS = [format.name for format in formats() if format.lay_out is not None]


def test_every_format_is_a_source_and_every_writable_one_a_target() -> None:
    assert {format.name for format in formats()} <= {name.partition("-")[0] for name in SOURCES} | {
        "deepspeed_universal"
    }
    assert set(TARGETS) == {*READERS, "megatron"}


def _wanted(prepared: Prepared) -> Tensors:
    """What the destination must hold, found without plan and copy; casts are torch's."""
    wanted: Tensors = {}
    plan, store = prepared.plan, DecodedStore(prepared.source.store)
    for key, meta in plan.target.tensors.items():
        if prepared.job.to == "deepspeed_universal" and key in plan.target.ties:
            continue  # recorded as shared
        stored = plan.match(key).dtype
        source = replace(
            plan.source, tensors={key: replace(plan.source.tensors[key], dtype=stored)}
        )
        tensor = _as_torch(tensor_bytes(source, store, key), stored)
        padded = torch.zeros(meta.shape, dtype=tensor.dtype)
        padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
        wanted[key] = of_tensor(padded.to(getattr(torch, meta.dtype)))
    return wanted


def _as_torch(data: np.ndarray, dtype: str) -> torch.Tensor:
    """Elements as bytes (one more axis than the tensor has) as a tensor."""
    shape = data.shape[:-1]
    if not data.size:
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data.tobytes()), dtype=getattr(torch, dtype)).reshape(shape)


def _job(src: Path, dst: Path, to: str) -> tuple[Job, Tensors | None]:
    """The job that a patient user ends up with, and what it is to write; None for rank files. It
    leaves out what the format says that it cannot hold.
    """
    job = Job(src=src, dst=dst, to=to, fsync=False, verify=True)
    if to == "deepspeed_universal":
        job = replace(job, dtype=((None, "float32"),), optim="drop")
    for _ in range(20):
        try:
            with prepare(job) as prepared:
                return job, None if to == "megatron" else _wanted(prepared)
        except UnsupportedError as err:
            hint = err.hint or "no hint"
            if err.key is None or not any(
                way in hint for way in ("--dtype", "--exclude", "--rename")
            ):
                raise
            exclude = (*job.exclude, err.key)
            job = Job(
                src=src,
                dst=dst,
                to=to,
                fsync=False,
                exclude=exclude,
                dtype=job.dtype,
                optim=job.optim,
            )
    raise AssertionError("the refusals do not end")


def _axes(source: str, target: str) -> dict[str, object]:
    """Return the source, the target, and whether rank files are what it gives."""
    return {
        "source": source,
        "target": target,
        "rank files": target == "megatron" and source in MEGATRON | HUGGING_FACE,
    }


@pytest.mark.parametrize(
    ("source", "target"),
    covering_cases(
        (pytest.param(source, target) for source in SOURCES for target in TARGETS), _axes
    ),
)
def test_any_format_converts_to_any_other_and_other_software_reads_it(
    source: str, target: str, golden: Path, tmp_path: Path
) -> None:
    src = SOURCES[source](golden, tmp_path)
    dst = tmp_path / "out"
    if target == "megatron" and source not in MEGATRON | HUGGING_FACE:
        with pytest.raises(CheckpointingException) as refusal:
            run(Job(src=src, dst=dst, to=target, fsync=False))
        assert refusal.value.exit_code == 4
        assert refusal.value.hint
        assert not dst.exists()
        return
    job, wanted = _job(src, dst, target)
    report = run(job)
    assert report.format == target
    if wanted is None:
        assert sorted(dst.rglob("model_optim_rng.pt"))
        return  # tests/megatron/reshard compares rank files with Megatron's own
    tensors = READERS[target](dst)
    missing = set(wanted) - set(tensors)
    assert not missing, f"{len(missing)} tensors are missing, such as {min(missing)}"
    for key, (dtype, shape, data) in wanted.items():
        assert tensors[key][:2] == (dtype, shape), key
        assert tensors[key][2] == data, f"the bytes of {key} differ"
    assert set(tensors) == set(wanted)


@pytest.mark.parametrize("target", ["torch", "dcp", "safetensors", "zarr3"])
def test_hugging_face_files_stay_with_the_weights_or_are_named_as_left_behind(
    target: str, golden: Path, tmp_path: Path
) -> None:
    src = golden / "hf/llama/safetensors_sharded"
    report = run(Job(src=src, dst=tmp_path / "out", to=target, fsync=False))
    names = [path.name for path in src.iterdir() if path.name == "config.json"]
    assert names
    if target == "safetensors":
        for name in names:
            assert (tmp_path / "out" / name).read_bytes() == (src / name).read_bytes()
    else:
        assert any("config.json" in text for text in report.dropped)


def test_a_round_through_every_format_gives_the_first_tensors(golden: Path, tmp_path: Path) -> None:
    src = golden / "hf/llama/safetensors_single"
    first = READERS["safetensors"](src)
    at = src
    for number, target in enumerate(["torch", "dcp", "zarr3", "torch_dist", "zarr", "safetensors"]):
        dst = tmp_path / f"{number}-{target}"
        run(Job(src=at, dst=dst, to=target, fsync=False, names=None))
        at = dst
    assert READERS["safetensors"](at) == first


def test_two_conversions_write_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    for target in TARGETS:
        if target in ("megatron", "deepspeed_universal"):
            continue
        written = []
        for number in range(2):
            dst = tmp_path / f"{target}-{number}"
            run(Job(src=golden / "torch_dcp/tp2_only", dst=dst, to=target, fsync=False))
            written.append(
                {p.relative_to(dst): p.read_bytes() for p in sorted(dst.rglob("*")) if p.is_file()}
            )
        shutil.rmtree(dst)
        assert written[0] == written[1]
        for path, data in written[0].items():
            if path.suffix == ".json":
                json.loads(data)
