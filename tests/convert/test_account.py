"""A conversion that would lose a tensor without saying so is stopped before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.app import main
from core.catalog.catalog import Catalog, TargetCatalog
from core.convert import prepare
from core.convert.job import Job
from core.convert.prepare import prepare as prepared
from core.convert.target_form import cut_form
from core.formats.format import Format

DENSE = "mcore_legacy/dense_gqa/tp2_pp1_optim/iter_0000010"
HF = "hf/llama/safetensors_sharded"
DCP = "torch_dcp/fsdp2_dp2"


def lose(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make a step of each conversion lose the tensors with a text in their name."""

    def cut_without(job: Job, catalog: Catalog, format: Format) -> tuple[Catalog, TargetCatalog]:
        source, target = cut_form(job, catalog, format)
        kept = {key: tensor for key, tensor in target.tensors.items() if name not in key}
        assert len(kept) < len(target.tensors)
        return source, replace(target, tensors=kept)

    monkeypatch.setattr(prepare, "cut_form", cut_without)


@pytest.mark.parametrize(
    ("path", "options", "name", "lost"),
    [
        (DCP, ["--to", "torch"], "layers.1.mlp", "model.layers.1.mlp"),
        (DCP, ["--to", "zarr3"], "layers.1.mlp", "model.layers.1.mlp"),
        (HF, ["--to", "megatron"], "layers.1.mlp.linear_fc2", "model.layers.1.mlp.down_proj"),
        (HF, ["--to", "dcp", "--dtype", "bf16"], "o_proj", "o_proj.weight"),
        (DENSE, ["--to", "hf"], "layers.0.self_attn.o_proj", "self_attention.linear_proj.weight"),
        (DENSE, ["--to", "megatron", "--tp-new", "1"], "layers.2.mlp.linear_fc1", "linear_fc1"),
        (DENSE, ["--to", "dcp"], "exp_avg_sq.decoder.layers.0", "optimizer."),
    ],
)
def test_a_conversion_that_loses_a_tensor_writes_nothing(
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
    options: Sequence[str],
    name: str,
    lost: str,
) -> None:
    lose(monkeypatch, name)
    assert main(["convert", str(golden / path), str(tmp_path / "dst"), *options]) == 70
    assert lost in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors", "zarr3"])
def test_scales_of_activations_leave_with_float8(tmp_path: Path, to: str) -> None:
    weight = {
        "mlp.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "mlp.weight_scale": torch.tensor(2.0),
        "mlp.input_scale": torch.tensor(3.0),
        "norm.weight": torch.ones(4),
    }
    save_file(weight, tmp_path / "model.safetensors")
    with prepared(
        Job(src=tmp_path / "model.safetensors", dst=tmp_path / "dst", to=to, dequantize="bf16")
    ) as result:
        assert set(result.form.tensors) == {"mlp.weight", "norm.weight"}
        assert "mlp.input_scale: scales of activations, dropped" in result.notes


@pytest.mark.parametrize(
    ("path", "options"),
    [
        (DCP, {"to": "torch", "exclude": ("*layers.1.mlp*",)}),
        (DCP, {"to": "dcp", "include": ("*layers.1*",), "rename": (("layers", "blocks"),)}),
        (DENSE, {"to": "dcp", "exclude": ("*layers.0.mlp*",)}),
        (DENSE, {"to": "safetensors", "optim": "drop"}),
        (HF, {"to": "megatron"}),
    ],
)
def test_what_the_user_leaves_out_and_what_follows_from_other_entries_is_not_listed(
    golden: Path, tmp_path: Path, path: str, options: dict[str, object]
) -> None:
    job = Job(src=golden / path, dst=tmp_path / "dst", **options)  # type: ignore[arg-type]
    with prepared(job) as result:
        listed = {name for entry in result.dropped_entries for name in entry.names}
    assert not any("layers" in name for name in listed if not name.startswith("optimizer"))
