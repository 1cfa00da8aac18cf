"""Pieces of tensors in safetensors files, as torch's Hugging Face storage writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException, CorruptError, MissingShardError, UnsupportedError
from core.files.store import LocalStore, MemoryStore, ReadStore
from core.formats.safetensors.format import read, sniff
from tests.support.materialize import tensor_bytes

Pieces = Mapping[str, tuple[tuple[int, ...], torch.Tensor]]


def piece_name(rank: int, number: int = 1, total: int = 1) -> str:
    return f"shard-{rank:05d}-model-{number:05d}-of-{total:05d}.safetensors"


def piece_file(pieces: Pieces, *, info: object = None, version: str = "1.0") -> bytes:
    """A file of one rank: key → (offsets, piece)."""
    facts = (
        {key: {"saved_offsets": list(offsets)} for key, (offsets, _) in pieces.items()}
        if info is None
        else info
    )
    text = facts if isinstance(facts, str) else json.dumps(facts)
    tensors = {key: piece.contiguous() for key, (_, piece) in pieces.items()}
    return save(tensors, {"format": "pt", "DCP_VERSION": version, "DCP_SHARDING_INFO": text})


def store_of(*ranks: Pieces, more: Mapping[str, bytes] | None = None) -> MemoryStore:
    files = {piece_name(rank): piece_file(pieces) for rank, pieces in enumerate(ranks, start=1)}
    return MemoryStore({**files, **(more or {})})


def tensor_of(catalog: Catalog, store: ReadStore, key: str) -> torch.Tensor:
    tensor = catalog.tensors[key]
    data = tensor_bytes(catalog, store, key).ravel().tolist()
    flat = torch.tensor(data, dtype=torch.uint8)
    kind = getattr(torch, tensor.dtype)
    return (flat.bool() if kind is torch.bool else flat.view(kind)).reshape(tensor.shape)


W = torch.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize("folder", ["hf_storage_dp2", "hf_storage_consolidated_dp2/sharded"])
def test_golden_pieces_add_up_to_the_true_tensors(golden: Path, folder: str) -> None:
    store = LocalStore(golden / "torch_dcp" / folder)
    assert sniff(store)
    catalog = read(store)
    wanted = {}
    for path in sorted(
        (golden / "torch_dcp" / "hf_storage_consolidated_dp2").glob("*.safetensors")
    ):
        wanted |= load_file(path)
    assert set(catalog.tensors) == set(wanted)
    for key, tensor in wanted.items():
        assert torch.equal(
            tensor_of(catalog, store, key).view(torch.int16), tensor.view(torch.int16)
        ), key
    oracle = load_file(golden / "oracle" / "torch_dcp" / "global_bf16.safetensors")
    assert {key: meta.shape for key, meta in catalog.tensors.items()} == {
        key: tuple(tensor.shape) for key, tensor in oracle.items()
    }
    assert all(
        torch.equal(tensor_of(catalog, store, key), tensor) for key, tensor in oracle.items()
    )


def test_consolidated_files_win_over_the_pieces_beside_them(golden: Path) -> None:
    store = LocalStore(golden / "torch_dcp" / "hf_storage_consolidated_dp2")
    catalog = read(store)
    files = {fragment.array.extent.file for fragment in catalog.all_fragments()}  # type: ignore[union-attr]
    assert not any("shard" in name for name in files if not name.endswith(".json"))
    assert any("4 files with pieces" in note for note in catalog.notes)


def test_pieces_in_their_folder_are_read_where_nothing_was_consolidated(golden: Path) -> None:
    sharded = golden / "torch_dcp" / "hf_storage_consolidated_dp2" / "sharded"
    store = MemoryStore({f"sharded/{path.name}": path.read_bytes() for path in sharded.iterdir()})
    assert sniff(store)
    direct = read(LocalStore(sharded))
    assert read(store).tensors == direct.tensors


def test_scalars_integers_and_bools_are_read(golden: Path) -> None:
    flags, steps = torch.tensor([True, False, True, True]), torch.arange(7)
    store = store_of(
        {
            "s": ((), torch.tensor(3.5)),
            "flag": ((), torch.tensor(True)),
            "n": ((0,), steps[:4]),
            "f": ((0,), flags[:3]),
        },
        {"n": ((4,), steps[4:]), "f": ((3,), flags[3:])},
    )
    catalog = read(store)
    assert tensor_of(catalog, store, "s") == 3.5 and tensor_of(catalog, store, "flag")
    assert torch.equal(tensor_of(catalog, store, "n"), steps)
    assert torch.equal(tensor_of(catalog, store, "f"), flags)


def test_pieces_may_be_cut_along_any_axes_and_lie_in_any_file() -> None:
    big = torch.arange(30.0).reshape(5, 6)
    corners = [(0, 0, 3, 4), (0, 4, 3, 2), (3, 0, 2, 4), (3, 4, 2, 2)]
    ranks: list[Pieces] = [
        {"w": ((r, c), big[r : r + n, c : c + m])} for r, c, n, m in reversed(corners)
    ]
    store = store_of(*ranks)
    assert torch.equal(tensor_of(read(store), store, "w"), big)


def test_empty_pieces_of_uneven_shards_do_not_count() -> None:
    store = store_of({"w": ((0, 0), W)}, {"w": ((6, 0), W[:0])})
    assert torch.equal(tensor_of(read(store), store, "w"), W)
    empty = store_of({"e": ((0, 0), torch.empty(0, 2))}, {"e": ((0, 0), torch.empty(0, 2))})
    assert read(empty).tensors["e"].shape == (0, 2) and len(read(empty).fragments("e")) == 1


def test_equal_pieces_of_several_ranks_are_replicas() -> None:
    store = store_of(
        {"w": ((0, 0), W), "s": ((), torch.tensor(1))},
        {"w": ((0, 0), W), "s": ((), torch.tensor(1))},
    )
    catalog = read(store)
    assert len(catalog.fragments("w")) == 2 and len(catalog.fragments("s")) == 2
    assert torch.equal(tensor_of(catalog, store, "w"), W)


def test_a_file_without_sharding_information_holds_whole_tensors() -> None:
    store = store_of({"w": ((0, 0), W)}, more={piece_name(2): save({"x": W})})
    assert set(read(store).tensors) == {"w", "x"}


def test_what_torch_saves_without_cutting_is_read_with_its_index(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    state = {"a": W, "b": torch.arange(5), "c": torch.tensor(2.0)}
    writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 2, "c": 2})
    dcp.save(state, storage_writer=writer, no_dist=True)
    store = LocalStore(tmp_path)
    catalog = read(store)
    assert set(catalog.tensors) == set(state)
    assert all(torch.equal(tensor_of(catalog, store, key), tensor) for key, tensor in state.items())


def test_what_torch_saves_in_pieces_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    state = {"a": W, "b": torch.arange(5), "c": torch.tensor(2), "d": torch.tensor([True, False])}
    dcp.save(
        state,
        storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True),
        no_dist=True,
    )
    store = LocalStore(tmp_path)
    assert [name for name in store.files() if name.startswith("shard-00001-model-00001-of-00001")]
    catalog = read(store)
    assert all(torch.equal(tensor_of(catalog, store, key), tensor) for key, tensor in state.items())


BROKEN: dict[str, tuple[dict[str, bytes], type[CheckpointingException], str, str | None]] = {
    "a hole": (
        {
            piece_name(1): piece_file({"w": ((0, 0), W[:2])}),
            piece_name(3): piece_file({"w": ((4, 0), W[4:])}),
        },
        MissingShardError,
        "the region at offset [2, 0] with shape [2, 2] of the tensor, which has shape [6, 2]",
        "w",
    ),
    "a first piece that is lost": (
        {piece_name(2): piece_file({"w": ((4, 0), W[4:])})},
        MissingShardError,
        "offset [0, 0] with shape [4, 2]",
        "w",
    ),
    "an overlap": (
        {
            piece_name(1): piece_file({"w": ((0, 0), W[:4])}),
            piece_name(2): piece_file({"w": ((3, 0), W[3:])}),
        },
        CorruptError,
        "two pieces overlap",
        "w",
    ),
    "another dtype": (
        {
            piece_name(1): piece_file({"w": ((0, 0), W[:4])}),
            piece_name(2): piece_file({"w": ((4, 0), W[4:].half())}),
        },
        CorruptError,
        "one piece is float16 with 2 axes, but another is float32",
        "w",
    ),
    "another number of axes": (
        {
            piece_name(1): piece_file({"w": ((0, 0), W[:4])}),
            piece_name(2): piece_file({"w": ((4,), W[4])}),
        },
        CorruptError,
        "with 1 axes",
        "w",
    ),
    "offsets of another number of axes": (
        {piece_name(1): piece_file({"w": ((0,), W)})},
        CorruptError,
        "saved_offsets is [0], not a list of 2 integers",
        "w",
    ),
    "negative offsets": (
        {piece_name(1): piece_file({"w": ((0, -1), W)})},
        CorruptError,
        "not a list of 2 integers",
        "w",
    ),
    "no offsets": (
        {piece_name(1): piece_file({"w": ((), W)}, info={"w": {}})},
        CorruptError,
        "not a list of 2 integers",
        "w",
    ),
    "offsets for another tensor": (
        {piece_name(1): piece_file({"w": ((), W)}, info={"x": {"saved_offsets": []}})},
        CorruptError,
        "lists a tensor that is not in the file",
        "x",
    ),
    "no offsets for a tensor": (
        {piece_name(1): piece_file({"w": ((), W)}, info={})},
        CorruptError,
        "does not list the tensor",
        "w",
    ),
    "information that is no JSON": (
        {piece_name(1): piece_file({"w": ((), W)}, info="[")},
        CorruptError,
        "the DCP_SHARDING_INFO is not valid JSON",
        None,
    ),
    "another version": (
        {piece_name(1): piece_file({"w": ((0, 0), W)}, version="2.0")},
        UnsupportedError,
        "DCP_VERSION '2.0'",
        None,
    ),
    "a file number that no rank has": (
        {
            piece_name(1, 1, 3): piece_file({"w": ((0, 0), W)}),
            piece_name(1, 3, 3): piece_file({"x": ((0, 0), W)}),
        },
        MissingShardError,
        "file 2 of",
        None,
    ),
    "an embedding that is too short": (
        {
            piece_name(1): piece_file({"model.embed_tokens.weight": ((0, 0), W)}),
            "config.json": b'{"vocab_size": 8, "hidden_size": 2}',
        },
        MissingShardError,
        "vocab_size in config.json is 8",
        "model.embed_tokens.weight",
    ),
    "a norm that is too short": (
        {
            piece_name(1): piece_file({"model.norm.weight": ((0,), W[0])}),
            "config.json": b'{"hidden_size": 4}',
        },
        MissingShardError,
        "hidden_size in config.json is 4",
        "model.norm.weight",
    ),
    "a configuration that makes no sense": (
        {piece_name(1): piece_file({"w": ((0, 0), W)}), "config.json": b'{"vocab_size": "8"}'},
        CorruptError,
        "not a positive integer",
        None,
    ),
    "an index with more tensors": (
        {
            piece_name(1): piece_file({"w": ((0, 0), W)}),
            "model.safetensors.index.json": b'{"weight_map": {"w": "a.safetensors", "x": '
            b'"a.safetensors"}}',
        },
        MissingShardError,
        "all its pieces are missing",
        "x",
    ),
    "an index with more bytes": (
        {
            piece_name(1): piece_file({"w": ((0, 0), W)}),
            "model.safetensors.index.json": b'{"metadata":{"total_size":72},'
            b'"weight_map":{"w":"a.safetensors"}}',
        },
        MissingShardError,
        "add up to 48 bytes, but total_size in the index is 72",
        None,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_pieces_that_do_not_add_up_are_refused_by_name(case: str) -> None:
    files, kind, message, key = BROKEN[case]
    with pytest.raises(CheckpointingException) as caught:
        read(MemoryStore(dict(files)))
    assert type(caught.value) is kind and message in caught.value.message, str(caught.value)
    assert caught.value.key == key and (caught.value.file or caught.value.key)


def test_an_index_of_a_wider_dtype_is_only_noted() -> None:
    index = b'{"metadata":{"total_size":96},"weight_map":{"w":"a.safetensors"}}'
    catalog = read(store_of({"w": ((0, 0), W)}, more={"model.safetensors.index.json": index}))
    assert any("is 96" in note for note in catalog.notes)


def test_missing_consolidated_files_point_at_the_pieces() -> None:
    complete = save({"w": W})
    index = b'{"weight_map":{"w":"a.safetensors","x":"b.safetensors"}}'
    store = MemoryStore(
        {
            "a.safetensors": complete,
            "model.safetensors.index.json": index,
            f"sharded/{piece_name(1)}": piece_file({"w": ((0, 0), W)}),
        }
    )
    with pytest.raises(MissingShardError) as caught:
        read(store)
    assert caught.value.file == "b.safetensors" and "sharded" in str(caught.value.hint)


def test_one_ranks_file_alone_is_refused() -> None:
    store = store_of({"w": ((0, 0), W[:3])}, {"w": ((3, 0), W[3:])})
    store.entry = piece_name(1)
    with pytest.raises(UnsupportedError, match="one rank's pieces") as caught:
        read(store)
    assert caught.value.file == piece_name(1)


def test_half_bytes_that_are_cut_inside_a_row_are_refused() -> None:
    pair = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 3)
    fine = store_of({"w": ((0, 0), pair)}, {"w": ((2, 0), pair)})
    assert read(fine).tensors["w"].shape == (4, 3)
    with pytest.raises(UnsupportedError, match="split along its last axis"):
        read(store_of({"w": ((0, 0), pair)}, {"w": ((0, 3), pair)}))
