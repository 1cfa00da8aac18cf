"""One model has one fingerprint per tensor, in every format and layout that other software or this
toolkit wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.engine.fingerprint.definition import Fingerprint
from core.files.store import LocalStore
from core.megatron.rules.tables import load_rules
from core.opening.canonical import canonical
from core.opening.open import open_checkpoint
from core.progress import bytes_only
from core.publish.manifest.fingerprint_read import read_fingerprints
from core.publish.manifest.inventory import Inventory, read_inventory
from core.publish.manifest.of_copy import read_manifest
from core.verbs.checks.comparison import read_reference
from core.verbs.convert.run import Job, TopologyChange, run

MODELS: dict[str, tuple[str, ...]] = {
    "dense_gqa": (
        "mcore_legacy/dense_gqa/tp1_pp2_vpp2",
        "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
        "mcore_legacy/dense_gqa/tp4_pp1_optim",
        "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
        "mcore_torch_dist/dense_gqa/tp4_pp1",
        "mcore0161_torch_dist/dense_gqa/tp2_pp2_vpp2",
        "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dp_zero_gather_scatter",
        "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
    ),
    "dense_gelu": (
        "mcore_legacy/dense_gelu/tp1_pp1",
        "mcore_legacy/dense_gelu/tp2_pp2",
        "mcore_torch_dist/dense_gelu/tp2_pp2",
        "mcore0121_torch_dist/dense_gelu/tp2_pp2",
    ),
    "moe": (
        "mcore_legacy/moe_seq/tp1_pp1",
        "mcore_legacy/moe_seq/tp1_pp1_ep4",
        "mcore_legacy/moe_seq/tp2_pp1_ep2_etp1",
        "mcore_torch_dist/moe_seq/tp2_pp2_ep2",
        "mcore0121_zarr/moe_seq/tp2_pp2_ep2",
        "mcore0121_legacy/moe_grouped/tp2_pp1_ep2",
    ),
    "fsdp": ("torch_dcp/fsdp2_dp2", "torch_dcp/fsdp2_dp4", "torch_dcp/tp2_fsdp2_dp2"),
    "llama": (
        "hf/llama/safetensors_sharded",
        "hf/llama/safetensors_single",
        "hf/llama/bin_sharded",
        "hf/llama/torch_single/model_zip.pt",
        "hf/llama/torch_single/model_legacy.pt",
    ),
}


def fingerprints(path: Path) -> dict[str, Fingerprint]:
    """By reading through the engine."""
    opened = open_checkpoint(path)
    try:
        form = canonical(opened, rules=load_rules(None))
        return read_fingerprints(form.catalog, opened.store, threads=2)
    finally:
        opened.store.close()


def make_inventory(path: Path) -> Inventory:
    """What ``ckpt manifest`` would write."""
    return read_inventory(path, threads=2)


@pytest.mark.parametrize("model", MODELS)
def test_all_layouts_and_formats_of_a_model_have_equal_fingerprints(
    golden: Path, model: str, request: pytest.FixtureRequest
) -> None:
    cases_by_key: dict[str, dict[Fingerprint, str]] = {}
    step = 1 if request.config.getoption("--long") else 2
    for case in MODELS[model][::step]:
        stated = make_inventory(golden / case).fingerprints
        assert stated == fingerprints(golden / case), (
            f"{case}: passing by and reading through the engine differ"
        )
        for key, fingerprint in (stated or {}).items():
            cases_by_key.setdefault(key, {}).setdefault(fingerprint, case)
    assert {key: cases for key, cases in cases_by_key.items() if len(cases) > 1} == {}
    texts = [
        item.text
        for by_fingerprint in cases_by_key.values()
        for item in by_fingerprint
        if any(item.shape)
    ]
    distinct = {text for text in texts if set(text) != {"0"}}
    assert len(distinct) > len(texts) // 2, "the tensors of the model can be told apart"
    if model == "dense_gqa":
        assert sum(key.startswith("optimizer.state.") for key in cases_by_key) == 93, (
            "states of the optimizer are there too"
        )


TARGETS = ("dcp", "torch", "safetensors", "zarr", "zarr3", "megatron", "torch_dist")
SOURCES: Mapping[str, tuple[str, ...]] = {
    "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt": ("dcp", "torch_dist"),
    "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable": ("megatron", "zarr"),
    "mcore_legacy/dense_gelu/tp2_pp2": TARGETS,
    "mcore_legacy/moe_seq/tp2_pp1_ep2": ("megatron", "torch_dist"),
    "torch_dcp/fsdp2_dp4": ("safetensors", "dcp"),
    "hf/llama/safetensors_sharded": ("torch", "zarr3"),
    "deepspeed/zero2_dp2_bf16": ("dcp", "torch"),
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("source", "to"), [(source, to) for source, targets in SOURCES.items() for to in targets]
)
def test_fingerprints_of_a_copy_are_those_of_its_source_and_of_reading_it_back(
    golden: Path, tmp_path: Path, source: str, to: str
) -> None:
    topology = TopologyChange(tp=4, pp=2) if to in ("megatron", "torch_dist") else None
    job = Job(
        src=golden / source,
        dst=tmp_path / "out",
        to=to,
        topology=topology,
        fingerprint=True,
        fsync=False,
    )
    report = run(job)
    manifest = read_manifest(LocalStore(tmp_path / "out"))
    assert manifest.scheme == "fp1" and report.n_fingerprints == len(manifest.fingerprints)
    assert report.n_read_back == 0, "everything was seen in the pass"
    assert manifest.fingerprints == fingerprints(tmp_path / "out") == fingerprints(golden / source)


def test_a_single_file_has_its_fingerprints_beside_it(golden: Path, tmp_path: Path) -> None:
    job = Job(
        src=golden / "hf/llama/safetensors_sharded",
        dst=tmp_path / "m.pt",
        to="torch",
        fingerprint=True,
    )
    run(job)
    manifest = read_manifest(LocalStore(tmp_path), "m.pt.ckpt-manifest.json")
    assert manifest.fingerprints == fingerprints(tmp_path / "m.pt")
    assert (
        read_reference(tmp_path / "m.pt.ckpt-manifest.json", rules=load_rules(None)).fingerprints
        == manifest.fingerprints
    )


def test_a_cast_gives_the_fingerprints_of_what_is_written(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    run(
        Job(
            src=source, dst=tmp_path / "out", to="dcp", dtype=((None, "float32"),), fingerprint=True
        )
    )
    manifest = read_manifest(LocalStore(tmp_path / "out"))
    expected = fingerprints(tmp_path / "out")
    assert manifest.fingerprints == expected
    before = fingerprints(source)
    assert all(expected[key].dtype == "float32" and expected[key] != before[key] for key in before)


def test_what_cannot_be_seen_in_the_pass_is_read_back(golden: Path, tmp_path: Path) -> None:
    """Hard links move no byte, so nothing passes by."""
    source = tmp_path / "source"
    run(Job(src=golden / "torch_dcp/fsdp2_dp2", dst=source, to="dcp"))
    report = run(
        Job(src=source, dst=tmp_path / "out", to="dcp", metadata_only=True, fingerprint=True)
    )
    assert report.n_read_back == report.n_fingerprints > 0
    assert read_manifest(LocalStore(tmp_path / "out")).fingerprints == fingerprints(
        golden / "torch_dcp/fsdp2_dp2"
    )


def test_a_resumed_copy_has_the_same_manifest(golden: Path, tmp_path: Path) -> None:
    """What an earlier run had written does not pass by again."""
    from core.errors import CheckpointingException, StorageError

    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    uninterrupted = Job(src=source, dst=tmp_path / "whole", to="dcp", fingerprint=True)
    run(uninterrupted)

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise StorageError("made to fail")

    job = Job(src=source, dst=tmp_path / "out", to="dcp", fingerprint=True, resume=True, threads=1)
    with pytest.raises(CheckpointingException, match="made to fail"):
        run(job, progress=bytes_only(fail))
    report = run(job)
    assert report.bytes_resumed > 0 and report.n_read_back > 0
    manifests = [(tmp_path / name / "ckpt-manifest.json").read_bytes() for name in ("whole", "out")]
    assert manifests[0] == manifests[1]


def test_noise_in_padding_rows_does_not_matter(golden: Path, tmp_path: Path) -> None:
    """Rows that only pad the vocabulary belong to no tensor."""
    source = golden / "mcore_legacy/dense_gqa/tp4_pp1"
    noisy = tmp_path / "noisy"
    shutil.copytree(source, noisy)
    opened = open_checkpoint(source)
    catalog = opened.catalog
    last = next(
        key for key in catalog.tensors if key.startswith("mp_rank_03") and "word_embeddings" in key
    )
    array = catalog.fragments(last)[0].array
    assert array is not None and array.shape == (128, 64)
    opened.store.close()
    file = noisy / "iter_0000010" / array.extent.file
    data = bytearray(file.read_bytes())
    end = array.extent.offset + array.n_bytes
    assert not any(data[end - 128 : end]), "the last row pads"
    data[end - 128 : end] = bytes(range(128))
    file.write_bytes(data)
    assert fingerprints(noisy) == fingerprints(source)
