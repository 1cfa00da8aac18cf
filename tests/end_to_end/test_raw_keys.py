"""Whatever the files of a checkpoint hold is structure, arrives, or is listed as not carried."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.verbs.convert.job import Job
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import run
from tests.support.archives import unpacked
from tests.support.raw_keys import RawKey, read_raw_keys, unaccounted

STRUCTURE = {
    # What describes the files.
    "*: @record.*": "a record of a zip, whose tensors and pickle are read",
    "*.index.json: weight_map.*": "the file of a tensor, which is read",
    "*.index.json: metadata.total_*": "a sum of what is read",
    "*: __metadata__.format = *": "the framework of the tensors",
    "*: __metadata__.DCP_*": "which parts of tensors the file has",
    "*: @metadata.planner_data*": "nesting of a DCP, which its keys repeat",
    "*: @metadata.storage_meta*": "name and number of the save",
    "*metadata.json: *backend*": "the format",
    "*: dimension_names = None": "a zarr array without names of axes",
    "*shard_*.pt:  = None": "an empty extra state",
    "*_METADATA: tree_metadata.*": "nesting of an Orbax tree",
    "*_METADATA: use_*": "how Orbax stores arrays",
    "*_METADATA: store_*": "how Orbax stores arrays",
    "*_METADATA: custom_metadata = None": "no metadata",
    "*_CHECKPOINT_METADATA: item_handlers*": "the classes that read the files",
    "*_CHECKPOINT_METADATA: *_timestamp_nsecs*": "the time of the save",
    "*process_0: *.array_metadata.*_shape*": "how Orbax cuts arrays",
    "*process_0: *.param_name*": "name of an array",
    "*process_0: *.ext_metadata = None": "an array that is no random key",
    # How a run is divided among ranks.
    "*: args.*rank = *": "number of a process",
    "*: args.ckpt_format = *": "the format, which becomes that of the destination",
    "*: args.use_dist_ckpt = *": "the format",
    "*_extra_state = None": "an empty extra state",
    "*_extra_state/shard_* = None": "an empty extra state",
    "*np_rng*.[34] = 0*": "a random state of numpy without a cached number",
    "*numpy*.[34] = 0*": "a random state of numpy without a cached number",
    "*: optimizer.*.@*": "attributes that Megatron gives to its parameters when it makes them",
    "*param_groups.*.params.*": "numbers of parameters, which get their names",
    "*distrib_optim.pt: *numel_unpadded*": "how buffers are cut",
    "*distrib_optim.pt: buckets_coalesced*": "how buffers are cut",
    "*zero_stage*": "how DeepSpeed divides the optimizer",
    "*group_paddings*": "how DeepSpeed divides the optimizer",
    "*param_alignment_paddings*": "how DeepSpeed divides the optimizer",
    "*param_slice_mappings.*": "how DeepSpeed divides the optimizer",
    "*partition_count*": "how DeepSpeed divides the optimizer",
    "*@ds_id*": "number of a parameter in the process",
    "*_states.pt: *param_shapes*": "shapes of tensors",
    "*_states.pt: *_world_size*": "number of ranks",
    "*_states.pt: checkpoint_parallel_dimensions.*": "number of ranks",
    "*_states.pt: universal_checkpoint_info.*": "how DeepSpeed divides tensors",
    "*_states.pt: * = None": "an entry of DeepSpeed without a value",
    "*param_groups.*.name = 'ep_size_*'": "a size of the run, which becomes the destination's",
    "*.pt: cat_dim = *": "how DeepSpeed divides tensors",
    "*_spec.*": "mesh and placement of a DTensor",
}
"""Pattern of ``FILE: PATH = VALUE`` → what such a raw key is, if it is no content."""
COPIES = {
    "*_states.pt: module.* = *float16*": "a rounded copy of a master weight, with a note",
    "*layer_*_states.pt: * = *float16*": "a rounded copy of a master weight, with a note",
    "*rank_1_*: *fp32_flat_groups.1 *": "weights with padding between them",
}
"""The same, of DeepSpeed's own checkpoints."""
CASES = {
    "torch": (
        "golden/mcore_legacy/dense_gqa/tp2_pp2_optim",
        "golden/mcore_legacy/moe_seq/tp2_pp1_ep2",
        "golden/mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
        "golden/mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
        "golden/mcore0121_zarr/dense_gqa/tp2_pp2_optim",
        "nemo2/llama/weights",
        "megatron_bridge/megatron",
        "megatron_fsdp/experts_ep2",
        "golden/torch_dcp/tp2_fsdp2_dp2",
        "golden/torch_dcp/hf_storage_dp2",
        "golden/accelerate/fsdp2_dp2/checkpoint_0",
        "golden/lightning/model_parallel_dp2.ckpt",
        "torchtitan/llama/step-2",
        "quantized_states/fsdp2/adamw8bit",
        "dtensor/fsdp2_dp4",
        "dtensor/fsdp1_local_dp2",
        "quantized_ranks/adamw8bit_hsdp",
        "golden/deepspeed/zero1_dp2_bf16",
        "golden/deepspeed/zero3_dp2_bf16",
        "golden/deepspeed_universal/zero1_dp2_bf16",
        "deepspeed_optimizers/bnb1",
        "golden/accelerate/zero2_dp2/checkpoint_0",
        "deepspeed_parallel/autotp_zero1",
        "golden/orbax/manager/10",
        "golden/orbax/ocdbt_zarr3",
        "golden/orbax/plain_zarr2",
        "orbax_layers/maxtext",
        "orbax_keys/keys",
        "golden/hf/llama/safetensors_sharded",
        "golden/trainer/peft/checkpoint-2",
    ),
    "dcp": (
        "golden/hf/llama/torch_single/nested_zip.pt",
        "lightning/trainer/checkpoints/last.ckpt",
        "torchao/opt8.pt",
        "golden/torch_dcp/fsdp2_dp2",
    ),
    "safetensors": (
        "golden/hf/llama/bin_sharded",
        "golden/hf/qwen2_tied/safetensors_single",
        "frameworks/accelerate/ddp/state",
        "frameworks/trainer/llama/checkpoint-2",
        "diffusers/pipeline",
        "two_models/two_models/state",
        "lora/lora/llama/adapter",
        "quantized_states/fsdp1_full.pt",
    ),
    "megatron": (
        "golden/mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
        "golden/mcore0121_legacy/moe_grouped/tp2_pp1_ep2",
        "megatron_frameworks/llava",
    ),
    "torch_dist": ("golden/mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",),
    "hf": (
        "golden/mcore_legacy/dense_gqa/tp1_pp2",
        "golden/mcore_torch_dist/moe_seq/tp2_pp2_ep2",
        "golden/mcore_torch_dist/dense_gqa/tp2_pp2_optim",
        "megatron_lora/lora/iter_0000000",
    ),
    "deepspeed_universal": (
        "deepspeed_parallel/moe_zero1",
        "golden/trainer/zero2_dp2/checkpoint-2",
    ),
}
"""Format of the destination → sources, by archive of tests/golden and path in it."""

