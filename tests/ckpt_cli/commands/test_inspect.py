from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import ZstdCodec

from ckpt_cli.app import main
from ckpt_cli.screen.blocks import list_facts
from tests.support.archives import unpacked
from tests.support.covering import covering_cases

Run = Callable[..., str]


def oracle(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Key → (dtype, shape) of a safetensors file."""
    data = path.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    return {
        key: (item["dtype"], item["shape"]) for key, item in header.items() if key != "__metadata__"
    }


EVERY = [
    ("mcore_legacy/dense_gqa/tp2_pp2", "megatron", None),
    ("mcore_legacy/dense_gqa/tp2_pp1_optim", "megatron", "megatron_float16"),
    ("mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt", "megatron", "megatron_distributed"),
    ("mcore_legacy/dense_gqa/tp1_pp2_vpp2", "megatron", None),
    ("mcore_legacy/dense_gelu/tp2_pp2", "megatron", None),
    ("mcore_legacy/moe_seq/tp2_pp1_ep2", "megatron", None),
    ("mcore_torch_dist/dense_gqa/tp2_pp2", "torch_dist", None),
    ("mcore_torch_dist/dense_gqa/tp2_pp2_optim", "torch_dist", "per_parameter"),
    (
        "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
        "torch_dist",
        "dp_reshardable",
    ),
    (
        "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable",
        "torch_dist",
        "fully_reshardable",
    ),
    ("mcore0161_torch_dist/dense_gelu/tp2_pp2", "torch_dist", None),
    ("mcore0121_torch_dist/dense_gqa/tp2_pp2_optim", "torch_dist", "per_parameter"),
    (
        "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
        "torch_dist",
        "fully_sharded_model_space",
    ),
    (
        "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dp_zero_gather_scatter",
        "torch_dist",
        "dp_zero_gather_scatter",
    ),
    ("torch_dcp/fsdp2_dp4", "dcp", "torch_by_name"),
    ("torch_dcp/tp2_only", "dcp", None),
    ("hf/llama/torch_single/model_zip.pt", "torch", None),
    ("hf/llama/torch_single/nested_zip.pt", "torch", None),
]


@pytest.mark.parametrize(
    ("name", "format", "optimizer"),
    covering_cases(
        (pytest.param(*row) for row in EVERY),
        lambda name, format, optimizer: {"what": (format, optimizer)},
    ),
    ids=lambda value: str(value).replace("/", "-"),
)
def test_every_golden_checkpoint_is_told_apart(
    name: str,
    format: str,
    optimizer: str | None,
    golden: Path,
    shown: Callable[..., Any],
    run: Run,
    request: pytest.FixtureRequest,
) -> None:
    page = shown(golden / name)
    assert page["schema"] == "ckpt.inspect/1"
    assert page["format"] == format
    assert (page["optimizer"] or {}).get("format") == optimizer
    assert page["totals"]["tensors"] == len(page["tensors"])
    assert page["totals"]["bytes"] == sum(tensor["bytes"] for tensor in page["tensors"])
    assert page["file_bytes"] > 0
    # Which other page is shown goes round, without --long for every third.
    turn, number = divmod([row[0] for row in EVERY].index(name), 3)
    if number == 0 or request.config.getoption("--long"):
        assert run(golden / name, *([], ["--flat"], ["--sort", "size"])[(turn + number) % 3])


@pytest.mark.first(2)
@pytest.mark.parametrize("layout", ["tp1_pp1", "tp2_pp2", "tp4_pp1", "tp1_pp2_vpp2"])
def test_rank_files_are_shown_as_the_global_model(
    layout: str, golden: Path, shown: Callable[..., Any]
) -> None:
    page = shown(golden / "mcore_legacy/dense_gqa" / layout)
    true = {
        key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
            "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
        ): item
        for key, item in oracle(golden / "oracle/dense_gqa/global.safetensors").items()
    }
    shapes = {
        tensor["key"]: tensor["shape"] for tensor in page["tensors"] if tensor["group"] == "model"
    }
    assert shapes.keys() == true.keys()
    vocab = ("embedding.word_embeddings.weight", "output_layer.weight")
    assert {key: shape for key, shape in shapes.items() if key not in vocab} == {
        key: shape for key, (_, shape) in true.items() if key not in vocab
    }
    assert page["is_unsharded"]
    assert page["iteration"] == 10
    sizes = [int(part[2:].lstrip("p")) for part in layout.split("_")[:2]]
    assert [page["parallel"]["tp"], page["parallel"]["pp"]] == sizes
    assert page["model"]["num_layers"] == 4


def test_layers_are_folded(golden: Path, run: Run) -> None:
    page = run(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    assert "layers.[0-3]" in page
    assert "4 × " in page
    assert "layers.0" not in page
    assert "decoder.layers.0." in run(golden / "mcore_legacy/dense_gqa/tp2_pp2", "--flat")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "mcore_legacy/dense_gqa/tp2_pp1_optim",
            "Adam: exp_avg, exp_avg_sq, fp32 masters, 3 × 678 KiB",
        ),
        pytest.param(
            "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
            "Adam: exp_avg, exp_avg_sq, fp32 masters, 3 × 678 KiB",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
            "Adam: exp_avg, exp_avg_sq, fp32 masters, 3 × 676 KiB",
            marks=pytest.mark.long,
        ),
        ("torch_dcp/fsdp2_dp4", "Adam: exp_avg, exp_avg_sq, 2 × 117 KiB; step, 84 B"),
    ],
)
def test_the_optimizer_is_one_line_unless_it_is_asked_for(
    name: str, line: str, golden: Path, run: Run
) -> None:
    page = run(golden / name)
    assert page.splitlines()[-1] == f"optimizer  {line} (--optim shows them)"
    assert page.count("exp_avg_sq") == 1
    tree = run(golden / name, "--optim")
    assert line not in tree
    # Entries that are asked for otherwise are not folded.
    assert run(golden / name, "--flat").count("exp_avg_sq") > 1
    assert run(golden / name, "--tree", "*exp_avg_sq*").count("exp_avg_sq") > 0


def test_a_checkpoint_of_nothing_but_an_optimizer_shows_its_tensors(
    tmp_path: Path, run: Run
) -> None:
    torch.save({"state": {i: {"exp_avg": torch.zeros(3)} for i in range(5)}}, tmp_path / "x.pt")
    assert "state.[0-4]" in run(tmp_path / "x.pt")


def test_the_model_is_described(golden: Path, run: Run, shown: Callable[..., Any]) -> None:
    llama = golden / "hf/llama/safetensors_sharded"
    assert (
        "model      llama · 40.8 K parameters · 3 layers · hidden 32 · 4 heads in 2 groups"
        " · SwiGLU 80 · vocabulary 130\n"
    ) in run(llama)
    assert "layers.[0-2]" in run(llama)
    page = shown(llama)
    assert page["model"] == {}
    assert page["architecture"] == {
        "family": "llama",
        "parameters": 40_800,
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "groups": 2,
        "ffn": 80,
        "swiglu": True,
        "experts": None,
        "experts_per_token": None,
        "expert_ffn": None,
        "vocabulary": 130,
        "padded_vocabulary": None,
        "tied": False,
    }
    assert "4 experts of 32, top 2" in run(golden / "mcore_legacy/moe_seq/tp1_pp1")
    assert "model      30.0 K parameters\n" in run(golden / "torch_dcp/fsdp2_dp4")


def test_a_megatron_model_of_a_known_family_becomes_hugging_faces_without_an_option(
    golden: Path, shown: Callable[..., Any]
) -> None:
    page = shown(golden / "mcore_legacy/dense_gqa/tp2_pp1_optim")
    (entry,) = [item for item in page["can"] if "hf" in item["to"]]
    assert (entry["possible"], entry["why"]) == (True, "the optimizer is left out")


def test_one_tensor_shows_which_rank_holds_which_box(
    golden: Path, shown: Callable[..., Any], run: Run
) -> None:
    key = "decoder.layers.3.self_attention.linear_proj.weight"
    page = shown(golden / "mcore_legacy/dense_gqa/tp2_pp2", key)
    (tensor,) = page["tensors"]
    places = tensor["places"]
    assert [(place["offset"], place["shape"]) for place in places] == [
        ([0, 0], [64, 32]),
        ([0, 32], [64, 32]),
    ]
    assert [(place["rank"]["tp"], place["rank"]["pp"]) for place in places] == [(0, 1), (1, 1)]
    assert [place["file"] for place in places] == [
        "mp_rank_00_001/model_optim_rng.pt",
        "mp_rank_01_001/model_optim_rng.pt",
    ]
    text = run(golden / "mcore_legacy/dense_gqa/tp2_pp2", key)
    assert "[0:64, 32:64]" in text
    assert "mp_rank_01_001/model_optim_rng.pt" in text


@pytest.mark.each_value
@pytest.mark.parametrize(
    "name", ["mcore_legacy/dense_gqa/tp4_pp1", "mcore_legacy/dense_gqa/tp1_pp2"]
)
@pytest.mark.parametrize(
    "key", ["decoder.layers.2.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc1.weight"]
)
def test_values_are_those_of_the_true_tensor(
    name: str, key: str, golden: Path, shown: Callable[..., Any]
) -> None:
    (tensor,) = shown(golden / name, key, "--values", "200")["tensors"]
    data = (golden / "oracle/dense_gqa/global.safetensors").read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    begin, _ = json.loads(data[8 : 8 + n])[key]["data_offsets"]
    wide = b"".join(
        b"\0\0" + data[8 + n + begin + 2 * i : 8 + n + begin + 2 * i + 2] for i in range(200)
    )
    assert tensor["values"] == list(struct.unpack("<200f", wide))


def test_values_of_every_dtype_in_a_nested_file_can_be_shown(
    golden: Path, shown: Callable[..., Any]
) -> None:
    tensors = shown(golden / "hf/llama/torch_single/nested_zip.pt")["tensors"]
    assert len({tensor["dtype"] for tensor in tensors}) > 1
    for tensor in tensors:
        (entry,) = shown(
            golden / "hf/llama/torch_single/nested_zip.pt", tensor["key"], "--values", 5
        )["tensors"]
        n = 1
        for extent in tensor["shape"]:
            n *= extent
        assert len(entry["values"]) == min(5, n)


def test_patterns_choose_tensors_and_a_pasted_fold_works(
    golden: Path, shown: Callable[..., Any]
) -> None:
    path = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    keys = [t["key"] for t in shown(path, "decoder.layers.[1-2].mlp.linear_fc2")["tensors"]]
    assert keys == [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in (1, 2)]


def test_a_pattern_without_a_match_is_a_usage_error(
    golden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(golden / "torch_dcp/tp2_only"), "no.such.key"]) == 2
    assert "no tensor or object matches 'no.such.key'" in capsys.readouterr().err


def test_objects_are_shown_and_nothing_is_run(
    golden: Path, shown: Callable[..., Any], run: Run
) -> None:
    path = golden / "torch_dcp/fsdp2_dp2"
    (entry,) = shown(path, "app.optim.param_groups.0.betas")["objects"]
    assert entry == {"key": "app.optim.param_groups.0.betas", "value": [0.9, 0.999]}
    assert "0.999" in run(path, "app.optim.param_groups.0.betas")


@pytest.mark.parametrize(
    "name",
    [
        "mcore_legacy/dense_gqa/tp2_pp2/iter_0000010",
        "mcore_legacy/dense_gqa/tp2_pp2/iter_0000010/mp_rank_01_000",
    ],
)
def test_an_iteration_and_one_rank_directory_open_too(
    name: str, golden: Path, shown: Callable[..., Any]
) -> None:
    page = shown(golden / name)
    assert page["format"] == "megatron"
    assert page["is_unsharded"] == ("mp_rank" not in name)
    assert page["is_unsharded"] or page["notes"]


def test_an_object_of_every_rank_can_be_named_without_the_rank(
    golden: Path, shown: Callable[..., Any]
) -> None:
    objects = shown(golden / "mcore_legacy/dense_gqa/tp2_pp1", "iteration")["objects"]
    assert objects == [{"key": f"mp_rank_{rank:02d}:iteration", "value": 10} for rank in (0, 1)]


def test_capabilities_name_formats_and_reasons(golden: Path, shown: Callable[..., Any]) -> None:
    def targets(can: list[dict[str, Any]]) -> set[str]:
        return {
            name
            for item in can
            if item["action"] == "convert" and item["possible"]
            for name in item["to"]
        }

    dense = shown(golden / "mcore_legacy/dense_gqa/tp2_pp2")["can"]
    assert [item["possible"] for item in dense if item["action"] == "reshard"] == [True]
    assert targets(dense) >= {"dcp", "torch_dist", "torch", "zarr3", "safetensors"}
    plain = shown(golden / "torch_dcp/tp2_only")["can"]
    assert [
        (item["possible"], bool(item["why"])) for item in plain if item["action"] == "reshard"
    ] == [(False, True)]
    assert "torch" in targets(plain)
    named = shown(golden / "hf/llama/safetensors_single")["can"]
    assert "megatron" in targets(named)
    wide = [item for item in named if "deepspeed_universal" in item["to"]]
    assert [item["why"] for item in wide] == ["with the weights cast: --dtype float32"]


def test_the_limit_counts_lines_and_zero_means_all(golden: Path, run: Run) -> None:
    path = golden / "torch_dcp/fsdp2_dp2"
    lines = run(path, "--flat", "--limit", 3).splitlines()
    assert len(lines) == 4
    assert "more lines" in lines[-1]
    assert (
        len(run(path, "--flat").splitlines())
        == len(run(path, "--flat", "--limit", 0).splitlines())
        > 50
    )


def test_sort_by_size_puts_the_largest_first(golden: Path, shown: Callable[..., Any]) -> None:
    sizes = [
        tensor["bytes"]
        for tensor in shown(golden / "torch_dcp/fsdp2_dp2", "--sort", "size")["tensors"]
    ]
    assert sizes == sorted(sizes, reverse=True)
    names = [
        tensor["key"]
        for tensor in shown(golden / "torch_dcp/fsdp2_dp2", "--sort", "name")["tensors"]
    ]
    assert names == sorted(names)


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, run: Run) -> None:
    import torch

    torch.save(
        {"\x1b]0;owned\x07\x1b[2J": torch.zeros(2), "[red]markup[/red]": torch.ones(1)},
        tmp_path / "a.pt",
    )
    for options in ([], ["--flat"], ["*owned*"]):
        page = run(tmp_path / "a.pt", *options)
        assert "\x1b" not in page
        assert "\x07" not in page
        assert "\\x1b]0;owned\\x07" in page
    assert "[red]markup[/red]" in run(tmp_path / "a.pt")


def test_files_beside_the_weights_are_counted_and_not_shown_as_tensors(
    golden: Path, shown: Callable[..., Any], run: Run
) -> None:
    source = golden / "hf/llama/safetensors_sharded"
    page = shown(source)
    assert page["beside"] == ["config.json", "generation_config.json"]
    assert not any("file:" in tensor["key"] for tensor in page["tensors"])
    assert "2 other files: config.json, generation_config.json" in run(source)
    assert shown(golden / "torch_dcp/tp2_only")["beside"] == []


def test_compressed_arrays_say_how_long_they_are_and_show_their_numbers(
    tmp_path: Path, shown: Callable[..., Any], run: Run
) -> None:
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=3)
    array = group.create_array(
        "a", shape=(64, 32), chunks=(32, 32), dtype="int32", compressors=ZstdCodec(level=3)
    )
    array[:] = np.arange(64 * 32, dtype="int32").reshape(64, 32)
    (tensor,) = shown(tmp_path / "z", "a", "--values", 3)["tensors"]
    assert tensor["values"] == [0, 1, 2]
    assert len(tensor["places"]) == 2
    for place, name in zip(tensor["places"], ("0", "1"), strict=True):
        assert place["bytes"] == 32 * 32 * 4
        assert place["stored_bytes"] == (tmp_path / "z/a/c" / name / "0").stat().st_size
        assert "zstd" in place["encoding"]
    text = run(tmp_path / "z", "a")
    assert "stored as" in text
    assert "of 4.00 KiB" in text
    assert "in the files" in text


def test_plain_arrays_have_no_encoding(golden: Path, shown: Callable[..., Any], run: Run) -> None:
    (tensor,) = shown(golden / "torch_dcp/tp2_only", "model.norm.weight")["tensors"]
    assert {place["encoding"] for place in tensor["places"]} == {None}
    assert "stored as" not in run(golden / "torch_dcp/tp2_only", "model.norm.weight")


def test_float8_and_its_scales_are_shown_as_they_are_stored(
    tmp_path: Path, shown: Callable[..., Any], run: Run
) -> None:
    weight = torch.tensor([[1.0, 448.0]]).to(torch.float8_e4m3fn)
    torch.save({"a.weight": weight, "a.weight_scale_inv": torch.tensor([[0.5]])}, tmp_path / "x.pt")
    page = shown(tmp_path / "x.pt", "a.*", "--values", 2)
    assert [(t["key"], t["dtype"], t["values"]) for t in page["tensors"]] == [
        ("a.weight", "float8_e4m3fn", [1.0, 448.0]),
        ("a.weight_scale_inv", "float32", [0.5]),
    ]
    assert "float8_e4m3fn" in run(tmp_path / "x.pt")


def test_entries_that_no_conversion_takes_along_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = unpacked("deepspeed_optimizers", tmp_path) / "bnb2"
    assert main(["inspect", str(run_dir)]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("not carried")
    ]
    assert "flat group 0 (8-bit bitsandbytes" in line
    assert main(["inspect", str(run_dir), "--json"]) == 0
    entry, attributes = json.loads(capsys.readouterr().out)["dropped"]
    assert entry in line and attributes.startswith("module._metadata (module versions")

    # Of many reasons, the first are shown, and the number of the others.
    shown = [cell for _, cell in list_facts("not carried", [f"reason {n}" for n in range(40)])]
    assert len(shown) == 13 and "28 more (--json lists all)" in str(shown[-1])
