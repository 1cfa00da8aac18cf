"""Checkpoints that other software wrote: Hugging Face directories, and Megatron's rank files and
torch_dist.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.errors import UnsupportedError
from core.files.store import LocalStore
from core.formats.huggingface import bin_format as bin_shards
from core.formats.safetensors import format as safetensors
from core.hf.names import is_hf
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.unshard import unshard
from core.pickle.inert import make_namespace
from tests.hf.models import (
    arguments,
    assert_same,
    bytes_of,
    catalog_of,
    config_of,
    contents,
    loaded_model,
    logits,
    tensors,
    written,
)
from tests.megatron.support.megatron_gold import (
    RULES,
    dist_files,
    filled,
    global_form,
    rank_files,
    stored,
)
from tests.support.facets import facet_of, with_facts
from tests.support.materialize import Bytes, tensor_bytes

HF = {
    "llama/safetensors_single": safetensors,
    "llama/safetensors_sharded": safetensors,
    "llama/bin_sharded": bin_shards,
    "qwen2_tied/safetensors_single": safetensors,
    "qwen2_tied/safetensors_sharded": safetensors,
    "qwen2_tied/bin_sharded": bin_shards,
}


def oracle(golden: Path, name: str) -> dict[str, Bytes]:
    with safe_open(golden / "oracle" / "hf" / f"{name}.safetensors", framework="pt") as file:
        return {key: bytes_of(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("case", HF)
def test_a_hugging_face_directory_comes_back_bit_for_bit(golden: Path, case: str) -> None:
    folder = golden / "hf" / case
    store = LocalStore(folder)
    source = HF[case].FORMAT.read(store)
    config = config_of(folder)
    assert is_hf(source, config)
    back = to_hf(to_megatron(source, config))
    name = case.partition("/")[0]
    wanted = oracle(golden, name)
    if name == "qwen2_tied":
        wanted.pop("lm_head.weight", None)
    assert_same(contents(back, store), wanted)


def test_a_copy_of_tied_embeddings_is_compared_and_not_written(golden: Path) -> None:
    folder = golden / "hf" / "qwen2_tied" / "bin_sharded"
    store = LocalStore(folder)
    source = bin_shards.FORMAT.read(store)
    assert "lm_head.weight" in source.tensors
    middle = to_megatron(source, config_of(folder))
    pieces = middle.fragments("embedding.word_embeddings.weight")
    assert len(pieces) == 2
    assert pieces[0].box == pieces[1].box
    assert "output_layer.weight" not in middle.tensors
    assert any("lm_head.weight" in note for note in middle.notes)
    assert "lm_head.weight" not in to_hf(middle).tensors


@pytest.mark.parametrize("case", ["tp1_pp1", "tp2_pp2", "tp4_pp1", "tp1_pp2_vpp2"])
def test_rank_files_become_a_directory_that_transformers_loads(
    golden: Path, case: str, tmp_path: Path
) -> None:
    store, middle = global_form(golden, "dense_gqa", case)
    saved = to_hf(middle)
    assert facet_of(saved, HuggingFaceModel).model_type == "qwen2"
    assert saved.tensors["model.embed_tokens.weight"].shape == (300, 64)
    folder = written(saved, store, tmp_path / "model")
    model = loaded_model(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert logits(model).isfinite().all()
    for key, value in model.state_dict().items():
        assert np.array_equal(bytes_of(value), tensor_bytes(saved, store, key)), key


@pytest.mark.parametrize(
    ("model", "family", "divisible_by"),
    [("dense_gqa", "qwen2", 64), ("moe_seq", "mixtral", 64), ("dense_gelu", "gpt2", 128)],
)
@pytest.mark.parametrize("case", ["tp1_pp1", "tp2_pp1"])
def test_rank_files_come_back_bit_for_bit(
    golden: Path, model: str, family: str, divisible_by: int, case: str, tmp_path: Path
) -> None:
    store, middle = global_form(golden, model, "tp1_pp1")
    folder = written(to_hf(middle), store, tmp_path / "model")
    assert config_of(folder)["model_type"] == family
    ours, source = catalog_of(folder)
    again = to_megatron(
        source,
        config_of(folder),
        transformer_impl="local",
        make_vocab_size_divisible_by=divisible_by,
    )
    target = shard(again, Topology(tp=int(case[2])), rules=RULES)
    gold_store, gold = rank_files(golden, model, case)
    wanted = {name: data for name, data in stored(gold, gold_store).items() if ":model." in name}
    filled_arrays = filled(target, again, ours)
    assert_same(filled_arrays, wanted)


def test_torch_dist_and_rank_files_make_the_same_directory(golden: Path) -> None:
    store, ranks = global_form(golden, "dense_gqa", "tp2_pp2")
    dist_store, dist = dist_files(golden, "mcore0161_torch_dist", "dense_gqa", "tp2_pp2")
    from_ranks, other = to_hf(ranks), to_hf(unshard(dist, rules=RULES))
    assert from_ranks.documents == other.documents
    assert_same(contents(from_ranks, store), contents(other, dist_store))


def test_what_has_no_place_in_a_directory_is_listed(golden: Path) -> None:
    _, middle = global_form(golden, "dense_gqa", "tp2_pp2")
    model = to_hf(middle)
    assert [entry.names[0] for entry in model.dropped if entry.is_listed] == [
        "args",
        "rng_state",
        "checkpoint_version",
        "iteration",
        "num_floating_point_operations_so_far",
    ]
    assert model.objects == {}


def test_config_json_is_the_same_every_time_and_sorted(golden: Path) -> None:
    _, middle = global_form(golden, "dense_gqa", "tp2_pp2")
    documents = to_hf(middle).documents
    text = documents["config.json"]
    assert to_hf(middle).documents == documents
    config = json.loads(text)
    assert list(config) == sorted(config)
    assert (config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]) == (
        4,
        8,
        1e-5,
    )


def test_a_model_of_no_family_is_refused_by_the_argument_that_does_not_fit(golden: Path) -> None:
    _, middle = global_form(golden, "dense_gelu", "tp1_pp1")
    changed = make_namespace({**arguments(middle), "squared_relu": True})
    with pytest.raises(
        UnsupportedError, match="no Hugging Face model family fits.*argument squared_relu is True"
    ):
        to_hf(replace(middle, args=changed))


def test_rank_files_of_the_first_gpt_become_a_gpt2_that_transformers_loads(
    golden: Path, tmp_path: Path
) -> None:
    store, middle = global_form(golden, "dense_gelu", "tp2_pp1")
    saved = to_hf(middle)
    assert facet_of(saved, HuggingFaceModel).model_type == "gpt2"
    folder = written(saved, store, tmp_path / "model")
    model = loaded_model(folder)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert logits(model).isfinite().all()
    # GPT-2 has a key head for each query head, and heads that share the hidden channels.
    for name, value in (("num_query_groups", 2), ("kv_channels", 16)):
        changes = {name: value, "group_query_attention": name == "num_query_groups"}
        args = make_namespace({**arguments(middle), **changes})
        with pytest.raises(UnsupportedError, match=f"argument {name} is {value}, not"):
            to_hf(replace(middle, args=args), model_type="gpt2")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "deepseek_v3"])
def test_another_family_than_the_models_is_refused(golden: Path, family: str) -> None:
    _, middle = global_form(golden, "dense_gqa", "tp1_pp1")
    with pytest.raises(
        UnsupportedError, match=f"not belong to the {family} family.*argument add_qkv_bias is True"
    ):
        to_hf(middle, model_type=family)


def test_an_unknown_vocabulary_size_is_asked_for(golden: Path) -> None:
    _, middle = global_form(golden, "dense_gqa", "tp1_pp1")
    with pytest.raises(UnsupportedError, match="--vocab-size"):
        to_hf(with_facts(middle, MegatronModel, vocab_size=None))


def test_padding_rows_that_were_kept_are_cut(golden: Path) -> None:
    store, cut = global_form(golden, "dense_gqa", "tp4_pp1")
    _, padded = global_form(golden, "dense_gqa", "tp4_pp1", target_tp=4)
    assert_same(contents(to_hf(padded), store), contents(to_hf(cut), store))


def test_tensors_of_a_directory_are_all_there(golden: Path) -> None:
    assert len(tensors(golden / "hf" / "llama" / "safetensors_sharded")) == len(
        oracle(golden, "llama")
    )
