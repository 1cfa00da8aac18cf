"""core.open: what a script sees of checkpoints that other software wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import core
from core.errors import CheckpointingException, UsageError

DENSE = "mcore_legacy/dense_gqa"
ORACLE = "oracle/dense_gqa/global.safetensors"
LAYOUTS = [
    f"{DENSE}/tp1_pp1",
    f"{DENSE}/tp2_pp2_optim",
    f"{DENSE}/tp1_pp2_vpp2",
    f"{DENSE}/tp4_pp1",
    "mcore_torch_dist/dense_gqa/tp2_pp2",
    "mcore0121_zarr/dense_gqa/tp4_pp1",
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


LOCAL_NAMES = {
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
}
"""Transformer Engine's names, which the oracle has → those of the local implementation."""


def oracle(golden: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    with safe_open(golden / ORACLE, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            name = key
            for engine, local in LOCAL_NAMES.items():
                name = name.replace(engine, local)
            tensors[name] = file.get_tensor(key)
    return tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_the_tensors_that_were_trained(layout: str, golden: Path) -> None:
    with core.open(golden / layout) as checkpoint:
        for key, truth in oracle(golden).items():
            tensor = checkpoint[key]
            assert (tensor.shape, tensor.nbytes) == (tuple(truth.shape), truth.nbytes)
            assert bits(tensor.torch()) == bits(truth), key


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_hugging_face_names_are_taken_apart_from_fused_tensors(layout: str, golden: Path) -> None:
    truth = oracle(golden)
    with core.open(golden / layout) as checkpoint:
        weights = checkpoint.named("hf")
        gate_up = truth["decoder.layers.1.mlp.linear_fc1.weight"]
        half = gate_up.shape[0] // 2
        layer = "model.layers.1.mlp"
        assert bits(weights[f"{layer}.gate_proj.weight"].torch()) == bits(gate_up[:half])
        assert bits(weights[f"{layer}.up_proj.weight"].torch()) == bits(gate_up[half:])
        assert not any("optimizer" in key for key in weights)


def test_a_hugging_face_directory_equals_what_safetensors_reads(golden: Path) -> None:
    directory = next(path.parent for path in sorted(golden.glob("hf/llama/*/model*.safetensors")))
    with core.open(directory) as checkpoint:
        keys = set()
        for path in directory.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    keys.add(key)
                    assert bits(checkpoint[key].torch()) == bits(file.get_tensor(key))
        assert set(checkpoint) == keys
        fused = checkpoint.named("megatron")["decoder.layers.0.mlp.linear_fc1.weight"]
        gate = checkpoint["model.layers.0.mlp.gate_proj.weight"]
        assert fused[: gate.shape[0]].tobytes() == gate.tobytes()


def test_local_ranks_hold_their_shards(golden: Path) -> None:
    truth = oracle(golden)["decoder.layers.2.mlp.linear_fc2.weight"]
    with core.open(golden / DENSE / "tp2_pp2_optim", ranks="local") as checkpoint:
        # Stage 1 counts its layers anew; linear_fc2 is cut along its columns.
        for rank in (0, 1):
            key = f"mp_rank_0{rank}_001:model.decoder.layers.0.mlp.linear_fc2.weight"
            shard = truth[:, 48 * rank : 48 * (rank + 1)]
            assert bits(checkpoint[key].torch()) == bits(shard)


def test_the_facts_of_a_run(golden: Path) -> None:
    with core.open(golden / DENSE / "tp2_pp2_optim") as checkpoint:
        assert (checkpoint.format, checkpoint.iteration) == ("megatron", 10)
        assert (checkpoint.parallel["tp"], checkpoint.parallel["pp"]) == (2, 2)
        assert checkpoint.args["hidden_size"] == 64
        assert {type(value) for value in checkpoint.args.values()} <= {
            type(None), bool, int, float, str, list, tuple, dict,
        }  # fmt: skip


def test_a_wrong_name_lists_similar_ones(golden: Path) -> None:
    with core.open(golden / DENSE / "tp1_pp1") as checkpoint:
        with pytest.raises(KeyError, match=r"decoder\.layers\.3\.mlp\.linear_fc2\.weight"):
            checkpoint["decoder.layers.3.mlp.linear_fc2.weigth"]
        assert checkpoint.get("no such tensor") is None
        assert "no such tensor" not in checkpoint
        assert "decoder.final_layernorm.weight" in checkpoint


def test_a_closed_checkpoint_says_so(golden: Path) -> None:
    with core.open(golden / DENSE / "tp1_pp1") as checkpoint:
        tensor = checkpoint["decoder.final_layernorm.weight"]
        renamed = checkpoint.named("hf")["model.norm.weight"]
    for late in (tensor, renamed):
        with pytest.raises(UsageError, match="the checkpoint is closed"):
            late.numpy()


def test_wrong_arguments_are_refused(golden: Path) -> None:
    with pytest.raises(UsageError, match="ranks='all' is not one of"):
        core.open(golden / DENSE / "tp1_pp1", ranks="all")
    with core.open(golden / DENSE / "tp1_pp1") as checkpoint, pytest.raises(UsageError):
        checkpoint.named("nemo")
    with pytest.raises(CheckpointingException):
        core.open(golden / "nothing here")


def test_shards_of_single_ranks_cannot_be_renamed(golden: Path) -> None:
    with core.open(golden / DENSE / "tp2_pp2_optim", ranks="local") as checkpoint:
        for names in ("hf", "megatron"):
            with pytest.raises(UsageError, match="shards of single ranks"):
                checkpoint.named(names)


def test_importing_and_looking_needs_neither_torch_nor_numpy(golden: Path) -> None:
    code = (
        "import sys, core\n"
        f"with core.open({str(golden / DENSE / 'tp2_pp2_optim')!r}) as checkpoint:\n"
        "    tensor = checkpoint['decoder.layers.0.mlp.linear_fc2.weight'][0:8]\n"
        "    assert tensor.nbytes == 8 * 96 * 2 and len(tensor.places) == 2\n"
        "print(sorted({'torch', 'numpy', 'zarr', 'tensorstore'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_numpy_asarray_reads_a_slice(golden: Path) -> None:
    truth = oracle(golden)["decoder.layers.2.mlp.linear_fc2.weight"]
    with core.open(golden / DENSE / "tp4_pp1") as checkpoint:
        part = np.asarray(checkpoint["decoder.layers.2.mlp.linear_fc2.weight"][3:9, 20:60])
    expected = truth[3:9, 20:60].to(torch.float32).numpy()
    assert np.array_equal(part.astype(np.float32), expected)
