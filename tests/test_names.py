"""Names of Hugging Face and of Megatron through whole conversions; tests/hf looks at the maps themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core.convert import Job, TopologyChange, run
from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.formats import torch_file
from core.store import LocalStore
from tests.materialize import tensor_bytes
from tests.real_readers import of_tensor, read_safetensors

GOLD = "mcore_legacy/dense_gqa"


def _model(folder: Path, rank: str) -> dict[str, bytes]:
    """The weights of one rank file, in their order."""
    file = next(folder.glob(f"iter_*/{rank}/model_optim_rng.pt"))
    store = LocalStore(file.parent, entry=file.name)
    catalog = torch_file.read(store)
    return {key: tensor_bytes(catalog, store, key).tobytes() for key in catalog.tensors if key.startswith("model.")}


def test_megatron_to_hugging_face_and_back_gives_megatrons_own_files(golden: Path, tmp_path: Path) -> None:
    run(Job(src=golden / GOLD / "tp4_pp1", dst=tmp_path / "hf", to="hf", fsync=False))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    size = TopologyChange(tp=2)
    back = Job(src=tmp_path / "hf", dst=tmp_path / "back", to="megatron", topology=size, vocab_divisor=64, fsync=False)
    run(back)
    for rank in ("mp_rank_00", "mp_rank_01"):
        wanted, found = _model(golden / GOLD / "tp2_pp1", rank), _model(tmp_path / "back", rank)
        assert list(found) == list(wanted)
        for key, data in wanted.items():
            assert found[key] == data, key


@pytest.mark.slow
def test_transformers_loads_what_was_a_megatron_checkpoint(golden: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run(Job(src=golden / GOLD / "tp2_pp2", dst=tmp_path / "hf", to="safetensors", names="hf", fsync=False))
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, torch_dtype=torch.bfloat16
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = _model(golden / GOLD / "tp1_pp1", "mp_rank_00")["model.embedding.word_embeddings.weight"]
    embedding = of_tensor(model.model.embed_tokens.weight)[2]
    assert embedding == weights[: len(embedding)]
    assert torch.isfinite(model(torch.arange(12)[None]).logits).all()


@pytest.mark.parametrize("source", ["safetensors_sharded", "bin_sharded"])
@pytest.mark.parametrize("model", ["llama", "qwen2_tied"])
def test_hugging_face_directories_become_rank_files_and_come_back(
    model: str, source: str, golden: Path, tmp_path: Path
) -> None:
    first = read_safetensors(golden / "hf" / model / "safetensors_sharded")
    run(
        Job(
            src=golden / "hf" / model / source,
            dst=tmp_path / "ranks",
            to="megatron",
            topology=TopologyChange(tp=2, pp=3),
            fsync=False,
        )
    )
    assert len(list(tmp_path.glob("ranks/iter_*/mp_rank_*"))) == 6
    run(Job(src=tmp_path / "ranks", dst=tmp_path / "back", to="hf", fsync=False))
    assert read_safetensors(tmp_path / "back") == first
    run(Job(src=tmp_path / "ranks", dst=tmp_path / "dist", to="torch_dist", fsync=False))
    run(Job(src=tmp_path / "dist", dst=tmp_path / "again", to="hf", fsync=False))
    assert read_safetensors(tmp_path / "again") == first


def test_names_of_megatron_may_be_asked_for_in_any_format(golden: Path, tmp_path: Path) -> None:
    src = golden / "hf/llama/safetensors_single"
    run(Job(src=src, dst=tmp_path / "out.pt", to="torch", names="megatron", fsync=False))
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in found["model"]


def test_layers_of_a_converted_model_can_be_stacked_and_quantized(golden: Path, tmp_path: Path) -> None:
    run(
        Job(
            src=golden / GOLD / "tp2_pp1",
            dst=tmp_path / "hf",
            to="hf",
            quantize=((None, "block"),),
            fsync=False,
        )
    )
    found = read_safetensors(tmp_path / "hf")
    assert found["model.layers.0.mlp.up_proj.weight"][0] == "float8_e4m3fn"
    assert found["model.layers.0.mlp.up_proj.weight_scale_inv"][1] == (1, 1)
    assert found["model.embed_tokens.weight"][0] == "bfloat16"
    assert "quantization_config" in json.loads((tmp_path / "hf" / "config.json").read_text())
    run(Job(src=tmp_path / "hf", dst=tmp_path / "wide", dequantize="bfloat16", fsync=False))
    wide = read_safetensors(tmp_path / "wide")
    assert wide["model.layers.0.mlp.up_proj.weight"][0] == "bfloat16"
    assert not any("scale_inv" in key for key in wide)
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())


def test_options_of_the_vocabulary_are_refused_where_they_have_no_effect(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--make-vocab-size-divisible-by has no effect"):
        run(Job(src=golden / GOLD / "tp1_pp1", dst=tmp_path / "out", to="hf", vocab_divisor=64, fsync=False))
    with pytest.raises(UsageError, match="no padding rows"):
        src = golden / "hf/llama/safetensors_single"
        run(Job(src=src, dst=tmp_path / "out", to="megatron", keep_padded_vocab=True, fsync=False))


@pytest.mark.parametrize(
    ("source", "to", "names", "error", "message"),
    [
        (f"{GOLD}/tp1_pp1", "safetensors", "gguf", UsageError, "--names 'gguf' is not known"),
        (f"{GOLD}/tp1_pp1", "safetensors", "megatron:llama", UsageError, "is not known"),
        (f"{GOLD}/tp1_pp1", "hf", "hf:llama", UnsupportedError, "llama"),
        (
            "mcore_legacy/dense_gelu/tp1_pp1",
            "hf",
            None,
            UnsupportedError,
            "LayerNorm|layernorm|normalization|GELU|swiglu",
        ),
        ("torch_dcp/fsdp2_dp2", "hf", None, CheckpointingException, "do not have Megatron's names"),
        ("torch_dcp/fsdp2_dp2", "dcp", "megatron", UsageError, "neither Megatron's names nor Hugging Face's"),
    ],
)
def test_names_that_cannot_be_had_are_refused(
    source: str,
    to: str,
    names: str | None,
    error: type[CheckpointingException],
    message: str,
    golden: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message) as refusal:
        run(Job(src=golden / source, dst=tmp_path / "out", to=to, names=names, fsync=False))
    assert refusal.value.hint
    assert not (tmp_path / "out").exists()
