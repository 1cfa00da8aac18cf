"""Megatron-FSDP's checkpoints of others: the keys, objects and bytes that Megatron-FSDP wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import run as convert
from tests.megatron.placement.test_fsdp_dtensor import RUNS, STEP, as_torch

SETTINGS = "optimizer.param_to_group_meta."


def metadata(folder: Path) -> Metadata:
    """The metadata of a DCP directory, as torch reads them."""
    return dcp.FileSystemReader(folder).read_metadata()


def objects(folder: Path) -> dict[str, object]:
    """Objects of a DCP directory by key, as Megatron's script loads them; without its arguments."""
    entries = metadata(folder).state_dict_metadata
    state: dict[str, object] = {
        key: None
        for key, meta in entries.items()
        if not isinstance(meta, TensorStorageMetadata) and key != "args"
    }
    dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.each_value
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in ("dense_dp2", "experts_ep2") else pytest.mark.long)
        for name, run in RUNS.items()
        if run.optimizer.is_bf16
    ],
)
@pytest.mark.parametrize("to", ["torch_dist", "megatron"])
def test_the_way_back_gives_what_megatron_fsdp_wrote(
    megatron_fsdp: Path, tmp_path: Path, case: str, to: str
) -> None:
    src = megatron_fsdp / case
    change = TopologyChange(tp=2, pp=2) if to == "megatron" else None
    convert(Job(src=src, dst=tmp_path / "other", to=to, topology=change))
    layout, has_experts = RUNS[case].layout, RUNS[case].model.experts is not None
    back = TopologyChange(tp=layout.tp, ep=layout.ep if has_experts else None)
    convert(Job(src=tmp_path / "other", dst=tmp_path / "out", to="fsdp_dtensor", topology=back))

    # Every key, shape and path of the nested state dict, and no other; all bytes; all settings.
    original, written = metadata(src / STEP), metadata(tmp_path / "out" / STEP)
    assert dict(written.planner_data) == dict(original.planner_data)
    for key, meta in original.state_dict_metadata.items():
        if isinstance(meta, TensorStorageMetadata):
            ours = written.state_dict_metadata[key]
            assert (ours.size, ours.properties.dtype) == (meta.size, meta.properties.dtype)
    expected = as_torch(src / STEP, tmp_path / "original.pt")
    actual = as_torch(tmp_path / "out" / STEP, tmp_path / "ours.pt")
    for key, tensor in expected.items():
        rows = 60 if "word_embeddings" in key or "output_layer" in key else None
        assert torch.equal(actual[key][:rows], tensor[:rows]), key
    assert objects(tmp_path / "out" / STEP) == objects(src / STEP)


def test_padding_rows_are_those_of_the_requested_tp(megatron_fsdp: Path, tmp_path: Path) -> None:
    change = TopologyChange(tp=8)
    src = megatron_fsdp / "dense_dp2"
    with pytest.raises(UnsupportedError, match="attention heads are not divisible"):
        convert(Job(src=src, dst=tmp_path / "out", to="fsdp_dtensor", topology=change))
    change = TopologyChange(tp=2)
    convert(Job(src=src, dst=tmp_path / "out", to="fsdp_dtensor", vocab_size=61, topology=change))
    tensors = as_torch(tmp_path / "out" / STEP, tmp_path / "ours.pt")
    before = as_torch(src / STEP, tmp_path / "original.pt")
    for key in (
        "model.module.output_layer.weight",
        "optimizer.state.module.module.module.output_layer.weight.exp_avg",
    ):
        assert tensors[key].shape == (64, 16)
        assert torch.equal(tensors[key][:61], before[key][:61])


def test_both_halves_of_all_layers_may_be_in_one_array(megatron_fsdp: Path, tmp_path: Path) -> None:
    convert(Job(src=megatron_fsdp / "dense_dp2", dst=tmp_path / "dist", to="torch_dist"))
    stacked = tmp_path / "stacked.pt"
    convert(
        Job(src=tmp_path / "dist", dst=stacked, to="torch", names="megatron", stack_layers=True)
    )
    for source, target in ((tmp_path / "dist", "direct"), (stacked, "out")):
        convert(Job(src=source, dst=tmp_path / target, to="fsdp_dtensor"))
    direct = as_torch(tmp_path / "direct" / STEP, tmp_path / "direct.pt")
    tensors = as_torch(tmp_path / "out" / STEP, tmp_path / "ours.pt")
    assert tensors.keys() == direct.keys()
    n_halves = 0
    for key, tensor in direct.items():
        # Rows of padding behind the 33 of the vocabulary follow from each source's own sizes.
        n_rows = 33 if "word_embeddings" in key or "output_layer" in key else None
        assert torch.equal(tensors[key][:n_rows], tensor[:n_rows]), key
        n_halves += key.partition(".exp_avg")[0].endswith(("_w", "_v"))
    assert n_halves == 2 * 2 * 3


