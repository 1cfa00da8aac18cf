"""``--deep`` on damaged copies of checkpoints that other software wrote: every flipped bit that a
checksum covers.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import StoredArray
from core.errors import CheckpointingException
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.open import Checkpoint, open_checkpoint
from core.publish.manifest.inventory import read_inventory, write_inventory
from core.publish.manifest.stated_crcs import StatedCrcReader
from core.verbs.checks.check import Finding, Level, Severity
from core.verbs.validate.run import validate
from tests.support.rounds import rounds


def deep(path: Path) -> tuple[Finding, ...]:
    return validate(path, level=Level.DEEP, threads=2).findings


def errors(path: Path) -> list[Finding]:
    return [finding for finding in deep(path) if finding.severity == Severity.ERROR]


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Copied:
    return Copied(golden, tmp_path)


class Copied:
    """Makes writable copies of golden checkpoints."""

    def __init__(self, golden: Path, folder: Path) -> None:
        self._golden = golden
        self._folder = folder

    def __call__(self, name: str) -> Path:
        source, target = self._golden / name, self._folder / Path(name).name
        if source.is_file():
            shutil.copyfile(source, target)
        else:
            shutil.copytree(source, target, copy_function=shutil.copyfile)
        for path in [target, *target.rglob("*")] if target.is_dir() else [target]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        return target


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


CHECKED = (
    pytest.param("mcore_legacy/dense_gelu/tp2_pp2", marks=pytest.mark.long),
    "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
    pytest.param("mcore_torch_dist/dense_gqa/tp2_pp2", marks=pytest.mark.long),
    pytest.param("mcore0121_torch_dist/dense_gelu/tp2_pp2", marks=pytest.mark.long),
    "mcore0121_zarr/dense_gqa/tp2_pp2",
    "torch_dcp/fsdp2_dp2",
    "hf/llama/bin_sharded",
    "hf/llama/torch_single/nested_zip.pt",
    "deepspeed/zero2_dp2_bf16",
    "deepspeed_universal/zero1_dp2_bf16",
)
"""Checkpoints with torch zips; of the zarr one, ``common.pt`` and what else lies beside the
arrays.
"""


@pytest.mark.parametrize("name", CHECKED)
def test_a_flipped_bit_in_any_kind_of_record_is_found(copied: Copied, name: str) -> None:
    path = copied(name)
    opened = open_checkpoint(path)
    stated = StatedCrcReader(opened.store, opened.format.name)
    kinds: set[tuple[str, str]] = set()
    most = rounds(40)
    tried = n_named = 0
    for file in sorted(validated_files(opened)):
        for record in stated(file, opened.store.size(file), report=fail):
            kind = (
                "".join(c for c in file if not c.isdigit()),
                "".join(c for c in record.name if not c.isdigit()),
            )
            if kind in kinds or tried >= most:
                continue
            kinds.add(kind)
            tried += 1
            at = (record.start + record.stop) // 2
            flip(opened.store.root / file, at, bit=tried % 8)
            findings = [finding for finding in errors(path) if finding.file == file]
            flip(opened.store.root / file, at, bit=tried % 8)
            assert findings, (file, record)
            if record.name.startswith("record data/"):
                wrong = next(finding for finding in findings if finding.code == "CK701")
                assert (
                    wrong.span == (record.start, record.stop)
                    and wrong.expected == f"CRC-32 {record.crc:08x}"
                )
                n_named += wrong.key is not None
    opened.store.close()
    assert (
        tried >= 2
        and (n_named or not name.startswith(("mcore_", "torch_dcp")))
        and errors(path) == []
    )


def fail(error: CheckpointingException) -> None:
    raise error


def validated_files(opened: Checkpoint) -> list[str]:
    root = opened.store.root
    if opened.store.entry is not None:
        return [opened.store.entry]
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def test_every_byte_of_a_torch_file_is_covered_or_means_nothing(tmp_path: Path) -> None:
    """What is not found leaves all that torch loads as it was: padding, times, attributes of the
    entries.
    """
    file = tmp_path / "model.pt"
    state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
    torch.save(state, file)
    data = file.read_bytes()
    n_harmless = n_tried = 0
    for at in range(0, len(data), 13):
        flip(file, at, bit=at % 8)
        n_tried += 1
        if not errors(file):
            loaded = torch.load(file, weights_only=True)
            assert loaded["step"] == 3 and torch.equal(loaded["w"], state["w"]), at
            n_harmless += 1
        file.write_bytes(data)
    assert n_harmless < n_tried * 2 // 3


def test_metadata_that_cannot_be_read_leaves_the_files_to_be_checked(copied: Copied) -> None:
    path = copied("mcore_legacy/dense_gqa/tp2_pp2")
    files = sorted(path.rglob("*.pt"))
    flip(files[0], files[0].read_bytes().index(b"data.pkl") + 64, bit=7)
    size = files[-1].stat().st_size
    flip(files[-1], size // 2)
    names = {finding.file for finding in errors(path)}
    assert {
        files[0].parent.name + "/" + files[0].name,
        files[-1].parent.name + "/" + files[-1].name,
    } <= names


@pytest.mark.parametrize(
    "name",
    [
        "hf/llama/safetensors_sharded",
        "hf/llama/torch_single/model_legacy.pt",
        "mcore0121_zarr/dense_gqa/tp2_pp2",
        "torch_dcp/hf_storage_dp2",
    ],
)
def test_what_has_no_checksum_is_said(golden: Path, name: str) -> None:
    (note,) = [finding for finding in deep(golden / name) if finding.code == "CK704"]
    assert note.severity == Severity.NOTE and "ckpt manifest" in (note.hint or "")


def test_a_manifest_is_a_checksum_and_tells_a_flipped_bit(copied: Copied) -> None:
    path = copied("hf/llama/safetensors_single")
    write_inventory(read_inventory(path))
    assert not [finding for finding in deep(path) if finding.code == "CK704"]
    file = path / "model.safetensors"
    flip(file, file.stat().st_size - 77, bit=2)
    assert any(finding.file == file.name for finding in errors(path))


def test_nothing_is_said_of_a_whole_checkpoint_with_checksums(golden: Path) -> None:
    for name in (
        "mcore_legacy/dense_gqa/tp4_pp1_optim",
        "torch_dcp/fsdp2_dp2",
        "hf/llama/bin_sharded",
    ):
        assert [finding for finding in deep(golden / name) if finding.code.startswith("CK7")] == []


CODECS = {
    "crc32c": (
        [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        True,
    ),
    "gzip": ([{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip"}], True),
    "zstd+crc32c": (
        [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd"},
            {"name": "crc32c"},
        ],
        True,
    ),
    "plain": ([{"name": "bytes", "configuration": {"endian": "little"}}], False),
}


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_of_a_zarr_chunk_is_found_where_its_codec_has_a_checksum(
    tmp_path: Path, codec: str
) -> None:
    import tensorstore

    codecs, is_checked = CODECS[codec]
    metadata = {
        "shape": [30, 40],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10, 40]}},
        "codecs": codecs,
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(tmp_path / "out" / "w")},
        "metadata": metadata,
    }
    array = tensorstore.open(spec, create=True).result()
    array.write(np.random.default_rng(1).standard_normal((30, 40), dtype=np.float32)).result()
    (tmp_path / "out" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    path = tmp_path / "out"
    assert errors(path) == []
    assert any(finding.code == "CK704" for finding in deep(path)) is not is_checked
    chunk = path / "w" / "c" / "1" / "0"
    size = chunk.stat().st_size
    for at in (size // 5, size // 2, size - 3):
        flip(chunk, at, bit=5)
        findings = errors(path)
        flip(chunk, at, bit=5)
        assert bool(findings) is is_checked
        if findings:
            assert {(finding.code, finding.file, finding.key) for finding in findings} == {
                ("CK702", "w/c/1/0", "w")
            }


def test_nan_and_infinities_are_counted_in_the_global_tensor(copied: Copied) -> None:
    """A row-parallel weight of a model on two ranks; NaN on the second one, infinity on both."""
    path = copied("mcore_legacy/dense_gqa/tp2_pp1")
    key = "decoder.layers.2.self_attention.linear_proj.weight"
    put(path, key, (5, 3), b"\x80\x7f")
    put(path, key, (40, 50), b"\xc0\xff")
    put(path, key, (40, 51), b"\xc1\x7f")
    put(path, key, (63, 63), b"\x80\xff")
    by_code = {
        finding.code: finding for finding in deep(path) if finding.code in ("CK710", "CK711")
    }
    assert set(by_code) == {"CK710", "CK711"} and {finding.key for finding in by_code.values()} == {
        key
    }
    assert (
        "2 of 4096 elements" in by_code["CK710"].message and "(40, 50)" in by_code["CK710"].message
    )
    assert by_code["CK710"].rank and by_code["CK710"].rank.endswith("mp_rank_01")
    assert "2 of 4096 elements" in by_code["CK711"].message and "(5, 3)" in by_code["CK711"].message


@pytest.mark.parametrize("name", ["torch_dcp/tp2_only", "mcore_torch_dist/dense_gqa/tp2_pp2"])
def test_nan_in_a_chunk_has_its_index_in_the_tensor(copied: Copied, name: str) -> None:
    path = copied(name)
    opened = open_checkpoint(path)
    key = next(key for key, tensor in opened.catalog.tensors.items() if len(tensor.fragments()) > 1)
    meta = opened.catalog.tensors[key]
    opened.store.close()
    index = tuple(n - 1 for n in meta.shape)
    nan = {"bfloat16": b"\xc0\x7f", "float32": b"\x00\x00\xc0\x7f"}[meta.dtype]
    put(path, key, index, nan, is_stored=True)
    (finding,) = [finding for finding in deep(path) if finding.code == "CK710"]
    assert (
        finding.key == key and finding.message.startswith("1 of ") and str(index) in finding.message
    )


def put(
    path: Path,
    key: str,
    index: tuple[int, ...],
    data: bytes,
    *,
    is_stored: bool = False,
    copy: int = 0,
) -> Path:
    """Overwrites an element of a tensor in the (``copy``-th) file that holds it."""
    opened = open_checkpoint(path)
    catalog = opened.catalog
    if not is_stored:
        catalog = unshard(catalog, rules=load_rules(None), store=opened.store)
    holders = [
        (piece, piece.array)
        for piece in catalog.fragments(key)
        if piece.array is not None
        and all(
            start <= i < end
            for start, i, end in zip(piece.box.offset, index, piece.box.end, strict=True)
        )
    ]
    piece, array = holders[copy]
    inside = [
        i - start + at for i, start, at in zip(index, piece.box.offset, piece.at, strict=True)
    ]
    file, address = place_of(catalog, opened, array, inside)
    opened.store.close()
    with file.open("r+b") as target:
        target.seek(address)
        target.write(data)
    return file


def place_of(
    catalog: Catalog, opened: Checkpoint, array: StoredArray, index: list[int]
) -> tuple[Path, int]:
    bound = array.locate(opened.store)
    assert bound.extent.strides is None
    flat = 0
    for i, n in zip(index, array.shape, strict=True):
        flat = flat * n + i
    size = array.n_bytes // max(1, int(np.prod(array.shape)))
    return opened.store.root / bound.extent.file, bound.extent.offset + flat * size


def test_a_copy_that_differs_is_named_with_its_rank_and_the_index(copied: Copied) -> None:
    path = copied("mcore_legacy/dense_gqa/tp4_pp1")
    key = "decoder.layers.1.input_layernorm.weight"
    file = put(path, key, (17,), b"\x34\x12", copy=0)
    (finding,) = [finding for finding in deep(path) if finding.code == "CK720"]
    assert (
        finding.key == key and finding.rank == file.parent.name == "mp_rank_00"
    )  # the odd one of four
    assert (
        "1 of 64 elements" in finding.message
        and "(17,)" in finding.message
        and finding.found == "3412"
    )


def test_a_tied_copy_on_another_stage_is_compared(copied: Copied) -> None:
    path = copied("mcore_legacy/dense_gelu/tp2_pp2")
    key = "embedding.word_embeddings.weight"
    file = put(path, key, (3, 4), b"\x34\x12", copy=1)
    (finding,) = [finding for finding in deep(path) if finding.code == "CK720"]
    assert finding.key == key and finding.rank == file.parent.name and "(3, 4)" in finding.message


def test_padding_rows_may_differ_and_hold_anything(golden: Path) -> None:
    for name in ("mcore_legacy/dense_gqa/tp4_pp1", "mcore_legacy/dense_gelu/tp2_pp2_padnoise"):
        if (golden / name).exists():
            assert not [
                finding for finding in deep(golden / name) if finding.code.startswith("CK7")
            ]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "layers.0.weight": torch.randn(8, 16, generator=generator).to(torch.bfloat16),
        "layers.0.bias": torch.zeros(8),
        "norm.weight": torch.ones(16),
        "layers.0.lora_B.weight": torch.zeros(8, 2),
        "attn.mask": torch.full((4, 4), float("-inf")).triu(1),
        "fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "ids": torch.zeros(4, 4, dtype=torch.int64),
    }


def found_in(folder: Path, state: dict[str, torch.Tensor]) -> dict[tuple[str, str | None], Finding]:
    save_file(state, folder / "model.safetensors")
    findings = [
        finding for finding in deep(folder / "model.safetensors") if finding.code not in ("CK704",)
    ]
    return {(finding.code, finding.key): finding for finding in findings}


def test_what_is_usual_in_a_new_model_is_no_finding(tmp_path: Path) -> None:
    by_place = found_in(tmp_path, tensors())
    assert (
        set(by_place) == {("CK711", "attn.mask")}
        and by_place["CK711", "attn.mask"].severity == Severity.NOTE
    )


def test_what_is_not_usual_is_one(tmp_path: Path) -> None:
    state = tensors()
    state["layers.0.weight"] = torch.zeros(8, 16)
    state["layers.1.weight"] = torch.full((8, 16), -1.5)
    state["layers.2.weight"] = torch.randn(8, 16)
    state["layers.2.weight"][3, 4] = 3e38
    state["fp8"].view(torch.uint8)[1, 2] = 0xFF
    state["optimizer.state.exp_avg.layers.0.weight"] = torch.zeros(8, 16)
    del state["attn.mask"]
    by_place = found_in(tmp_path, state)
    assert {place: finding.severity.label for place, finding in by_place.items()} == {
        ("CK712", "layers.0.weight"): "warning",
        ("CK713", "layers.1.weight"): "note",
        ("CK715", "layers.2.weight"): "warning",
        ("CK710", "fp8"): "error",
        ("CK714", "optimizer.state.exp_avg.layers.0.weight"): "note",
    }
    assert (
        "(3, 4)" in by_place["CK715", "layers.2.weight"].message
        and "(1, 2)" in by_place["CK710", "fp8"].message
    )


def test_a_file_that_grew_shorter_is_said_once(copied: Copied) -> None:
    path = copied("hf/llama/safetensors_single")
    file = path / "model.safetensors"
    with file.open("r+b") as target:
        target.truncate(file.stat().st_size - 100)
    assert len([finding for finding in errors(path) if finding.file == file.name]) <= 2


def test_a_crc_of_zero_states_nothing(tmp_path: Path) -> None:
    """As torch writes them after ``set_crc32_options(False)``."""
    file = tmp_path / "model.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000.0).reshape(20, 50)}, file)
    finally:
        torch.serialization.set_crc32_options(True)
    data = file.read_bytes()
    at = data.index(struct.pack("<5f", 100, 101, 102, 103, 104))
    flip(file, at)
    assert errors(file) == []
