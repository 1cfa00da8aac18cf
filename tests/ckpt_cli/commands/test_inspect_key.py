"""KEYs of ``ckpt inspect`` that are parts of names, values of objects, or wrong; ``--stats``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_cli.app import main

Run = Callable[..., str]
LLAMA = "hf/llama/safetensors_sharded"
RANKS = "mcore_legacy/dense_gqa/tp2_pp2"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``ckpt inspect`` with a mistake; returns stderr."""

    def call(*arguments: object) -> str:
        assert main(["inspect", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    return call


def test_a_part_of_several_names_lists_them(
    golden: Path, run: Run, shown: Callable[..., Any]
) -> None:
    lines = run(golden / LLAMA, "Q_PROJ").splitlines()
    assert lines[0] == "note: no key matches 'Q_PROJ', but 3 names contain it"
    assert [line.split()[0] for line in lines[1:]] == [
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)
    ]
    page = shown(golden / LLAMA, "q_proj")
    assert len(page["tensors"]) == 3
    assert "no key matches 'q_proj', but 3 names contain it" in page["notes"]


def test_a_part_of_one_name_shows_its_details(golden: Path, run: Run) -> None:
    page = run(golden / LLAMA, "embed_tok")
    assert "model.embed_tokens.weight\n" in page
    assert "bfloat16" in page
    assert "stored" in page


def test_a_name_is_not_searched(golden: Path, shown: Callable[..., Any]) -> None:
    page = shown(golden / LLAMA, "model.norm")
    assert [tensor["key"] for tensor in page["tensors"]] == ["model.norm.weight"]
    assert not any("no key matches" in note for note in page["notes"])


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        (RANKS, "decoder.layers.3.mlp.liner_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
        (RANKS, "args.hiden_size", "args.hidden_size"),
        (LLAMA, "args.hidden_size", "config.hidden_size"),
        ("mcore_torch_dist/dense_gqa/tp2_pp2", "linear_qvk", "linear_qkv"),
        ("deepspeed/zero1_dp2_bf16", "ds_config.zero_optimization.stag", "zero_optimization.stage"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(
    name: str, wrong: str, right: str, golden: Path, refused: Run
) -> None:
    if not (golden / name).exists():
        pytest.skip("not among the packed checkpoints")
    message = refused(golden / name, wrong)
    assert f"error: no tensor or object matches {wrong!r}" in message
    assert "hint: did you mean " in message
    assert right in message


ARGS = [
    RANKS,
    "mcore_torch_dist/dense_gqa/tp2_pp2",
    pytest.param("mcore0121_zarr/dense_gqa/tp2_pp2", marks=pytest.mark.long),
    pytest.param("mcore0161_torch_dist/dense_gelu/tp2_pp2", marks=pytest.mark.long),
    pytest.param("mcore0121_torch_dist/dense_gqa/tp2_pp2_optim", marks=pytest.mark.long),
]


@pytest.mark.parametrize("name", ARGS)
def test_training_arguments_are_values(
    name: str, golden: Path, run: Run, shown: Callable[..., Any]
) -> None:
    hidden_size = 32 if "gelu" in name else 64
    assert run(golden / name, "args.hidden_size").split() == ["args.hidden_size", str(hidden_size)]
    page = shown(golden / name, "args.hidden_size", "args.num_layers")
    assert page["objects"] == [
        {"key": "args.hidden_size", "value": hidden_size},
        {"key": "args.num_layers", "value": 4},
    ]
    (args,) = shown(golden / name, "args")["objects"]
    assert args["key"] == "args"
    assert args["value"]["hidden_size"] == hidden_size
    listed = {item["key"]: item["value"] for item in shown(golden / name, "args.*")["objects"]}
    assert listed["args.hidden_size"] == hidden_size
    assert {key.partition(".")[0] for key in listed} == {"args"}
    sizes = run(golden / name, "args.*_size")
    assert f"args.hidden_size  {hidden_size}".split() in [
        line.split() for line in sizes.splitlines()
    ]


def test_values_of_config_json_and_of_other_objects_have_paths(
    golden: Path, shown: Callable[..., Any], tmp_path: Path
) -> None:
    (item,) = shown(golden / LLAMA, "config.hidden_size")["objects"]
    assert item == {"key": "config.hidden_size", "value": 32}
    (item,) = shown(golden / "mcore_legacy/dense_gqa/tp2_pp1_optim", "opt_param_scheduler.max_lr")[
        "objects"
    ]
    assert item == {"key": "opt_param_scheduler.max_lr", "value": 1e-4}
    # An object that has its own stream, and one of every rank.
    (item,) = shown(golden / "torch_dcp/fsdp2_dp4", "app.optim.param_groups.0.betas.1")["objects"]
    assert item["value"] == 0.999
    objects = shown(golden / RANKS, "rng_state.0.random_rng_state.0")["objects"]
    assert len(objects) == 4
    assert {item["value"] for item in objects} == {3}
    # Names that contain dots, and a cycle.
    loop: dict[str, Any] = {"a.b": {"c": 1}}
    loop["self"] = loop
    torch.save({"w": torch.ones(1), "run": [loop]}, tmp_path / "x.pt")
    (item,) = shown(tmp_path / "x.pt", "run.0.a.b.c")["objects"]
    assert item["value"] == 1


def test_values_without_a_key_need_one(golden: Path, refused: Run, run: Run) -> None:
    message = refused(golden / LLAMA, "--values", "4")
    assert "error: --values 4 requires a tensor's KEY" in message
    command = message.partition("ckpt inspect ")[2].split()
    assert command[1:] == ["model.embed_tokens.weight", "--values", "4"]
    assert "first 4 values" in run(*command)


def test_statistics_of_the_model_are_folded(golden: Path, run: Run) -> None:
    page = run(golden / RANKS, "--stats")
    assert "decoder.layers.[0-3]" in page
    assert "(layers.3) to 0.02026 (layers.2)" in page
    assert "no NaN or Inf" in page
    assert "decoder.layers.2.mlp.linear_fc1.weight" in run(golden / RANKS, "--stats", "--flat")


def test_statistics_leave_the_optimizer_out_unless_a_key_selects_it(
    golden: Path, shown: Callable[..., Any]
) -> None:
    path = golden / "mcore_legacy/dense_gqa/tp2_pp1_optim"
    tensors = shown(path, "--stats")["tensors"]
    assert {tensor["group"] for tensor in tensors if "stats" in tensor} == {"model"}
    assert {tensor["group"] for tensor in tensors if "stats" not in tensor} >= {"moments"}
    (tensor,) = shown(path, "mp_rank_00:optimizer.optimizer.state.0.exp_avg", "--stats")["tensors"]
    assert tensor["stats"]["std"] > 0


def test_statistics_in_json_are_exact(golden: Path, shown: Callable[..., Any]) -> None:
    true = load_file(golden / "oracle/hf/llama.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    (tensor,) = shown(golden / LLAMA, key, "--stats", "-j", 2, "--memory", "256MiB")["tensors"]
    values = true[key].bfloat16().double().numpy()
    stats = tensor["stats"]
    assert (stats["min"], stats["max"]) == (values.min(), values.max())
    assert stats["zeros"] == np.count_nonzero(values == 0)
    assert (stats["nan"], stats["inf"]) == (0, 0)
    assert stats["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert stats["std"] == pytest.approx(values.std(), rel=1e-12)


def test_nan_and_infinities_are_counted_and_left_out(
    tmp_path: Path, run: Run, shown: Callable[..., Any]
) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf"), 3.0, 0.0, float("-inf")])
    save_file({"w": values, "v": values * float("nan")}, tmp_path / "model.safetensors")
    stats = {item["key"]: item["stats"] for item in shown(tmp_path, "--stats")["tensors"]}
    assert (stats["w"]["min"], stats["w"]["max"]) == (0, 3)
    assert (stats["w"]["nan"], stats["w"]["inf"], stats["w"]["zeros"]) == (1, 2, 1)
    assert stats["v"]["mean"] is None
    page = run(tmp_path, "--stats")
    assert "1 NaN, 2 Inf, 1 zero" in page
    assert "2 tensors with NaN or Inf" in page


def test_statistics_need_a_tensor_and_their_options_need_statistics(
    golden: Path, refused: Run
) -> None:
    assert "KEY selects only objects" in refused(golden / RANKS, "args", "--stats")
    assert "--threads has no effect: no tensor data is read" in refused(golden / RANKS, "-j", "2")


def test_a_damaged_tensor_ends_the_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(4096.0)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-100])
    code = main(["inspect", str(path), "--stats"])
    assert code == 3
    assert "error: " in capsys.readouterr().err
