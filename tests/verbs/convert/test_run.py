"""verbs.convert.run end to end: every pair of formats, on checkpoints of other software, read by
the real readers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.opening.open import open_checkpoint
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange, run
from tests.support.rank_files import assert_same_bits

FORMATS = ("torch", "dcp", "torch_dist", "megatron")
_SOURCES = {
    "torch": "hf/llama/torch_single/model_zip.pt",
    "dcp": "torch_dcp/fsdp2_dp2",
    "torch_dist": "mcore_torch_dist/dense_gqa/tp2_pp2",
    "torch_dist_optim": "mcore0161_torch_dist/dense_gqa/tp2_pp2_optim",
    "megatron": "mcore_legacy/dense_gqa/tp2_pp2",
}


def convert(src: Path, dst: Path, to: str, **options: Any) -> Path:
    """Converts and returns the destination."""
    run(Job(src=src, dst=dst, to=to, fsync=False, **options))
    return dst


def torch_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch file, by its path."""

    def walk(node: object, path: tuple[object, ...]) -> dict[str, torch.Tensor]:
        if isinstance(node, torch.Tensor):
            return {".".join(map(str, path)): node}
        if isinstance(node, dict):
            return {
                k: v for name, item in node.items() for k, v in walk(item, (*path, name)).items()
            }
        if isinstance(node, (list, tuple)):
            return {
                k: v
                for index, item in enumerate(node)
                for k, v in walk(item, (*path, index)).items()
            }
        return {}

    file = path / "checkpoint.pt" if path.is_dir() else path
    return walk(torch.load(file, weights_only=True), ())


