"""The line that a conversion prints last loads its result with the real reader."""

from __future__ import annotations

import glob
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.megatron.model.pipeline import Pipeline, parse_layout
from core.verbs.convert.run import Job, TopologyChange, run

_DENSE = "mcore_legacy/dense_gqa"


def next_line(source: Path, tmp_path: Path, to: str, **options: Any) -> str:
    return run(Job(src=source, dst=tmp_path / "out", to=to, fsync=False, **options)).next


def flags_of(line: str) -> dict[str, str | None]:
    """The options of a line by name; None for one without a value."""
    words = shlex.split(line)
    return {
        word: None if value.startswith("--") else value
        for word, value in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


def test_a_hugging_face_model_is_loaded_by_transformers(golden: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    line = next_line(golden / _DENSE / "tp2_pp2_optim", tmp_path, "hf")
    model = eval(line, {"AutoModelForCausalLM": transformers.AutoModelForCausalLM})
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(model.state_dict()[key], written[key]) for key in written)


def test_one_file_of_tensors_is_loaded_by_safetensors(golden: Path, tmp_path: Path) -> None:
    line = next_line(golden / "torch_dcp/tp2_only", tmp_path, "safetensors")
    tensors = eval(line, {"load_file": load_file})
    assert tensors.keys() == load_file(tmp_path / "out/model.safetensors").keys()


def test_several_files_of_tensors_are_loaded_together(golden: Path, tmp_path: Path) -> None:
    source = golden / "torch_dcp/tp2_only"
    line = next_line(source, tmp_path, "safetensors", max_shard_size=30_000)
    tensors = eval(line, {"load_file": load_file, "glob": glob})
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    single = tmp_path / "single.safetensors"
    run(Job(src=source, dst=single, to="safetensors", fsync=False))
    expected = load_file(single)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_a_part_of_a_model_is_not_offered_to_transformers(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/llama/safetensors_single"
    line = next_line(source, tmp_path, "safetensors", include=("model.*",))
    assert eval(line, {"load_file": load_file})


def test_a_torch_file_is_loaded_by_torch(golden: Path, tmp_path: Path) -> None:
    line = next_line(golden / "torch_dcp/fsdp2_dp2", tmp_path, "torch")
    assert "weights_only=True" in line
    assert "app" in eval(line, {"torch": torch})


def test_a_torch_file_with_live_objects_is_not_called_safe(tmp_path: Path) -> None:
    source = tmp_path / "in.pt"
    torch.save({"w": torch.ones(2), "path": Path("x")}, source)
    line = next_line(source, tmp_path, "torch")
    assert line.endswith("weights_only=False)")
    assert eval(line, {"torch": torch})["path"] == Path("x")
    safe = run(Job(src=source, dst=tmp_path / "b.pt", to="torch", weights_only=True, fsync=False))
    assert torch.equal(eval(safe.next, {"torch": torch})["w"], torch.ones(2))


@pytest.mark.parametrize("to", ["dcp", "torch_dist"])
def test_dcp_is_loaded_by_torch(tmp_path: Path, to: str) -> None:
    import torch.distributed.checkpoint as dcp

    source = tmp_path / "in.pt"
    torch.save({"w": torch.arange(4.0)}, source)
    line = next_line(source, tmp_path, to)
    state_dict = {"w": torch.zeros(4)}
    eval(line, {"dcp": dcp, "state_dict": state_dict})
    assert torch.equal(state_dict["w"], torch.arange(4.0))


def test_a_group_of_arrays_is_opened_by_zarr(golden: Path, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = eval(next_line(golden / "torch_dcp/fsdp2_dp2", tmp_path, "zarr3"), {"zarr": zarr})
    [key] = [path.parent.name for path in (tmp_path / "out").glob("*embed_tokens.weight/zarr.json")]
    assert group[key].shape


@pytest.mark.parametrize("to", ["zarr", "zarr3"])
def test_arrays_that_zarr_refuses_are_opened_by_tensorstore(
    golden: Path, tmp_path: Path, to: str
) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    line = next_line(golden / "torch_dcp/bf16_fsdp2_dp2_modelonly", tmp_path, to)
    assert eval(line, {"tensorstore": tensorstore}).shape


@pytest.mark.parametrize(
    ("source", "to", "topology", "options"),
    [
        ("tp2_pp2_optim", "torch_dist", {}, {"--tensor-model-parallel-size": "2"}),
        ("tp2_pp2_optim", "zarr", {}, {"--ckpt-format": "zarr"}),
        (
            "tp2_pp2_optim",
            "megatron",
            {"tp": 4, "pp": 1},
            {"--ckpt-format": "torch", "--no-load-rng": None},
        ),
        ("tp2_pp2", "megatron", {"tp": 2, "pp": 2}, {"--no-load-optim": None}),
        (
            "tp2_pp2_vpp2",
            "megatron",
            {"tp": 1, "pp": 2, "vpp": 2},
            {
                "--num-layers-per-virtual-pipeline-stage": "1",
                "--no-load-optim": None,
                "--no-load-rng": None,
            },
        ),
        (
            "tp2_pp2",
            "megatron",
            {"tp": 2, "pp": 2, "pipeline": Pipeline(layout=parse_layout("Et|tttL"))},
            {"--pipeline-model-parallel-layout": "Et|tttL", "--no-load-optim": None},
        ),
        (
            "tp2_pp2",
            "megatron",
            {"tp": 2, "pp": 2, "pipeline": Pipeline(first=1)},
            {"--decoder-first-pipeline-num-layers": "1", "--no-load-optim": None},
        ),
    ],
)
def test_megatron_gets_the_options_that_the_result_needs(
    golden: Path,
    tmp_path: Path,
    source: str,
    to: str,
    topology: dict[str, Any],
    options: dict[str, str | None],
) -> None:
    change = TopologyChange(**topology) if topology else None
    line = next_line(golden / _DENSE / source, tmp_path, to, topology=change)
    flags = flags_of(line)
    sizes = {"tp": "1", "pp": "1"} if to == "megatron" else {"tp": "2", "pp": "2"}
    sizes |= {name: str(size) for name, size in topology.items() if name in sizes}
    assert flags == {
        "--load": str(tmp_path / "out"),
        "--ckpt-format": "torch" if to == "megatron" else to,
        "--tensor-model-parallel-size": sizes["tp"],
        "--pipeline-model-parallel-size": sizes["pp"],
        **options,
    }


def test_megatron_gets_the_sizes_of_experts(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy/moe_seq/tp2_pp1_ep2_etp1"
    line = next_line(source, tmp_path, "megatron", is_reshard=True)
    flags = flags_of(line)
    assert flags["--expert-model-parallel-size"] == "2"
    assert flags["--expert-tensor-parallel-size"] == "1"
    assert "--no-load-rng" not in flags


def test_a_destination_with_a_space_is_quoted(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/llama/safetensors_single"
    report = run(Job(src=source, dst=tmp_path / "my run", to="megatron", fsync=False))
    assert flags_of(report.next)["--load"] == str(tmp_path / "my run")
    assert {"--no-load-optim", "--no-load-rng"} <= flags_of(report.next).keys()


def test_linked_data_files_are_loaded_like_others(golden: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(golden / "torch_dcp/fsdp2_dp2", source)
    line = next_line(source, tmp_path, "dcp", metadata_only=True, optim="drop")
    assert line == f'dcp.load(state_dict, checkpoint_id="{tmp_path / "out"}")'