OF_A_FORM_ABOVE = {
    "golden/mcore_legacy/moe_seq/tp2_pp1_ep2",
    "golden/mcore0121_torch_dist/dense_gqa/tp2_pp2_optim",
    "golden/mcore_torch_dist/dense_gqa/tp2_pp2_optim",
    "golden/mcore_torch_dist/moe_seq/tp2_pp2_ep2",
    "golden/torch_dcp/tp2_fsdp2_dp2",
    "golden/torch_dcp/fsdp2_dp2",
    "golden/accelerate/fsdp2_dp2/checkpoint_0",
    "torchtitan/llama/step-2",
    "quantized_ranks/adamw8bit_hsdp",
}
"""Other models in the same kinds of files: converted with ``--long``."""

Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def find(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Return the function that finds a source, whose archive it unpacks once."""
    folders = {"golden": golden}

    def find_source(name: str) -> Path:
        archive, _, path = name.partition("/")
        if archive not in folders:
            folders[archive] = unpacked(archive, tmp_path_factory.mktemp(archive))
        return folders[archive] / path

    return find_source


def convert(src: Path, dst: Path, to: str) -> tuple[list[RawKey], list[str], str]:
    """Convert a source.

    Returns:
        Its raw keys, the names of what is listed as not carried, and the name of its format.
    """
    job = Job(src=src, dst=dst, to=to, fsync=False)
    with prepare(job) as prepared:
        listed = [name for entry in prepared.dropped_entries for name in entry.names]
        keys = read_raw_keys(prepared.source.path)
        format = prepared.source.format.name
    run(job)
    return keys, listed, format


@pytest.mark.parametrize(
    ("name", "to"),
    [
        pytest.param(name, to, marks=pytest.mark.long if name in OF_A_FORM_ABOVE else ())
        for to, names in CASES.items()
        for name in names
    ],
)
def test_every_raw_key_is_structure_carried_or_listed(
    find: Find, tmp_path: Path, name: str, to: str
) -> None:
    keys, listed, format = convert(find(name), tmp_path / "out", to)
    structure = STRUCTURE | (COPIES if format == "deepspeed" else {})
    lost = unaccounted(keys, read_raw_keys(tmp_path / "out"), listed, structure)
    assert not lost, [f"{key} = {key.value!r:.60}" for key in lost[:10]]


def test_a_lost_key_is_noticed(tmp_path: Path) -> None:
    model = OrderedDict(w=torch.rand(8), b=torch.rand(3, dtype=torch.float64))
    model.title = "a title"  # type: ignore[attr-defined]
    codes = torch.arange(64).to(torch.uint8)
    state: dict[str, object] = {"model": model, "step": 12345, "lr": 0.125, "codes": codes}
    torch.save(state, tmp_path / "src.pt")
    source = read_raw_keys(tmp_path / "src.pt")

    def find_lost(changed: dict[str, object], *listed: str) -> list[str]:
        torch.save(changed, tmp_path / "dst.pt")
        lost = unaccounted(source, read_raw_keys(tmp_path / "dst.pt"), listed, STRUCTURE)
        return [".".join(key.path) for key in lost]

    assert find_lost(state) == []
    # Other names and cuts are no loss.
    halves = {"x": model["w"][:4], "y": model["w"][4:], "z": {"b": model["b"], "title": "a title"}}
    rest = {name: value for name, value in state.items() if name != "model"}
    assert find_lost({**halves, **rest}) == []
    # Without an entry, with another value of it, and without the attribute of a mapping.
    for name in rest:
        assert find_lost({key: value for key, value in state.items() if key != name}) == [name]
    assert find_lost({**state, "lr": 0.25}) == ["lr"]
    assert find_lost({**state, "codes": codes.flip(0)}) == ["codes"]
    assert find_lost({**halves, "y": model["w"][5:], **rest}) == ["model.w"]
    plain = {**state, "model": dict(model)}
    assert find_lost(plain) == ["model.@title"]
    assert find_lost(plain, "model.title") == []


def test_a_lost_file_is_noticed(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/llama/safetensors_single"
    keys, listed, _ = convert(source, tmp_path / "out", "safetensors")
    assert "config.json" in {key.file for key in keys}
    (tmp_path / "out/config.json").unlink()
    lost = unaccounted(keys, read_raw_keys(tmp_path / "out"), listed, STRUCTURE)
    assert lost and {key.file for key in lost} == {"config.json"}
