"""The values of real checkpoints, against torch in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.numbers.statistics import ValueStatistics
from core.errors import CapacityError
from core.opening.open import open_checkpoint
from core.verbs.inspect.select import model_tensors
from core.verbs.inspect.stats import fold_statistics, measure_layers, measure_tensors, merged_layers
from core.verbs.inspect.summary import summarize


def measured(path: Path, **options: int) -> dict[str, ValueStatistics | None]:
    checkpoint = open_checkpoint(path)
    try:
        summary = summarize(checkpoint)
        return measure_tensors(checkpoint, summary.view, model_tensors(summary), **options)
    finally:
        checkpoint.store.close()


def check(stats: ValueStatistics | None, tensor: torch.Tensor) -> None:
    """Compares with numpy's float64 and an exact mean."""
    assert stats is not None
    values = tensor.double().numpy().ravel()
    assert stats.n_elements == values.size
    assert (stats.least, stats.greatest) == (values.min(), values.max())
    assert (stats.n_nan, stats.n_infinite) == (0, 0)
    assert stats.n_zeros == np.count_nonzero(values == 0)
    assert stats.mean == pytest.approx(math.fsum(values.tolist()) / values.size, rel=1e-12)
    assert stats.std == pytest.approx(float(values.std()), rel=1e-12)


@pytest.mark.first(2)
@pytest.mark.parametrize("layout", ["tp1_pp1", "tp2_pp2", "tp4_pp1", "tp1_pp2_vpp2"])
def test_shards_and_replicas_of_ranks_count_once(layout: str, golden: Path) -> None:
    stats = measured(golden / "mcore_legacy/dense_gqa" / layout)
    true = load_file(golden / "oracle/dense_gqa/global.safetensors")
    names = {
        key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
            "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
        ): key
        for key in true
    }
    assert stats.keys() == names.keys()
    for key, part in stats.items():
        # Rows that pad the vocabulary are zero, and count.
        assert part is not None
        tensor = true[names[key]].bfloat16()
        n_rows = part.n_elements // math.prod(tensor.shape[1:])
        padding = torch.zeros(n_rows - len(tensor), *tensor.shape[1:])
        check(part, torch.cat([tensor, padding]))


@pytest.mark.parametrize(
    "name", ["hf/llama/safetensors_sharded", "hf/llama/bin_sharded", "hf/llama/safetensors_single"]
)
def test_every_container_has_the_same_statistics(name: str, golden: Path) -> None:
    true = load_file(golden / "oracle/hf/llama.safetensors")
    stats = measured(golden / name)
    assert stats.keys() == true.keys()
    for key, tensor in true.items():
        check(stats[key], tensor.bfloat16())


def test_stacked_and_compressed_tensors_are_read(golden: Path) -> None:
    ranks = measured(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    stacked = measured(golden / "mcore0121_zarr/dense_gqa/tp2_pp2")
    layers = [ranks[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] for layer in range(4)]
    total = stacked["decoder.layers.mlp.linear_fc1.weight"]
    assert total is not None
    leasts = [part.least for part in layers if part is not None and part.least is not None]
    assert total.least == min(leasts)
    assert total.n_elements == sum(part.n_elements for part in layers if part is not None)


@pytest.mark.parametrize("stacked", ["mcore0121_zarr", "mcore_torch_dist"])
def test_layers_in_one_tensor_are_folded_like_layers_of_their_own(
    stacked: str, golden: Path
) -> None:
    ranks = measured(golden / "mcore_legacy/dense_gqa/tp2_pp2")
    checkpoint = open_checkpoint(golden / stacked / "dense_gqa/tp2_pp2")
    try:
        summary = summarize(checkpoint)
        tensors = model_tensors(summary)
        layers = measure_layers(checkpoint, summary.view, tensors)
    finally:
        checkpoint.store.close()
    key = "decoder.layers.mlp.linear_fc1.weight"
    of_rank_files = tuple(ranks[key.replace("layers.", f"layers.{i}.")] for i in range(4))
    if stacked == "mcore_torch_dist":
        # Only these were saved from the same values.
        assert layers[key] == of_rank_files
    folded = {
        row.stacked_key: row for row in fold_statistics(tensors, merged_layers(layers), layers)
    }
    row = folded[key]
    assert row.label == "decoder.layers.[0-3].mlp.linear_fc1.weight"
    assert tuple(row.parts.values()) == layers[key]
    assert row.total == merged_layers(layers)[key]
    stds = [part.std for part in row.parts.values()]
    assert row.greatest_std is not None
    name = row.greatest_std[0]
    assert row.numbers_of(name) == f"layers.{stds.index(max(s for s in stds if s is not None))}"
    # Tensors outside layers have one description.
    assert len(layers["embedding.word_embeddings.weight"] or ()) == 1


def test_layers_are_folded_with_their_extremes(tmp_path: Path) -> None:
    tensors = {
        f"layers.{layer}.w": torch.full((4, 2), float(layer)) * torch.tensor([1.0, -1.0])
        for layer in (0, 1, 2)
    }
    save_file({**tensors, "layers.3.w": torch.ones(3)}, tmp_path / "model.safetensors")
    stats = measured(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    folded = fold_statistics(checkpoint.catalog.tensors, stats)
    checkpoint.store.close()
    assert [row.label for row in folded] == ["layers.[0-2].w", "layers.3.w"]
    row = folded[0]
    check(row.total, torch.cat(list(tensors.values())))
    assert (row.least, row.greatest) == ("layers.2.w", "layers.2.w")
    assert row.least_std == ("layers.0.w", 0.0)
    assert row.greatest_std == ("layers.2.w", 2.0)
    assert row.numbers_of("layers.2.w") == "layers.2"


def test_threads_do_not_change_the_result(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file({"w": torch.randn(3000, 1009) + 5}, tmp_path / "model.safetensors")
    single, four = (measured(tmp_path, threads=threads) for threads in (1, 4))
    assert single == four
    check(single["w"], load_file(tmp_path / "model.safetensors")["w"])


def test_empty_scalar_and_float8_tensors_are_described_as_stored(tmp_path: Path) -> None:
    tensors = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "w": torch.tensor([1.0, -448.0, 0.0]).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.tensor([[0.5]]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stats = measured(tmp_path)
    assert stats["empty"] == ValueStatistics()
    for key in ("scalar", "w"):
        check(stats[key], tensors[key])


def test_too_little_memory_is_refused(golden: Path) -> None:
    with pytest.raises(CapacityError, match="--stats needs .* MiB of memory") as caught:
        measured(golden / "hf/llama/safetensors_sharded", memory_bytes=1 << 20)
    assert "--memory" in str(caught.value.hint)
