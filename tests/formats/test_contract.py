"""Every registered format keeps the contract of ``core.verbs.convert.contract``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.formats.format import Format
from core.formats.registry import formats
from core.verbs.convert.contract import CHECKS, SAMPLE, Sample, check_reading
from tests.support.rounds import rounds

FORMATS = formats()
SAMPLES = {
    "deepspeed_universal": Sample(
        {key: spec for key, spec in SAMPLE.tensors.items() if spec[0] == "float32"}, {}
    ),
    # Orbax stores numbers as arrays without axes, so they come back as tensors.
    "orbax": Sample(SAMPLE.tensors, {"name": "run é", "none": None, "nothing": {}, "list": []}),
}
"""For formats that hold less than the usual things."""
WRITTEN = [format for format in FORMATS if not format.is_rank_local]

GOLDEN: dict[str, tuple[str, ...]] = {
    "megatron": ("mcore_legacy/dense_gqa/tp2_pp2", "mcore_legacy/moe_seq/tp2_pp1_ep2"),
    "torch_dist": ("mcore_torch_dist/dense_gqa/tp2_pp2", "mcore0121_torch_dist/dense_gelu/tp2_pp2"),
    "zarr": ("mcore0121_zarr/dense_gqa/tp2_pp2", "mcore0121_zarr/moe_seq/tp2_pp2_ep2"),
    "dcp": ("torch_dcp/fsdp2_dp2",),
    "deepspeed": (
        "deepspeed/zero0_dp2_bf16/global_step10",
        "deepspeed/zero1_dp2_bf16/global_step10",
        "deepspeed/zero2_dp2_bf16/global_step10",
        "deepspeed/zero2_dp2_fp32/global_step10",
        "deepspeed/zero3_dp2_bf16/global_step10",
    ),
    "deepspeed_universal": ("deepspeed_universal/zero3_dp2_bf16/global_step10_universal",),
    "safetensors": (
        "hf/llama/safetensors_sharded",
        "hf/llama/safetensors_single/model.safetensors",
        "hf/qwen2_tied/safetensors_single",
        "torch_dcp/hf_storage_dp2",
        "torch_dcp/hf_storage_consolidated_dp2",
    ),
    "orbax": ("orbax/ocdbt_zarr2", "orbax/ocdbt_zarr3", "orbax/manager/10"),
    "torch_bin": ("hf/llama/bin_sharded",),
    "torch": ("hf/llama/torch_single/nested_zip.pt", "hf/llama/torch_single/nested_legacy.pt"),
}
"""Checkpoints of other software, by the format that reads them."""
OF_A_FORM_ABOVE = {
    "mcore_legacy/moe_seq/tp2_pp1_ep2",
    "mcore0121_zarr/moe_seq/tp2_pp2_ep2",
    "deepspeed/zero2_dp2_bf16/global_step10",
    "deepspeed/zero2_dp2_fp32/global_step10",
    "torch_dcp/hf_storage_consolidated_dp2",
    "mcore0121_torch_dist/dense_gelu/tp2_pp2",
    "orbax/manager/10",
    "hf/qwen2_tied/safetensors_single",
    "deepspeed/zero0_dp2_bf16/global_step10",
}
"""Other models in the same kinds of files: damage is tried on them with ``--long``."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("format", WRITTEN, ids=lambda format: format.name)
def test_every_format_keeps_the_contract(
    format: Format, check: Callable[..., None], tmp_path: Path
) -> None:
    check(format, tmp_path, SAMPLES.get(format.name, SAMPLE))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=pytest.mark.long if path in OF_A_FORM_ABOVE else ())
        for name, paths in GOLDEN.items()
        for path in paths
    ],
    ids=lambda value: str(value),
)
def test_what_other_software_wrote_is_read_and_its_damage_is_survived(
    name: str, path: str, golden: Path, tmp_path: Path
) -> None:
    format = next(format for format in FORMATS if format.name == name)
    place = golden / path
    inside = sorted(place.glob("iter_*")) if place.is_dir() else []
    check_reading(format, inside[0] if inside else place, tmp_path / "damage", n_flips=rounds(50))


def test_every_format_has_a_checkpoint_of_other_software() -> None:
    written_in_its_own_tests = {"zarr3", "mcore_local", "torch_sharded", "nemo", "flax"}
    assert {format.name for format in FORMATS} == set(GOLDEN) | written_in_its_own_tests


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_checkpoint_is_recognised_as_its_own_format_before_any_other(
    name: str, golden: Path
) -> None:
    from core.opening.open import open_checkpoint

    for path in GOLDEN[name]:
        opened = open_checkpoint(golden / path)
        assert opened.format.name == name
        opened.store.close()


def test_a_format_with_an_unknown_partition_is_not_built() -> None:
    with pytest.raises(ValueError, match="unknown partition 'rows'"):
        replace(FORMATS[0], partition="rows")