def dcp_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a DCP directory (or of a root's one iteration), through torch's own
    loader.
    """
    path = next(path.glob("iter_*"), path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    state = {
        key: torch.full(tuple(meta.size), 0, dtype=meta.properties.dtype)
        for key, meta in metadata.state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    dcp.load(
        state,
        checkpoint_id=path,
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=True,
    )
    return state


def tensors_of(path: Path, format: str) -> dict[str, torch.Tensor]:
    """Every tensor by key, through the real reader of a format of global tensors."""
    return torch_tensors(path) if format == "torch" else dcp_tensors(path)


def assert_same_tensors(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for key in wanted:
        assert_same_bits(actual[key], wanted[key], key)


@pytest.mark.each_value
@pytest.mark.parametrize("to", ["torch", "dcp", "torch_dist"])
@pytest.mark.parametrize("source", ["torch", "dcp", "torch_dist", "torch_dist_optim"])
def test_global_formats_convert_into_one_another_bit_for_bit(
    golden: Path, tmp_path: Path, source: str, to: str
) -> None:
    src = golden / _SOURCES[source]
    if src.is_dir() and "mcore" in str(src):
        src = src / "iter_0000010"
    wanted = tensors_of(src, "torch" if source == "torch" else "dcp")
    tensors = tensors_of(convert(src, tmp_path / "out", to), to)
    assert_same_tensors({key: tensors[key] for key in wanted}, wanted)
    assert all(
        "rng" in key or "common_step" in key or "state" in key
        for key in tensors.keys() - wanted.keys()
    )


@pytest.mark.each_value
@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("source", ["tp1_pp1", "tp2_pp2", "tp4_pp1", "tp2_pp2_vpp2"])
def test_rank_files_become_the_true_global_weights(
    golden: Path, tmp_path: Path, source: str, to: str
) -> None:
    tensors = tensors_of(
        convert(golden / "mcore_legacy/dense_gqa" / source, tmp_path / "out", to), to
    )
    model = {
        key.removeprefix("model."): tensor
        for key, tensor in tensors.items()
        if key.startswith("model.")
    }
    wanted = {}
    for key, tensor in load_file(golden / "oracle/dense_gqa/global.safetensors").items():
        key = key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        wanted[key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")] = tensor
    assert_same_tensors(model, wanted)


@pytest.mark.parametrize("middle", ["torch", "dcp"])
def test_rank_files_survive_a_detour_through_a_global_format(
    golden: Path, tmp_path: Path, middle: str
) -> None:
    from tests.support.rank_files import assert_same_weights

    convert(golden / _SOURCES["megatron"], tmp_path / "a", middle)
    change = TopologyChange(tp=2, pp=2)
    convert(tmp_path / "a", tmp_path / "b", "megatron", topology=change)
    assert_same_weights(tmp_path / "b", golden / _SOURCES["megatron"])


def test_written_torch_files_load_with_torchs_defaults_and_zip_tools(
    golden: Path, tmp_path: Path
) -> None:
    import zipfile

    out = convert(golden / _SOURCES["megatron"], tmp_path / "model.pt", "torch")
    assert out.is_file()
    loaded = torch.load(out)
    assert loaded["iteration"] == 10
    assert isinstance(loaded["model"], dict)
    assert torch.load(out, mmap=True).keys() == loaded.keys()
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert (tmp_path / "model.pt.ckpt-manifest.json").is_file()


def test_dcp_with_nested_containers_unflattens_in_torch(golden: Path, tmp_path: Path) -> None:
    convert(golden / _SOURCES["dcp"], tmp_path / "a.pt", "torch")
    convert(tmp_path / "a.pt", tmp_path / "b", "dcp")
    dcp_to_torch_save(golden / _SOURCES["dcp"], tmp_path / "wanted.pt")
    dcp_to_torch_save(tmp_path / "b", tmp_path / "found.pt")
    wanted = torch.load(tmp_path / "wanted.pt", weights_only=True)
    for name in ("a.pt", "found.pt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert str(_plain(loaded)) == str(_plain(wanted))


def _plain(node: object) -> object:
    if isinstance(node, torch.Tensor):
        return node.tolist()
    if isinstance(node, dict):
        return {
            key: _plain(item) for key, item in sorted(node.items(), key=lambda pair: str(pair[0]))
        }
    if isinstance(node, (list, tuple)):
        return [_plain(item) for item in node]
    return node


def test_two_runs_are_byte_identical(golden: Path, tmp_path: Path) -> None:
    for to in FORMATS:
        convert(golden / _SOURCES["megatron"], tmp_path / "a" / to, to)
        convert(
            golden / _SOURCES["megatron"], tmp_path / "b" / to, to, threads=1, memory_bytes=70 << 20
        )
    first = {
        p.relative_to(tmp_path / "a"): p.read_bytes()
        for p in (tmp_path / "a").rglob("*")
        if p.is_file()
    }
    second = {
        p.relative_to(tmp_path / "b"): p.read_bytes()
        for p in (tmp_path / "b").rglob("*")
        if p.is_file()
    }
    assert first == second


def test_dtype_include_exclude_and_rename_do_what_they_say(golden: Path, tmp_path: Path) -> None:
    src = golden / _SOURCES["torch"]
    before = torch_tensors(src)
    out = convert(
        src,
        tmp_path / "out",
        "dcp",
        dtype=((None, "float32"), ("norm.weight", "float16")),
        include=("model",),
        exclude=("*.mlp.*",),
        rename=((r"^model\.", ""),),
    )
    after = dcp_tensors(out)
    wanted = {
        key.removeprefix("model."): tensor.to(
            torch.float16 if key == "model.norm.weight" else torch.float32
        )
        for key, tensor in before.items()
        if key.startswith("model.") and ".mlp." not in key
    }
    assert_same_tensors(after, wanted)


def test_a_dry_run_writes_nothing_and_tells_everything(golden: Path, tmp_path: Path) -> None:
    change = TopologyChange(tp=2, source={"tp": 4})
    job = Job(
        src=golden / "mcore_legacy/dense_gqa/tp4_pp1",
        dst=tmp_path / "out",
        topology=change,
        is_reshard=True,
    )
    with prepare(job) as prepared:
        assert [path for path, _ in prepared.files][-1] == "latest_checkpointed_iteration.txt"
        assert prepared.plan.read_bytes > 0
        assert prepared.files_for_rank(0) == [f"mp_rank_{r:02d}/model_optim_rng.pt" for r in (0, 1)]
        assert prepared.as_dict()["memory_bytes"] == prepared.plan.memory_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_rank_is_a_directory_however_many_files_it_has(golden: Path) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
    with prepare(Job(src=source, topology=TopologyChange(tp=4), is_reshard=True)) as prepared:
        needed = [prepared.files_for_rank(rank) for rank in range(4)]
        with pytest.raises(
            UsageError, match="no rank 4, because the destination has 4 rank directories"
        ):
            prepared.files_for_rank(4)
    assert {len(files) for files in needed} <= {
        2,
        4,
    }  # copies on other ranks are among them, where there are such
    for rank, files in enumerate(needed):
        own = f"mp_rank_{rank // 2:02d}"
        assert {f"{own}/model_optim_rng.pt", f"{own}/distrib_optim.pt"} <= set(files)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"topology": TopologyChange(tp=2, source={"tp": 8})},
            UsageError,
            "--tp 8 does not match the checkpoint, which has TP 4",
        ),
        ({"topology": TopologyChange(tp=3)}, UnsupportedError, "3"),
        ({"topology": TopologyChange(pp=3)}, UnsupportedError, "3"),
        ({"topology": TopologyChange(vpp=2)}, UnsupportedError, "chunk"),
        ({"topology": TopologyChange(ep=2)}, UnsupportedError, "expert"),
        ({"dtype": ((None, "float7"),)}, UsageError, "float7"),
        ({"include": ("nothing",)}, UsageError, "nothing"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_is_written(
    golden: Path,
    tmp_path: Path,
    options: dict[str, Any],
    error: type[CheckpointingException],
    text: str,
) -> None:
    job = Job(
        src=golden / "mcore_legacy/dense_gqa/tp4_pp1",
        dst=tmp_path / "out",
        is_reshard=True,
        **options,
    )
    with pytest.raises(error, match=text):
        run(job)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source", ["mcore_legacy/dense_gqa/tp2_pp2_optim", "mcore_legacy/dense_gqa/tp1_pp1_dp2_distopt"]
)
def test_an_optimizer_is_refused_or_left_out_by_request(
    golden: Path, tmp_path: Path, source: str
) -> None:
    with pytest.raises(UnsupportedError, match="--no-optim"):
        run(Job(src=golden / source, dst=tmp_path / "out", to="hf", optim="carry", fsync=False))
    report = run(Job(src=golden / source, dst=tmp_path / "hf", to="hf", fsync=False))
    assert report.dropped[0] == "optimizer (Hugging Face checkpoints do not include it)"
    report = run(
        Job(src=golden / source, dst=tmp_path / "out", to="megatron", optim="drop", fsync=False)
    )
    assert any("optimizer" in text for text in (*report.notes, *report.dropped))


def test_the_proposed_name_stands_beside_the_source(golden: Path, tmp_path: Path) -> None:
    import shutil

    src = tmp_path / "run"
    shutil.copytree(golden / _SOURCES["megatron"], src)
    report = run(Job(src=src, topology=TopologyChange(tp=4, pp=1), is_reshard=True, fsync=False))
    assert Path(report.dst) == tmp_path / "run-tp4-pp1"
    assert open_checkpoint(Path(report.dst)).iteration == 10
    assert Path(run(Job(src=src, to="dcp", fsync=False)).dst) == tmp_path / "run.dcp"


def test_the_proposed_hugging_face_model_is_a_directory_with_its_config(
    golden: Path, tmp_path: Path
) -> None:
    import shutil

    src = tmp_path / "run"
    shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1", src)
    report = run(Job(src=src, to="hf", fsync=False))
    assert Path(report.dst) == tmp_path / "run-hf"
    assert (tmp_path / "run-hf" / "config.json").is_file()


def test_dcp_of_a_megatron_model_becomes_a_stacked_torch_dist(golden: Path, tmp_path: Path) -> None:
    convert(golden / _SOURCES["megatron"], tmp_path / "a", "dcp")
    convert(tmp_path / "a", tmp_path / "b", "torch_dist")
    checkpoint = open_checkpoint(tmp_path / "b")
    assert checkpoint.iteration == 10
    assert "decoder.layers.mlp.linear_fc1.weight" in checkpoint.catalog.tensors
    assert not any("rng_state" in key for key in checkpoint.catalog.tensors)
    wanted = open_checkpoint(golden / _SOURCES["torch_dist"])
    assert checkpoint.catalog.tensors.keys() == wanted.catalog.tensors.keys()


def test_objects_that_hold_tensors_reach_torch_dist(tmp_path: Path) -> None:
    dcp.save(
        {"tup": (torch.ones(3), 2), "w": torch.zeros(2)}, checkpoint_id=tmp_path / "a", no_dist=True
    )
    convert(tmp_path / "a", tmp_path / "b", "torch_dist")
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(loaded["tup"][0], torch.ones(3))
    assert loaded["tup"][1] == 2


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_sizes_for_a_format_without_layout_are_refused(
    golden: Path, tmp_path: Path, to: str
) -> None:
    with pytest.raises(UsageError, match="no parallel layout"):
        convert(golden / _SOURCES["megatron"], tmp_path / "a", to, topology=TopologyChange(tp=4))


def test_sizes_of_a_source_without_layout_are_answered_with_those_to_write(
    golden: Path, tmp_path: Path
) -> None:
    source, dst = golden / "hf/llama/safetensors_single", tmp_path / "out"
    for sizes, hint in (({}, "use --tp-new 2$"), ({"tp": 2}, "^omit --tp$")):
        topology = TopologyChange(source={"tp": 2}, **sizes)
        with pytest.raises(UsageError) as refusal:
            run(
                Job(
                    src=source,
                    dst=dst,
                    to="megatron",
                    topology=topology,
                    transformer_impl="local",
                )
            )
        assert re.search(hint, refusal.value.hint or "")


def test_a_vocabulary_size_that_was_given_is_written_into_the_arguments(
    golden: Path, tmp_path: Path
) -> None:
    src = golden / "mcore_legacy/dense_gqa/tp2_pp1"
    change = TopologyChange(tp=4)
    dst = tmp_path / "a"
    report = run(Job(src=src, dst=dst, to="megatron", topology=change, vocab_size=310, fsync=False))
    assert any(
        "rows 300 to 309 are kept as tokens (--vocab-size 310)" in note for note in report.notes
    )
    convert(tmp_path / "a", tmp_path / "b", "megatron", topology=TopologyChange(tp=2))
    convert(tmp_path / "b", tmp_path / "c", "dcp")
    assert dcp_tensors(tmp_path / "c")["model.embedding.word_embeddings.weight"].shape == (310, 64)
    convert(src, tmp_path / "d", "megatron", topology=change, keep_padded_vocab=True)
    convert(tmp_path / "d", tmp_path / "e", "dcp")
    assert dcp_tensors(tmp_path / "e")["model.embedding.word_embeddings.weight"].shape == (384, 64)


@pytest.mark.parametrize("name", ["mcore_legacy/dense_gqa/tp2_pp1", _SOURCES["torch_dist"]])
def test_a_vocabulary_size_that_would_cut_off_tokens_is_refused(
    golden: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError, match=r"the rows of 100 tokens would be lost") as caught:
        convert(golden / name, tmp_path / "a", "megatron", vocab_size=200)
    assert "a number from 300 to 384" in (caught.value.hint or "")
    assert not (tmp_path / "a").exists()


def test_a_root_that_is_a_list_becomes_a_dcp_that_torch_can_load(tmp_path: Path) -> None:
    torch.save([torch.ones(2), {"a": torch.zeros(3)}], tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a", "dcp")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "y.pt")
    loaded = torch.load(tmp_path / "y.pt", weights_only=True)
    assert torch.equal(loaded["value"][1]["a"], torch.zeros(3))


@pytest.mark.parametrize(
    "options",
    [
        {"rename": (("layers.0", "layers.9"),)},
        {"exclude": ("*layers.3*",)},
        {"exclude": ("*layers.3.mlp*",)},
        {"dtype": (("nomatch*", "float32"),)},
    ],
)
@pytest.mark.parametrize("to", ["megatron", "torch_dist"])
def test_changes_that_would_break_a_megatron_model_are_usage_errors(
    golden: Path, tmp_path: Path, options: dict[str, Any], to: str
) -> None:
    with pytest.raises(UsageError):
        convert(golden / _SOURCES["megatron"], tmp_path / "a", to, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"vocab_size": 5}, {"keep_padded_vocab": True}, {"rules": Path("absent.toml")}]
)
def test_layout_options_without_a_layout_are_refused(
    golden: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointingException):
        convert(golden / _SOURCES["dcp"], tmp_path / "a", "torch", **options)


def test_an_ordinary_args_entry_is_no_megatron_checkpoint(tmp_path: Path) -> None:
    import argparse

    torch.save({"args": argparse.Namespace(a=1), "w": torch.ones(2)}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a", "torch_dist")
    assert torch.equal(dcp_tensors(tmp_path / "a")["w"], torch.ones(2))


def test_no_optim_leaves_the_optimizer_of_global_tensors_out(golden: Path, tmp_path: Path) -> None:
    report = run(
        Job(
            src=golden / _SOURCES["torch_dist_optim"], dst=tmp_path / "a", optim="drop", fsync=False
        )
    )
    assert any("optimizer" in text for text in report.dropped)
    catalog = open_checkpoint(tmp_path / "a").catalog
    assert not any("optimizer" in key for key in catalog.tensors)


def test_what_nesting_loses_is_noted(tmp_path: Path) -> None:
    from collections import OrderedDict

    nested = {
        "m": OrderedDict(w=torch.nn.Parameter(torch.ones(2))),
        "t": (torch.ones(1), 2),
        0: {"k": torch.ones(3)},
    }
    torch.save(nested, tmp_path / "x.pt")
    notes = " ".join(
        run(Job(src=tmp_path / "x.pt", dst=tmp_path / "a", to="dcp", fsync=False)).notes
    )
    for word in ("requires_grad", "OrderedDict", "tuples", "strings"):
        assert word in notes


@pytest.mark.parametrize("to", ["zarr3", "safetensors"])
def test_nesting_that_is_kept_is_not_called_lost(to: str, tmp_path: Path) -> None:
    nested = {"m": {0: torch.nn.Parameter(torch.ones(2))}, "t": (torch.ones(1), 2)}
    torch.save(nested, tmp_path / "x.pt")
    assert run(Job(src=tmp_path / "x.pt", dst=tmp_path / "a", to=to, fsync=False)).notes == ()
    run(Job(src=tmp_path / "a", dst=tmp_path / "y.pt", to="torch", fsync=False))
    loaded = torch.load(tmp_path / "y.pt")
    assert torch.equal(loaded["m"][0], torch.ones(2)) and isinstance(
        loaded["m"][0], torch.nn.Parameter
    )
    assert isinstance(loaded["t"], tuple)


@pytest.mark.parametrize("to", ["zarr3", "safetensors", "torch_dist", "zarr"])
def test_containers_that_become_parts_of_names_are_noted(to: str, tmp_path: Path) -> None:
    torch.save({"m": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    (note,) = run(Job(src=tmp_path / "x.pt", dst=tmp_path / "a", to=to, fsync=False)).notes
    assert "such as m.w" in note
    torch.save({"m.w": torch.ones(2), "n~1": torch.ones(2)}, tmp_path / "y.pt")
    assert run(Job(src=tmp_path / "y.pt", dst=tmp_path / "b", to=to, fsync=False)).notes == ()


@pytest.mark.parametrize("root", [torch.ones(2), [torch.ones(2)]], ids=["tensor", "list"])
def test_a_dict_around_the_root_is_noted(root: object, tmp_path: Path) -> None:
    torch.save(root, tmp_path / "x.pt")
    (note,) = run(Job(src=tmp_path / "x.pt", dst=tmp_path / "a", to="dcp", fsync=False)).notes
    assert "under the name 'value'" in note


def test_tensors_that_share_bytes_still_do_when_the_first_is_left_out(tmp_path: Path) -> None:
    w = torch.arange(1000.0)
    torch.save({"w": w, "x": w, "y": w}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a.pt", "torch", exclude=("w",))
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["x"].data_ptr() == loaded["y"].data_ptr()
    assert torch.equal(loaded["y"], w)


def test_a_single_file_says_what_it_cannot_hold(golden: Path, tmp_path: Path) -> None:
    source = convert(golden / "hf/llama/safetensors_single", tmp_path / "hf", "safetensors")
    torch.save({"w": torch.ones(2), "step": 7}, tmp_path / "step.pt")
    for src, lost in (
        (source, "sidecar files, which this format does not include: config.json"),
        (tmp_path / "step.pt", "step: not a tensor,"),
    ):
        report = run(
            Job(src=src, dst=tmp_path / f"{src.name}.safetensors", to="safetensors", fsync=False)
        )
        assert any(text.startswith(lost) for text in report.dropped)
        assert (
            run(
                Job(src=src, dst=tmp_path / f"{src.name}-dir", to="safetensors", fsync=False)
            ).dropped
            == ()
        )


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["dcp", "torch_dist", "safetensors"])
@pytest.mark.parametrize(
    "source",
    ["torch_dcp/fsdp2_dp4", "mcore_legacy/dense_gqa/tp2_pp2", "hf/llama/safetensors_single"],
)
def test_a_limit_on_file_sizes_holds_whatever_wrote_the_source(
    source: str, target: str, golden: Path, tmp_path: Path
) -> None:
    from tests.support.real_readers import READERS

    src, limit = golden / source, 20_000
    run(Job(src=src, dst=tmp_path / "whole", to=target, fsync=False))
    run(Job(src=src, dst=tmp_path / "split", to=target, max_shard_size=limit, fsync=False))
    assert READERS[target](tmp_path / "split") == READERS[target](tmp_path / "whole")
    names = ["*.safetensors"] if target == "safetensors" else ["*.distcp"]
    sizes = [path.stat().st_size for name in names for path in (tmp_path / "split").rglob(name)]
    assert len(sizes) > 3
    largest = max(len(data) for _, _, data in READERS[target](tmp_path / "whole").values())
    assert max(sizes) <= max(limit, largest) + 4096


def test_zarr_with_its_optimizer_becomes_torch_dist_as_inspect_says(
    golden: Path, tmp_path: Path
) -> None:
    from core.verbs.inspect.summary import summarize

    src = golden / "mcore0121_zarr/dense_gqa/tp2_pp2_optim"
    opened = open_checkpoint(src)
    plain = [entry for entry in summarize(opened).capabilities if "torch_dist" in entry.targets]
    opened.store.close()
    assert [(entry.is_possible, entry.why) for entry in plain] == [(True, None)]
    assert run(Job(src=src, dst=tmp_path / "out", to="torch_dist", fsync=False)).dropped == ()


@pytest.mark.parametrize(
    "source", ["mcore_legacy/dense_gqa/tp2_pp2", "mcore_torch_dist/dense_gqa/tp2_pp2"]
)
def test_rank_files_keep_the_sizes_of_their_source(
    source: str, golden: Path, tmp_path: Path
) -> None:
    """As ``reshard`` does: whoever names no size, or one, does not mean 1 for the others."""
    run(Job(src=golden / source, dst=tmp_path / "out", to="megatron", fsync=False))
    assert sorted(path.name for path in (tmp_path / "out").glob("*/*")) == [
        "mp_rank_00_000",
        "mp_rank_00_001",
        "mp_rank_01_000",
        "mp_rank_01_001",
    ]
    change = TopologyChange(tp=4)
    run(Job(src=golden / source, dst=tmp_path / "tp4", to="megatron", topology=change, fsync=False))
    assert len(list((tmp_path / "tp4").glob("*/*"))) == 8


@pytest.mark.parametrize("changes", [{"stack_layers": True}, {"exclude": ("*norm*",)}])
def test_a_model_that_the_options_make_incomplete_is_no_damaged_one(
    changes: dict[str, Any], golden: Path, tmp_path: Path
) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    with pytest.raises(UsageError) as caught:
        run(Job(src=source, dst=tmp_path / "out", to="hf", **changes))
    assert caught.value.key is not None and "norm" in caught.value.key