def test_without_the_optimizer_weights_keep_their_dtype(
    megatron_fsdp: Path, tmp_path: Path
) -> None:
    convert(Job(src=megatron_fsdp / "dense_dp2", dst=tmp_path / "dist", to="torch_dist"))
    job = Job(src=tmp_path / "dist", dst=tmp_path / "out", to="fsdp_dtensor", optim="drop")
    convert(job)
    tensors = as_torch(tmp_path / "out" / STEP, tmp_path / "ours.pt")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert not any(key.startswith("optimizer") for key in tensors)
    with prepare(replace(job, dst=tmp_path / "again")) as prepared:
        load_line = prepared.load_line
    assert load_line.endswith(
        "--ckpt-format fsdp_dtensor --use-megatron-fsdp --tensor-model-parallel-size 1 "
        "--no-load-optim --no-load-rng"
    )


def test_a_hugging_face_model_is_written_with_its_halves(golden: Path, tmp_path: Path) -> None:
    convert(
        Job(src=golden / "hf/llama/safetensors_single", dst=tmp_path / "out", to="fsdp_dtensor")
    )
    (folder,) = {path.parent for path in tmp_path.glob("out/**/.metadata")}
    tensors = as_torch(folder, tmp_path / "ours.pt")
    from safetensors.torch import load_file

    weights = load_file(golden / "hf/llama/safetensors_single/model.safetensors")
    fc1 = "model.module.decoder.layers.1.mlp.linear_fc1.weight"
    for half, name in (("_w", "gate"), ("_v", "up")):
        weight = weights[f"model.layers.1.mlp.{name}_proj.weight"]
        assert torch.equal(tensors[fc1 + half], weight)


@pytest.mark.parametrize(
    ("source", "options", "error", "words"),
    [
        ("dense_dp2", {"topology": TopologyChange(pp=2)}, UsageError, "--pp-new has no effect"),
        ("dense_dp2", {"stack_layers": True}, UsageError, "--stack-layers"),
        ("dense_dp2", {"names": "hf:llama"}, UsageError, "cannot be combined"),
        ("dense_dp2", {"rng": "keep"}, UsageError, "random states"),
        ("experts", {"experts": "grouped"}, UnsupportedError, "GroupedMLP"),
    ],
)
def test_what_megatron_fsdp_does_not_have_is_refused(
    megatron_fsdp: Path,
    tmp_path: Path,
    source: str,
    options: dict[str, object],
    error: type[CheckpointingException],
    words: str,
) -> None:
    job = Job(src=megatron_fsdp / source, dst=tmp_path / "out", to="fsdp_dtensor", **options)
    with pytest.raises(error, match=words) as caught, prepare(job):
        pass
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mcore_legacy/dense_gqa/tp1_pp1_optim", "step count"),
    ],
)
def test_optimizers_that_it_would_not_load_are_refused(
    golden: Path, tmp_path: Path, source: str, words: str
) -> None:
    job = Job(src=golden / source, dst=tmp_path / "out", to="fsdp_dtensor")
    with pytest.raises(UnsupportedError, match=words) as caught, prepare(job):
        pass
    assert "--no-optim" in str(caught.value.hint)


def test_the_optimizer_of_an_fp32_run_is_refused(megatron_fsdp: Path, tmp_path: Path) -> None:
    src = megatron_fsdp / "fp32_dp2"
    convert(Job(src=src, dst=tmp_path / "dist", to="torch_dist"))
    job = Job(src=tmp_path / "dist", dst=tmp_path / "out", to="fsdp_dtensor")
    with (
        pytest.raises(UnsupportedError, match="an fp32 run cannot continue") as caught,
        prepare(job),
    ):
        pass
    assert "--no-optim" in str(caught.value.hint)

    # The weights go without it.
    convert(replace(job, optim="drop"))
    weights = as_torch(src / STEP, tmp_path / "original.pt")
    for key, tensor in as_torch(tmp_path / "out" / STEP, tmp_path / "ours.pt").items():
        assert torch.equal(tensor[:60], weights[key][:60]), key
