"""Damages of real checkpoints, as a table: what is broken, and what checks of files, trackers and
indexes say of it.

A row: the checkpoint, what is broken, and the findings (code, file) that come of it, notes left
out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.arrays.checksum import crc32c
from core.formats.dcp.metadata_writer import ObjectRow
from core.verbs.checks.check import Level
from tests.hostile.cases import torch_zip
from tests.support import broken as b
from tests.support.edited import Rows, chunks_of, edit_rows

RANKS = "mcore_legacy/dense_gqa/tp2_pp2"
DISTOPT = "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
HEAD = "mcore_torch_dist/dense_gqa/tp2_pp2"
OLD = "mcore0161_torch_dist/dense_gqa/tp2_pp2"
ZARR = "mcore0121_zarr/dense_gqa/tp2_pp2"
DCP = "torch_dcp/fsdp2_dp2"
FOLDERS = "accelerate/fsdp2_dp2/checkpoint_0"
TRAINER = "trainer/zero2_dp2"
ONE = "hf/llama/safetensors_single"
SHARDS = "hf/llama/safetensors_sharded"
BINS = "hf/llama/bin_sharded"
TIED = "hf/qwen2_tied/safetensors_single"
ZERO = "deepspeed/zero1_dp2_bf16"
ZERO3 = "deepspeed/zero3_dp2_bf16"
UNIVERSAL = "deepspeed_universal/zero1_dp2_bf16"
TORCH = "hf/llama/torch_single/model_zip.pt"
LEGACY = "hf/llama/torch_single/model_legacy.pt"
ZARR3 = "zarr3"

FSDP = "pytorch_model_fsdp_0"
ITER = "iter_0000010"
STEP = "global_step10"
RANK = f"{ITER}/mp_rank_01_000/model_optim_rng.pt"
WORDS = f"{ITER}/embedding.word_embeddings.weight"
FIRST = "model-00001-of-00003.safetensors"
LEARNING_RATE = "app.optim.param_groups.0.lr"
SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
OPTIM = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        source: a golden checkpoint.
        what: what is broken, in words.
        breaks: breaks a writable copy: its path, or that of a file in it.
        found: code and file of each finding; files relative to the checkpoint that is examined.
        at: the file that is broken; "" for the checkpoint.
        level: the lowest level at which it is found; it is found at the higher ones as well.
    """

    source: str
    what: str
    breaks: Callable[[Path], object]
    found: tuple[tuple[str, str | None], ...]
    at: str = ""
    level: Level = Level.METADATA


def kind_of(row: Row) -> dict[str, Hashable]:
    """Return a row's checkpoint and the codes of what is found, for ``covering_cases``."""
    return {"source": row.source, "codes": tuple(code for code, _ in row.found)}


def row(
    source: str,
    what: str,
    at: str,
    breaks: Callable[[Path], object],
    *found: tuple[str, str | None],
    level: Level = Level.METADATA,
) -> Row:
    return Row(source, what, breaks, found, at, level)


def _bytes(path: Path, change: b.Change) -> None:
    b.patched(path, change)


def _swap_begin(path: Path) -> None:
    b.reheaded(path, lambda header: _moved(header, -2))


def _moved(header: dict[str, dict[str, list[int]]], step: int) -> None:
    """The last tensor lies elsewhere; its length is the same."""
    last = max(
        (entry for name, entry in header.items() if name != "__metadata__"),
        key=lambda e: e["data_offsets"][1],
    )
    last["data_offsets"] = [n + step for n in last["data_offsets"]]


def _reshaped(header: dict[str, dict[str, list[int]]]) -> None:
    entry = next(entry for name, entry in header.items() if name != "__metadata__")
    entry["shape"] = [*entry["shape"], 3]


def _twice(path: Path) -> None:
    data = path.read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")].decode().rstrip()
    name, entry = next((k, v) for k, v in json.loads(text).items() if k != "__metadata__")
    b.with_text(path, text[:-1] + f',"{name}":{json.dumps(entry)}}}')


def _in_index(index_path: Path, change: Callable[[dict[str, str]], object]) -> None:
    b.json_changed(index_path, lambda content: change(content["weight_map"]))


def _first_of(weight_map: dict[str, str], name: str) -> str:
    return min(key for key, file in weight_map.items() if file == name)


def _to_second(weight_map: dict[str, str]) -> None:
    weight_map[_first_of(weight_map, FIRST)] = SECOND


def _hf_total(content: dict[str, dict[str, int]]) -> None:
    content["metadata"]["total_size"] += 2


def _without_index(path: Path) -> None:
    (path / INDEX).unlink()
    (path / SECOND).unlink()


def config_changed(folder: Path, **changes: object) -> None:
    """Other values in the ``config.json`` of a directory; None takes a name out."""

    def change(content: dict[str, object]) -> None:
        content |= {name: value for name, value in changes.items() if value is not None}
        for name in [name for name, value in changes.items() if value is None]:
            del content[name]

    b.json_changed(folder / "config.json", change)


