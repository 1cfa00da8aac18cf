"""DeepSpeed's engines load universal checkpoints that we made of Megatron's, of pipelines and of
AutoTP, and train on.

The engines run in a Python of their own, which has DeepSpeed: scripts/framework-tests names it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run as convert

PYTHON = os.environ.get("CKPT_DEEPSPEED_PYTHON")
if not PYTHON:
    pytest.skip("scripts/framework-tests runs DeepSpeed's engines", allow_module_level=True)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PROGRAM = Path(__file__).parents[2] / "golden/frameworks/deepspeed_load.py"
MEGATRON = {
    "float16": "mcore_legacy/dense_gqa/tp2_pp2_optim",
    "distributed": "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable",
}
STATES = {"": "fp32", "/exp_avg": "exp_avg", "/exp_avg_sq": "exp_avg_sq"}
"""Suffix of a name in the program's result → file in a universal checkpoint."""
PARALLEL = {
    "pipeline_zero1": ("pipeline", 4, 1),
    "pipeline_tp2_zero1": ("pipeline_tp2", 4, 1),
    "autotp_zero1": ("autotp", 2, 1),
    "autotp_zero3": ("autotp", 4, 3),
}
"""Checkpoint → model, ranks and ZeRO stage of the engine that loads it."""
CUT_IN_ROWS = ("lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_IN_COLUMNS = ("o_proj", "down_proj", "down")


def loaded(
    kind: str, folder: Path, out: Path, *, stage: int, n_ranks: int, config: Path | None = None
) -> list[dict[str, Any]]:
    """What the engine of every rank holds after loading."""
    command = [str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(n_ranks), str(PROGRAM), kind, str(stage), str(folder), str(out)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*command, *([] if config is None else [str(config)])],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=PROGRAM.parent,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(out / f"rank{rank}.pt") for rank in range(n_ranks)]


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a universal checkpoint: parameter/state → tensor."""
    (zero,) = folder.glob("*/zero")
    return {
        f"{parameter.name}{suffix}": torch.load(parameter / f"{state}.pt")["param"]
        for parameter in zero.iterdir()
        if parameter.is_dir()
        for suffix, state in STATES.items()
    }


@pytest.mark.parametrize(("case", "stage"), [("float16", 1), ("distributed", 2), ("float16", 3)])
def test_a_megatron_run_goes_on_around_a_model_of_transformers(
    golden: Path, tmp_path: Path, case: str, stage: int
) -> None:
    source, folder = golden / MEGATRON[case], tmp_path / "universal"
    convert(Job(src=source, dst=folder, to="ucp", names="hf", fsync=False))
    convert(Job(src=source, dst=tmp_path / "hf", to="hf", fsync=False))
    expected = files_of(folder)
    for rank in loaded(
        "transformers",
        folder,
        tmp_path / "out",
        stage=stage,
        n_ranks=2,
        config=tmp_path / "hf",
    ):
        assert set(rank["values"]) == set(expected)
        for key, tensor in rank["values"].items():
            assert torch.equal(tensor, expected[key]), key
        assert set(rank["steps"]) == {1.0} and rank["global_steps"] == 10
        assert rank["decay"] == ([0.1, 0.1] if stage == 3 else [0.1, 0.0])
        assert 0 < rank["loss"] < 100


def shard_of(kind: str, name: str, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """Cut a parameter as the model itself does for one of its two tensor-parallel ranks."""
    module = name.split(".")[-2]
    if module == "embed":  # 11 words in 12 rows
        full = torch.cat([full, torch.zeros(1, *full.shape[1:])])
    if kind == "pipeline":
        return full
    if module == "gate_up":
        return torch.cat([part.chunk(2)[tp_rank] for part in full.chunk(2)])
    if module in CUT_IN_COLUMNS:
        return full.chunk(2, dim=1)[tp_rank]
    return full.chunk(2)[tp_rank] if module in ("embed", *CUT_IN_ROWS) else full


@pytest.mark.parametrize("case", PARALLEL)
def test_model_parallel_engines_load_what_was_joined(
    deepspeed_parallel: Path, tmp_path: Path, case: str
) -> None:
    kind, n_ranks, stage = PARALLEL[case]
    folder, config = tmp_path / "universal", None
    convert(Job(src=deepspeed_parallel / case, dst=folder, to="ucp", fsync=False))
    if kind == "autotp":
        from transformers import LlamaConfig

        config = tmp_path / "config"
        LlamaConfig(
            vocab_size=22,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        ).save_pretrained(config)
    ranks = loaded(kind, folder, tmp_path / "out", stage=stage, n_ranks=n_ranks, config=config)
    expected = files_of(folder)
    for number, rank in enumerate(ranks):
        for key, tensor in rank["values"].items():
            name = key.partition("/")[0]
            wanted = shard_of(kind, name, expected[key], number % 2)
            assert torch.equal(tensor, wanted), f"rank {number}: {key}"
        assert set(rank["steps"]) == {2.0} and rank["global_steps"] == 2
        assert 0 < rank["loss"] < 100
    assert {key for rank in ranks for key in rank["values"]} == set(expected)


@pytest.mark.parametrize(
    ("case", "ep"), [("moe_zero1", 1), ("moe_zero2_two_sizes", 1), ("moe_zero1", 2)]
)
def test_an_engine_loads_its_experts(
    deepspeed_parallel: Path, tmp_path: Path, case: str, ep: int
) -> None:
    folder = tmp_path / "universal"
    change = TopologyChange(ep=ep)
    convert(Job(src=deepspeed_parallel / case, dst=folder, to="ucp", topology=change, fsync=False))
    stage = 2 if "zero2" in case else 1
    ranks = loaded(f"{case}:{ep}", folder, tmp_path / "out", stage=stage, n_ranks=2)
    truth = torch.load(deepspeed_parallel / case / "truth.pt", weights_only=True)
    expected = {
        name if state == "fp32" else f"{name}/{state}": tensor
        for name, states in truth.items()
        for state, tensor in states.items()
    }
    for rank in ranks:
        assert ep > 1 or set(rank["values"]) == set(expected)
        for key, tensor in rank["values"].items():
            assert torch.equal(tensor, expected[key]), key
        assert set(rank["steps"]) == {2.0} and rank["global_steps"] == 2
        assert {name for name in rank["names"] if name.startswith("ep")} == {f"ep_size_{ep}"}
        assert all(0 < loss < 100 for loss in rank["losses"])
    assert {key for rank in ranks for key in rank["values"]} == set(expected)
