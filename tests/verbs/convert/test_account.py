"""A conversion that would lose a tensor without saying so is stopped before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.app import main
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.stored import ArrayT
from core.formats.format import Format
from core.opening.open import Checkpoint, open_checkpoint
from core.verbs.convert import hard_links, prepare
from core.verbs.convert.account import check_account
from core.verbs.convert.job import Job
from core.verbs.convert.prepare import prepare as prepared
from core.verbs.convert.target_form import cut_form
from tests.megatron.support.rewritten import rewritten

DENSE = "mcore_legacy/dense_gqa/tp2_pp1_optim/iter_0000010"
HF = "hf/llama/safetensors_sharded"
DCP = "torch_dcp/fsdp2_dp2"
TORCH_DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"


def lose(monkeypatch: pytest.MonkeyPatch, name: str, *, half: bool = False) -> None:
    """Make a step of each conversion lose the tensors with a text in their name, or their half."""

    def without(catalog: Catalog[ArrayT]) -> Catalog[ArrayT]:
        tensors = {
            key: tensor.narrow(0, 0, tensor.shape[0] // 2) if name in key else tensor
            for key, tensor in catalog.tensors.items()
            if half or name not in key
        }
        assert tensors != catalog.tensors
        return replace(catalog, tensors=tensors)

    def cut_without(job: Job, catalog: Catalog, format: Format) -> tuple[Catalog, TargetCatalog]:
        source, target = cut_form(job, catalog, format)
        return without(source) if half else source, without(target)

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
        # Several values are inside one node of the database.
        ("orbax/ocdbt_zarr2", ["--to", "dcp"], "params.scale", "params.scale"),
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


@pytest.mark.parametrize(
    ("path", "options", "name"),
    [
        (HF, ["--to", "dcp"], "layers.1.mlp.gate_proj"),
        (HF, ["--to", "dcp", "--dtype", "bf16"], "o_proj"),
        (DCP, ["--to", "zarr3"], "layers.1.mlp"),
        (DENSE, ["--to", "torch", "--names", "hf"], "layers.0.self_attn.q_proj"),
        (TORCH_DIST, ["--to", "hf"], "layers.0.mlp.up_proj"),
    ],
)
def test_a_conversion_that_loses_half_of_a_tensor_writes_nothing(
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    options: Sequence[str],
    name: str,
) -> None:
    lose(monkeypatch, name, half=True)
    assert (
        main(["convert", str(golden / path), str(tmp_path / "dst"), *options, "--no-optim"]) == 70
    )
    assert not list(tmp_path.iterdir())


def test_a_state_of_a_module_is_not_excused_by_those_of_other_ranks(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, state = "decoder.layers.0.mlp.linear_fc1._extra_state", torch.arange(9).byte()
    source = rewritten(
        golden / "mcore_legacy/dense_gqa/tp2_pp1",
        tmp_path / "src",
        lambda folder, name, value: state if name == key else value,
    )
    command = ["convert", str(source), str(tmp_path / "dst"), "--to", "dcp"]
    assert main([*command, "--dry-run"]) == 0
    lose(monkeypatch, key)
    assert main(command) == 70


def test_a_record_does_not_excuse_what_its_name_begins_like(tmp_path: Path) -> None:
    save_file(
        {"w": torch.ones(3), "optimizer.w.exp_avg": torch.ones(3)}, tmp_path / "a.safetensors"
    )
    source = open_checkpoint(tmp_path / "a.safetensors")
    source.store.close()
    opened = source.catalog
    weights = replace(opened, tensors={"w": opened.tensors["w"]})
    for name in ("optimizer", "optimizer state 'state1' of flat group 0"):
        with pytest.raises(RuntimeError, match=r"optimizer\.w\.exp_avg"):
            check_account(opened, weights, weights, (Dropped((name,), "no place"),))
    states = tuple(opened.tensors.values())
    check_account(opened, weights, weights, (Dropped(("optimizer",), "no place", tensors=states),))


def test_links_that_lose_a_tensor_are_not_made(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_without(job: Job, source: Checkpoint) -> hard_links.LinkedCheckpoint:
        linked = link_data_files(job, source)
        key = next(iter(linked.catalog.tensors))
        tensors = {name: item for name, item in linked.catalog.tensors.items() if name != key}
        return replace(linked, catalog=replace(linked.catalog, tensors=tensors))

    link_data_files = hard_links.link_data_files
    command = ["convert", str(golden / DCP), str(tmp_path / "dst"), "--metadata-only"]
    assert main([*command, "--exclude", "*layers.1*", "--dry-run"]) == 0
    monkeypatch.setattr(hard_links, "link_data_files", link_without)
    assert main([*command, "--exclude", "*layers.1*"]) == 70
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
        assert "mlp.input_scale: activation scales, dropped" in result.notes


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


@pytest.mark.parametrize(
    "name",
    [
        "mcore_legacy/dense_gqa/tp4_pp1_optim",
        "mcore_legacy/moe_seq/tp2_pp1_ep2",
        "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
        "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
        "torch_dcp/fsdp2_dp2",
        "deepspeed/zero3_dp2_bf16",
        "trainer/zero2_dp2",
        "accelerate/fsdp2_dp2/checkpoint_1",
        "lightning/model_parallel_dp2.ckpt",
        "orbax/ocdbt_zarr3",
    ],
)
def test_objects_with_tensors_are_listed_where_a_file_stores_only_tensors(
    golden: Path, tmp_path: Path, name: str
) -> None:
    """Such as the steps of Megatron's numbered optimizer."""
    with prepared(Job(src=golden / name, dst=tmp_path / "w.safetensors", to="safetensors")) as plan:
        assert plan.n_tensors > 0