def tensors_changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors in the ``model.safetensors`` of a directory, written by safetensors itself."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prefixed(tensors: dict[str, torch.Tensor]) -> None:
    """All names with a prefix, as a DCP checkpoint of a whole application has them."""
    for key in list(tensors):
        tensors[f"app.model.{key}"] = tensors.pop(key)


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key].to(torch.int32)


def _no_zarray(path: Path) -> None:
    (path / ".zarray").unlink()


def _end_of_index(path: Path, *, absent: int | None) -> None:
    """The index of a shard with eight inner chunks: a flipped byte, or a chunk that is not
    there.
    """
    data = bytearray(path.read_bytes())
    at = len(data) - 4 - 16 * 8
    if absent is None:
        data[at] ^= 1
    else:
        data[at + 16 * absent : at + 16 * absent + 16] = b"\xff" * 16
        data[-4:] = crc32c(bytes(data[at:-4])).to_bytes(4, "little")
    path.write_bytes(data)


def _emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _two_iterations(path: Path) -> None:
    (path / "iter_0000020").mkdir()
    (path / TRACKER).write_text("20")


TABLE = (
    # --- any file
    row(
        ONE,
        "an empty file",
        "model.safetensors",
        lambda p: p.write_bytes(b""),
        ("CK102", "model.safetensors"),
    ),
    row(ONE, "a pipe", "model.safetensors", b.piped, ("CK104", "model.safetensors")),
    row(RANKS, "a pipe in a rank", RANK, b.piped, ("CK101", RANK[13:]), ("CK104", RANK[13:])),
    row(DCP, "a link to nowhere", "", lambda p: (p / "x.pt").symlink_to("gone"), ("CK104", "x.pt")),
    row(DCP, "a link to itself", "", lambda p: (p / "x.pt").symlink_to("x.pt"), ("CK104", "x.pt")),
    row(
        ONE,
        "a Git LFS pointer",
        "model.safetensors",
        lambda p: p.write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        ),
        ("CK108", "model.safetensors"),
    ),
    row(
        BINS,
        "a page of a server",
        "pytorch_model-00001-of-00003.bin",
        lambda p: p.write_text("<!DOCTYPE html><title>403</title>"),
        ("CK108", "pytorch_model-00001-of-00003.bin"),
    ),
    row(
        DCP,
        "a temporary file",
        "",
        lambda p: (p / "__0_0.distcp.tmp").write_bytes(b"x"),
        ("CK107", "__0_0.distcp.tmp"),
    ),
    row(
        SHARDS,
        "rsync's temporary file",
        "",
        lambda p: (p / f".{FIRST}.a1B2c3").write_bytes(b"x"),
        ("CK107", f".{FIRST}.a1B2c3"),
    ),
    row(
        DCP,
        "an unfinished save inside",
        "",
        lambda p: (p / ".ckpt-stage").mkdir(),
        ("CK107", ".ckpt-stage"),
    ),
    row(
        DCP,
        "an unfinished write beside it",
        "",
        lambda p: (p.parent / ".checkpoint.ckpt-stage").mkdir(),
        ("CK107", "../.checkpoint.ckpt-stage"),
    ),
    # --- torch zips
    row(TORCH, "cut short", "", b.cut, ("CK103", "model_zip.pt")),
    row(TORCH, "zeros", "", b.zeroed, ("CK108", "model_zip.pt")),
    row(
        TORCH,
        "zeros behind it",
        "",
        lambda p: _bytes(p, lambda d: d.extend(bytes(512))),
        ("CK112", "model_zip.pt"),
    ),
    row(
        TORCH,
        "another number of entries",
        "",
        lambda p: _bytes(p, lambda d: d.__setitem__(-12, d[-12] ^ 1)),
        ("CK120", "model_zip.pt"),
    ),
    row(
        TORCH,
        "two records of one name",
        "",
        lambda p: _bytes(p, b.renamed_record("data/1", "data/2")),
        ("CK121", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a name that differs in the directory",
        "",
        lambda p: _bytes(p, b.renamed_record("data/1", "data/x", both=False)),
        ("CK122", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a record that reaches into the next",
        "",
        lambda p: _bytes(p, b.grown("data/1", 4096)),
        ("CK123", "model_zip.pt"),
    ),
    row(
        TORCH,
        "an encrypted record",
        "",
        lambda p: _bytes(p, b.flagged("data/1", flags=1)),
        ("CK124", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a record packed by LZMA",
        "",
        lambda p: _bytes(p, b.flagged("data/1", method=14)),
        ("CK124", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a byte order that is none",
        "",
        lambda p: b.repacked(p, "byteorder", lambda d: b"middle"),
        ("CK125", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a CRC field behind a record",
        "",
        lambda p: _bytes(p, b.behind(p, "data/1", at=5)),
        ("CK126", "model_zip.pt"),
        level=Level.HEADERS,
    ),
    row(
        TORCH,
        "a letter of a name in the pickle",
        "",
        lambda p: _bytes(p, b.inside(p, "data.pkl", b"lm_head", b"lm_heAd")),
        ("CK127", "model_zip.pt"),
    ),
    row(
        TORCH,
        "no pickle",
        "",
        lambda p: _bytes(p, b.renamed_record("data.pkl", "data.pk1")),
        ("CK128", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a storage that is too short",
        "",
        lambda p: b.repacked(p, "data/1", lambda d: d[:-2]),
        ("CK129", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a malformed pickle",
        "",
        lambda p: b.repacked(p, "data.pkl", lambda d: d[:9] + b"\xff" * 9 + d[18:]),
        ("CK111", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a pickle that asks for gigabytes",
        "",
        lambda p: b.repacked(
            p, "data.pkl", lambda d: d[:2] + b"\x8f" * 9 + b"r\xff\xff\xff\x0f" + d[2:]
        ),
        ("CK111", "model_zip.pt"),
    ),
    row(
        TORCH,
        "strides that wrap modulo 2^64",
        "",
        lambda p: b.repacked(p, "data.pkl", lambda d: _wide_strides(d)),
        ("CK129", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a storage of no type of torch's",
        "",
        lambda p: b.repacked(
            p, "data.pkl", lambda d: d.replace(b"\nBFloat16Storage\n", b"\nOddStorage\n", 1)
        ),
        ("CK109", None),
        ("CK601", "model_zip.pt"),  # old versions of torch call the class of a storage
    ),
    row(
        LEGACY,
        "2^60 elements before a storage",
        "",
        lambda p: _absurd_count(p),
        ("CK111", "model_legacy.pt"),
    ),
    row(LEGACY, "an old file, cut short", "", b.cut, ("CK103", "model_legacy.pt")),
    row(
        TORCH,
        "a tar file of torch 0.1",
        "",
        lambda p: b.tarred(p, "sys_info", "pickle", "tensors", "storages"),
        ("CK109", "model_zip.pt"),
    ),
    row(
        TORCH,
        "a tar file of something else",
        "",
        lambda p: b.tarred(p, "notes.txt"),
        ("CK108", "model_zip.pt"),
    ),
    row(TORCH, "a dict that contains itself", "", b.circular, ("CK109", "model_zip.pt")),
    row(LEGACY, "a dict that contains itself", "", b.circular, ("CK109", "model_legacy.pt")),
    # --- safetensors
    row(ONE, "cut short", "model.safetensors", b.cut, ("CK103", "model.safetensors")),
    row(
        ONE,
        "no JSON",
        "model.safetensors",
        lambda p: _bytes(p, lambda d: d.__setitem__(12, 0)),
        ("CK130", "model.safetensors"),
    ),
    row(
        ONE, "two entries of one name", "model.safetensors", _twice, ("CK131", "model.safetensors")
    ),
    row(
        ONE,
        "metadata that are no strings",
        "model.safetensors",
        lambda p: b.reheaded(p, lambda h: h["__metadata__"].update(n=1)),
        ("CK132", "model.safetensors"),
    ),
    row(
        ONE,
        "a shape of another size",
        "model.safetensors",
        lambda p: b.reheaded(p, _reshaped),
        ("CK133", "model.safetensors"),
    ),
    row(
        ONE,
        "tensors that overlap",
        "model.safetensors",
        _swap_begin,
        ("CK134", "model.safetensors"),
        ("CK135", "model.safetensors"),
    ),
    row(
        ONE,
        "a hole",
        "model.safetensors",
        lambda p: (b.reheaded(p, lambda h: _moved(h, 2)), b.lengthened(p, n_bytes=2)),
        ("CK134", "model.safetensors"),
    ),
    row(ONE, "bytes at the end", "model.safetensors", b.lengthened, ("CK135", "model.safetensors")),
    # --- zarr
    row(ZARR, "a missing chunk", f"{WORDS}/0.0", Path.unlink, ("CK141", f"{WORDS[13:]}/0.0")),
    row(ZARR, "a short chunk", f"{WORDS}/0.0", b.cut, ("CK142", f"{WORDS[13:]}/0.0")),
    row(ZARR, "a long chunk", f"{WORDS}/0.0", b.lengthened, ("CK142", f"{WORDS[13:]}/0.0")),
    row(
        ZARR,
        "an empty chunk",
        f"{WORDS}/0.0",
        lambda p: p.write_bytes(b""),
        ("CK142", f"{WORDS[13:]}/0.0"),
    ),
    row(
        ZARR,
        "a chunk beyond the grid",
        WORDS,
        lambda p: shutil.copy(p / "0.0", p / "9.0"),
        ("CK143", f"{WORDS[13:]}/9.0"),
    ),
    row(
        ZARR,
        "another separator",
        f"{WORDS}/.zarray",
        lambda p: b.json_changed(p, lambda c: c.update(dimension_separator="/")),
        ("CK144", f"{WORDS[13:]}/.zarray"),
    ),
    row(ZARR, "malformed metadata", f"{WORDS}/.zarray", b.cut, ("CK140", f"{WORDS[13:]}/.zarray")),
    row(ZARR, "no metadata", WORDS, _no_zarray, ("CK140", f"{WORDS[13:]}/.zarray")),
    row(
        ZARR,
        "an empty directory",
        WORDS,
        lambda p: (shutil.rmtree(p), p.mkdir()),
        ("CK140", WORDS[13:]),
    ),
    row(
        ZARR,
        "metadata of both versions",
        WORDS,
        lambda p: (p / "zarr.json").write_text("{}"),
        ("CK147", f"{WORDS[13:]}/.zarray"),
    ),
    row(ZARR, "no common state", f"{ITER}/common.pt", Path.unlink, ("CK101", "common.pt")),
    row(
        ZARR,
        "no metadata.json",
        f"{ITER}/metadata.json",
        Path.unlink,
        ("CK515", "metadata.json"),
        ("CK512", f"../{TRACKER}"),
    ),
    row(
        ZARR,
        "a damaged random state",
        f"{ITER}/rng_state/shard_0.0_2.2.pt",
        b.cut,
        ("CK103", "rng_state/shard_0.0_2.2.pt"),
    ),
    row(ZARR3, "a missing shard", "w/c/0/0", Path.unlink, ("CK141", "w/c/0/0")),
    row(
        ZARR3,
        "a shard without room for its index",
        "w/c/0/0",
        lambda p: p.write_bytes(b"x"),
        ("CK142", "w/c/0/0"),
    ),
    row(
        ZARR3,
        "a flipped bit in a shard's index",
        "w/c/0/0",
        lambda p: _end_of_index(p, absent=None),
        ("CK145", "w/c/0/0"),
    ),
    row(
        ZARR3,
        "a shard without one of its chunks",
        "w/c/0/0",
        lambda p: _end_of_index(p, absent=2),
        ("CK146", "w/c/0/0"),
    ),
    row(ZARR3, "chunks under names of zarr 2", "w", lambda p: _dotted(p), ("CK144", "w/zarr.json")),
    row(ZARR3, "malformed metadata", "w/zarr.json", b.cut, ("CK140", "w/zarr.json")),
    row(ZARR3, "no metadata", "w/zarr.json", Path.unlink, ("CK140", "w/zarr.json")),
    # --- dcp and torch_dist
    row(DCP, "a missing file", "__1_0.distcp", Path.unlink, ("CK101", "__1_0.distcp")),
    row(DCP, "a short file", "__1_0.distcp", b.cut, ("CK103", "__1_0.distcp")),
    row(
        DCP,
        "an empty file",
        "__1_0.distcp",
        lambda p: p.write_bytes(b""),
        ("CK103", "__1_0.distcp"),
    ),
    row(
        DCP,
        "a file of an earlier save",
        "",
        lambda p: shutil.copy(p / "__1_0.distcp", p / "__2_0.distcp"),
        ("CK106", "__2_0.distcp"),
    ),
    row(DCP, "a writer without items", "", lambda p: (p / "__2_0.distcp").write_bytes(b"")),
    row(DCP, "no metadata", ".metadata", Path.unlink, ("CK515", ".metadata")),
    row(DCP, "short metadata", ".metadata", b.cut, ("CK103", ".metadata")),
    row(
        DCP,
        "metadata that were not renamed",
        ".metadata",
        lambda p: p.rename(p.with_name(".metadata.tmp")),
        ("CK515", ".metadata"),
        ("CK107", ".metadata.tmp"),
    ),
    row(
        DCP,
        "metadata that name a file outside",
        ".metadata",
        lambda p: p.write_bytes(p.read_bytes().replace(b"__1_0.distcp", b"../_0.distcp")),
        ("CK110", ".metadata"),
    ),
    row(
        DCP,
        "malformed metadata",
        ".metadata",
        lambda p: _bytes(p, _no_opcodes),
        ("CK150", ".metadata"),
    ),
    row(DCP, "empty metadata", ".metadata", lambda p: p.write_bytes(b""), ("CK102", ".metadata")),
    row(
        FOLDERS,
        "a missing file",
        "optimizer_0/__1_0.distcp",
        Path.unlink,
        ("CK101", "optimizer_0/__1_0.distcp"),
    ),
    row(FOLDERS, "a short file", f"{FSDP}/__1_0.distcp", b.cut, ("CK103", f"{FSDP}/__1_0.distcp")),
    row(
        FOLDERS,
        "no metadata of the model",
        f"{FSDP}/.metadata",
        Path.unlink,
        ("CK515", f"{FSDP}/.metadata"),
    ),
    row(FOLDERS, "an empty optimizer", "optimizer_0", _emptied, ("CK515", "optimizer_0/.metadata")),
    row(
        FOLDERS,
        "short metadata",
        "optimizer_0/.metadata",
        b.cut,
        ("CK103", "optimizer_0/.metadata"),
    ),
    row(
        FOLDERS,
        "a file of an earlier save",
        FSDP,
        lambda p: shutil.copy(p / "__1_0.distcp", p / "__2_0.distcp"),
        ("CK106", f"{FSDP}/__2_0.distcp"),
    ),
    row(
        FOLDERS,
        "an item that is overwritten",
        "optimizer_0/__0_0.distcp",
        lambda p: _bytes(p, _first_item_gone),
        ("CK122", "optimizer_0/__0_0.distcp"),
    ),
    row(
        FOLDERS,
        "short random states",
        "random_states_1.pkl",
        b.cut,
        ("CK103", "random_states_1.pkl"),
    ),
    row(
        FOLDERS,
        "an empty scheduler",
        "scheduler.bin",
        lambda p: p.write_bytes(b""),
        ("CK102", "scheduler.bin"),
    ),
    row(
        DCP,
        "an item that is overwritten",
        "__1_0.distcp",
        lambda p: _bytes(p, _first_item_gone),
        ("CK122", "__1_0.distcp"),
    ),
    row(
        DCP,
        "an item whose stated length cuts its zip short",
        "",
        lambda p: _shortened_item(p),
        ("CK152", "__0_0.distcp"),
        level=Level.HEADERS,
    ),
    row(
        DCP,
        "an item whose directory is damaged",
        "__1_0.distcp",
        lambda p: _bytes(p, _last_entry_gone),
        ("CK152", "__1_0.distcp"),
        level=Level.HEADERS,
    ),
    row(
        DCP,
        "an object that ends in the middle of its pickle",
        "",
        lambda p: _endless_object(p),
        ("CK103", "__1_0.distcp"),
        level=Level.HEADERS,
    ),
    row(
        HEAD,
        "a backend that nobody knows",
        f"{ITER}/metadata.json",
        lambda p: b.json_changed(p, lambda c: c.update(sharded_backend="evil")),
        ("CK506", "metadata.json"),
    ),
    row(
        DCP,
        "a metadata.json that names a backend that nobody knows",
        "",
        lambda p: (p / "metadata.json").write_text('{"sharded_backend": "../torch_dist"}'),
        ("CK506", "metadata.json"),
    ),
    row(
        DCP,
        "items that lie elsewhere",
        "__1_0.distcp",
        lambda p: p.write_bytes(bytes(8) + p.read_bytes()),
        ("CK152", "__1_0.distcp"),
    ),
    row(HEAD, "a missing file", f"{ITER}/__1_0.distcp", Path.unlink, ("CK101", "__1_0.distcp")),
    row(
        HEAD,
        "no metadata.json",
        f"{ITER}/metadata.json",
        Path.unlink,
        ("CK515", "metadata.json"),
        ("CK512", f"../{TRACKER}"),
    ),
    row(
        HEAD,
        "malformed metadata.json",
        f"{ITER}/metadata.json",
        b.zeroed,
        ("CK516", "metadata.json"),
    ),
    row(HEAD, "no .metadata", f"{ITER}/.metadata", Path.unlink, ("CK101", ".metadata")),
    row(OLD, "no common state", f"{ITER}/common.pt", Path.unlink, ("CK101", "common.pt")),
    row(
        OLD,
        "no metadata.json",
        f"{ITER}/metadata.json",
        Path.unlink,
        ("CK515", "metadata.json"),
        ("CK512", f"../{TRACKER}"),
    ),
    row(OLD, "a damaged common state", f"{ITER}/common.pt", b.cut, ("CK103", "common.pt")),
    # --- rank files
    row(RANKS, "no file of a rank", RANK, Path.unlink, ("CK101", RANK[13:])),
    row(RANKS, "a short file of a rank", RANK, b.cut, ("CK103", RANK[13:])),
    row(
        RANKS,
        "three ranks that are not there",
        ITER,
        lambda p: [shutil.rmtree(p / f"mp_rank_{name}") for name in ("00_000", "00_001", "01_001")],
        ("CK160", "mp_rank_00_000"),
        ("CK160", "mp_rank_00_001"),
        ("CK160", "mp_rank_01_001"),
    ),
    row(
        RANKS,
        "a rank too many",
        ITER,
        lambda p: shutil.copytree(p / "mp_rank_01_001", p / "mp_rank_02_001"),
        ("CK161", "mp_rank_02_001"),
    ),
    row(
        DISTOPT,
        "a rank without its optimizer",
        f"{ITER}/mp_rank_01/distrib_optim.pt",
        Path.unlink,
        ("CK101", "mp_rank_01/distrib_optim.pt"),
    ),
    row(
        ZERO,
        "no optimizer of a rank",
        f"{STEP}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        Path.unlink,
        ("CK160", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ),
    row(
        ZERO,
        "no model file",
        f"{STEP}/mp_rank_00_model_states.pt",
        Path.unlink,
        ("CK101", "mp_rank_00_model_states.pt"),
    ),
    row(
        UNIVERSAL,
        "no master",
        f"{STEP}_universal/zero/norm.weight/fp32.pt",
        Path.unlink,
        ("CK101", "zero/norm.weight/fp32.pt"),
    ),
    row(
        UNIVERSAL,
        "no moment",
        f"{STEP}_universal/zero/norm.weight/exp_avg_sq.pt",
        Path.unlink,
        ("CK101", "zero/norm.weight/exp_avg_sq.pt"),
    ),
    row(
        UNIVERSAL,
        "no step of a parameter",
        f"{STEP}_universal/zero/norm.weight/step.pt",
        Path.unlink,
        ("CK101", "zero/norm.weight/step.pt"),
    ),
    row(
        UNIVERSAL,
        "no groups",
        f"{STEP}_universal/zero/optimizer_state.pt",
        Path.unlink,
        ("CK101", "zero/optimizer_state.pt"),
    ),
    row(
        UNIVERSAL,
        "no model file",
        f"{STEP}_universal/mp_rank_00_model_states.pt",
        Path.unlink,
        ("CK101", "mp_rank_00_model_states.pt"),
    ),
    row(UNIVERSAL, "no tracker", "latest_universal", Path.unlink, ("CK514", "../latest_universal")),
    row(ZERO, "no tracker", "latest", Path.unlink, ("CK514", "../latest")),
    row(
        ZARR,
        "a missing random state",
        f"{ITER}/rng_state/shard_0.1_2.2.pt",
        Path.unlink,
        ("CK162", "rng_state/shard_0.1_2.2.pt"),
    ),
    # --- indexes
    row(SHARDS, "no index", INDEX, Path.unlink, ("CK528", INDEX)),
    row(
        "torch_dcp/hf_storage_dp2",
        "no file of a rank",
        "shard-00002-model-00001-of-00002.safetensors",
        Path.unlink,
        ("CK163", "shard-00002-model-00001-of-00002.safetensors"),
    ),
    row(SHARDS, "a missing shard", FIRST, Path.unlink, ("CK101", FIRST)),
    row(
        BINS,
        "a missing shard",
        "pytorch_model-00002-of-00003.bin",
        Path.unlink,
        ("CK101", "pytorch_model-00002-of-00003.bin"),
    ),
    row(
        SHARDS,
        "a missing shard and no index",
        "",
        _without_index,
        ("CK101", SECOND),
        ("CK528", INDEX),
    ),
    row(SHARDS, "a malformed index", INDEX, b.cut, ("CK520", INDEX)),
    row(
        SHARDS,
        "an index that names the wrong shard",
        INDEX,
        lambda p: _in_index(p, _to_second),
        ("CK521", SECOND),
        ("CK522", FIRST),
    ),
    row(
        SHARDS,
        "a tensor that no index lists",
        INDEX,
        lambda p: _in_index(p, lambda m: m.pop(_first_of(m, FIRST))),
        ("CK522", FIRST),
    ),
    row(
        SHARDS,
        "a tensor that no shard holds",
        INDEX,
        lambda p: _in_index(p, lambda m: m.update(ghost=FIRST)),
        ("CK521", FIRST),
    ),
    row(
        BINS,
        "a tensor that no shard holds",
        "pytorch_model.bin.index.json",
        lambda p: _in_index(p, lambda m: m.update(ghost="pytorch_model-00001-of-00003.bin")),
        ("CK521", "pytorch_model-00001-of-00003.bin"),
    ),
    row(
        SHARDS,
        "another total size",
        INDEX,
        lambda p: b.json_changed(p, _hf_total),
        ("CK523", INDEX),
    ),
    row(
        BINS,
        "another total size",
        "pytorch_model.bin.index.json",
        lambda p: b.json_changed(p, _hf_total),
        ("CK523", "pytorch_model.bin.index.json"),
    ),
    row(
        SHARDS,
        "a single file beside shards",
        "",
        lambda p: shutil.copy(p / FIRST, p / "model.safetensors"),
        ("CK525", "model.safetensors"),
    ),
    row(
        SHARDS,
        "a shard that is not named",
        "",
        lambda p: shutil.copy(p / FIRST, p / "model-00004-of-00003.safetensors"),
        ("CK106", "model-00004-of-00003.safetensors"),
    ),
    row(SHARDS, "a configuration that is cut", "config.json", b.cut, ("CK526", "config.json")),
    row(
        SHARDS,
        "another small file that is cut",
        "generation_config.json",
        lambda p: b.cut(p, n_bytes=3),
        ("CK526", "generation_config.json"),
        level=Level.HEADERS,
    ),
    # --- what a trainer saves above DeepSpeed's directory
    row(
        TRAINER,
        "short random states",
        "checkpoint-2/rng_state.pth",
        b.cut,
        ("CK103", "../rng_state.pth"),
    ),
    row(
        TRAINER,
        "short weights",
        "checkpoint-2/model.safetensors",
        b.cut,
        ("CK103", "../model.safetensors"),
    ),
    row(TRAINER, "an empty tool", "checkpoint-2/zero_to_fp32.py", lambda p: p.write_bytes(b"")),
    row(
        TRAINER,
        "a cut configuration",
        "checkpoint-2/config.json",
        b.cut,
        ("CK526", "../config.json"),
    ),
    row(
        TRAINER,
        "a short file of a rank",
        "checkpoint-2/global_step2/mp_rank_00_model_states.pt",
        b.cut,
        ("CK103", "mp_rank_00_model_states.pt"),
    ),
    # --- trackers
    row(
        RANKS,
        "a tracker that names nothing",
        TRACKER,
        lambda p: p.write_text("20"),
        ("CK510", TRACKER),
    ),
    row(
        ZERO,
        "a tracker that names nothing",
        "latest",
        lambda p: p.write_text("global_step20"),
        ("CK510", "latest"),
    ),
    row(RANKS, "a malformed tracker", TRACKER, lambda p: p.write_text("ten"), ("CK511", TRACKER)),
    row(RANKS, "an empty tracker", TRACKER, lambda p: p.write_bytes(b""), ("CK511", TRACKER)),
    row(
        ZERO,
        "a tracker that leads out",
        "latest",
        lambda p: p.write_text("../x"),
        ("CK511", "latest"),
    ),
    row(
        RANKS,
        "a tracker that names an empty directory",
        "",
        _two_iterations,
        ("CK512", f"../{TRACKER}"),
    ),
    row(RANKS, "no tracker", TRACKER, Path.unlink, ("CK514", f"../{TRACKER}")),
    row(
        ZERO3,
        "the optimizer file of another rank",
        f"{STEP}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        lambda p: shutil.copyfile(p.with_name(OPTIM), p),
        ("CK508", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        level=Level.HEADERS,
    ),
    # --- what other software would run
    row(
        RANKS,
        "a call of what is not known to be harmless",
        RANK,
        b.calling,
        ("CK601", RANK.removeprefix(f"{ITER}/")),
    ),
    row(
        RANKS,
        "a call of what nobody knows",
        RANK,
        lambda p: b.calling(p, module="train.model", name="Net"),
        ("CK602", RANK.removeprefix(f"{ITER}/")),
    ),
    row(
        TORCH,
        "a call of what is not known to be harmless",
        "",
        b.calling,
        ("CK601", "model_zip.pt"),
    ),
    row(OLD, "a call in the common state", f"{ITER}/common.pt", b.calling, ("CK601", "common.pt")),
    row(HEAD, "a call in the metadata", f"{ITER}/.metadata", b.calling, ("CK601", ".metadata")),
    row(DCP, "a call in the metadata", ".metadata", b.calling, ("CK601", ".metadata")),
    row(
        ZERO,
        "a call in a file of optimizer states",
        f"{STEP}/{OPTIM}",
        b.calling,
        ("CK601", OPTIM),
    ),
    row(
        ZARR,
        "an array of pickles",
        f"{WORDS}/.zarray",
        lambda p: b.json_changed(p, lambda content: content.update(filters=[{"id": "pickle"}])),
        ("CK601", f"{WORDS.removeprefix(f'{ITER}/')}/.zarray"),
    ),
    row(
        DCP,
        "a pickle beside the weights that calls something",
        "",
        lambda p: (p / "scheduler.pkl").write_bytes(b"\x80\x02ctorch.utils.collect_env\nrun\n)R."),
        ("CK601", "scheduler.pkl"),
    ),
)


def _first_item_gone(data: bytearray) -> None:
    data[:64] = bytes(64)


def _no_opcodes(data: bytearray) -> None:
    data[20:40] = b"\xff" * 20


def _dotted(path: Path) -> None:
    """Chunks as zarr 2 calls them."""
    for chunk in [item for item in (path / "c").rglob("*") if item.is_file()]:
        chunk.rename(path / ".".join(chunk.relative_to(path / "c").parts))
    shutil.rmtree(path / "c")


_CONFIG = "config.json"
_HEAD = "lm_head.weight"
_MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _of(*numbers: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"CK{number}", _CONFIG) for number in numbers)


def _persimmon_without_a_tensor(path: Path) -> None:
    config_changed(path, model_type="persimmon", architectures=["PersimmonForCausalLM"])
    tensors_changed(path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))


MODELS = (
    row(
        ONE,
        "more layers are stated",
        "",
        lambda p: config_changed(p, num_hidden_layers=5),
        ("CK533", _CONFIG),
    ),
    row(
        SHARDS,
        "more layers are stated",
        "",
        lambda p: config_changed(p, num_hidden_layers=4),
        ("CK533", _CONFIG),
    ),
    row(
        BINS,
        "fewer layers are stated",
        "",
        lambda p: config_changed(p, num_hidden_layers=2),
        ("CK533", _CONFIG),
    ),
    row(
        ONE,
        "another vocabulary is stated",
        "",
        lambda p: config_changed(p, vocab_size=131),
        ("CK532", _CONFIG),
    ),
    row(
        ONE,
        "wider heads are stated",
        "",
        lambda p: config_changed(p, head_dim=16),
        ("CK532", _CONFIG),
    ),
    row(
        ONE,
        "biases are stated",
        "",
        lambda p: config_changed(p, attention_bias=True),
        ("CK530", _CONFIG),
    ),
    row(
        ONE,
        "a tensor is lost",
        "",
        lambda p: tensors_changed(p, lambda t: t.pop("model.layers.1.self_attn.q_proj.weight")),
        ("CK530", _CONFIG),
    ),
    row(
        ONE,
        "all names have a prefix",
        "",
        lambda p: tensors_changed(p, prefixed),
        ("CK530", _CONFIG),
    ),
    row(
        ONE,
        "a tensor too many",
        "",
        lambda p: tensors_changed(p, lambda t: t.update(v_head=torch.ones(3))),
        ("CK531", _CONFIG),
    ),
    row(
        ONE, "experts are stated", "", lambda p: config_changed(p, **_MIXTRAL), *_of(530, 531, 534)
    ),
    row(
        ONE,
        "the output layer is lost",
        "",
        lambda p: tensors_changed(p, lambda t: t.pop(_HEAD)),
        ("CK535", _CONFIG),
    ),
    row(
        TIED,
        "ties are taken back",
        "",
        lambda p: config_changed(p, tie_word_embeddings=False),
        ("CK535", _CONFIG),
    ),
    row(
        TIED,
        "another output layer than the tied one",
        "",
        lambda p: tensors_changed(p, lambda t: t.update({_HEAD: torch.ones(7, 32)})),
        ("CK535", _CONFIG),
    ),
    row(
        TIED,
        "other numbers in the tied output layer",
        "",
        lambda p: tensors_changed(
            p, lambda t: t.update({_HEAD: t["model.embed_tokens.weight"] + 1})
        ),
        ("CK539", "model.safetensors"),
        level=Level.DEEP,
    ),
    row(
        ONE,
        "scales are stated",
        "",
        lambda p: config_changed(p, quantization_config=_FP8),
        ("CK536", _CONFIG),
    ),
    row(
        ONE,
        "a layer of a family without a table lost a tensor",
        "",
        _persimmon_without_a_tensor,
        ("CK540", _CONFIG),
    ),
    row(
        ONE, "weights of integers", "", lambda p: tensors_changed(p, _integers), ("CK537", _CONFIG)
    ),
    row(
        ONE,
        "no hidden size is stated",
        "",
        lambda p: config_changed(p, hidden_size=None),
        ("CK538", _CONFIG),
    ),
    row(
        ONE,
        "a negative size is stated",
        "",
        lambda p: config_changed(p, num_attention_heads=-4),
        ("CK538", _CONFIG),
    ),
)
"""Models of transformers whose tensors and configuration do not fit
(``core.verbs.checks.metadata.hf_model``).
"""


def _wide_strides(data: bytes) -> bytes:
    """The first matrix gets the strides (2^62, 1): its last row lies at a multiple of 2^64 and a
    bit.
    """
    strides = b"K\x20K\x01\x86"
    assert strides in data
    return data.replace(strides, b"\x8a\x08" + (1 << 62).to_bytes(8, "little") + b"K\x01\x86", 1)


def _absurd_count(path: Path) -> None:
    """The number in front of the first storage's bytes, which the pickle states as well."""
    count = (130 * 32).to_bytes(8, "little")
    _bytes(
        path,
        lambda data: data.__setitem__(
            slice(at := data.index(count), at + 8), (1 << 60).to_bytes(8, "little")
        ),
    )


def _shortened_item(path: Path) -> None:
    """The chunk that lies first in its file ends before its zip's directory does."""

    def change(rows: Rows) -> None:
        chunks = chunks_of(rows, "app.model.model.embed_tokens.weight")
        chunks[0] = chunks[0]._replace(item_bytes=chunks[0].item_bytes - 22)

    edit_rows(path, change)


def _last_entry_gone(data: bytearray) -> None:
    """The last entry of the last item's directory loses its signature."""
    at = data.rindex(b"PK\x01\x02")
    data[at : at + 4] = bytes(4)


def _endless_object(path: Path) -> None:
    """An object is a sound zip around a pickle without its end."""
    file, stream = path / "__1_0.distcp", torch_zip(b"\x80\x02]")
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + stream)
    edit_rows(
        path,
        lambda rows: rows.update(
            {LEARNING_RATE: ObjectRow(LEARNING_RATE, file.name, offset, len(stream))},
        ),
    )
