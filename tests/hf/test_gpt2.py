"""GPT-2, GPT-BigCode and GPT-NeoX: published names, transposed matrices and what Megatron lacks.

That they come back and have the same logits is in test_round_trip and test_megatron_logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedError
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.pickle.inert import make_namespace
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.models import arguments, assert_same, catalog_of, config_of, contents, saved, tensors
from tests.hf.stepped import save_stepped

QKV = "self_attention.linear_qkv.weight"


def _in_megatrons_order(columns: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The rows of each head's query, key and value, of columns of all queries, keys and values."""
    hidden = columns.shape[0]
    parts = columns.T.reshape(3, n_heads, hidden // n_heads, hidden)
    return parts.transpose(0, 1).reshape(3 * hidden, hidden)


def test_published_names_without_a_beginning_and_with_masks_are_read(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "model")
    store, source = catalog_of(folder)
    weights = load_file(folder / "model.safetensors")
    published = tmp_path / "published"
    published.mkdir()
    old = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(3)}
    save_file(old | masks, published / "model.safetensors")
    other_store, other = catalog_of(published)
    config = config_of(folder)
    ours = to_megatron(other, config, transformer_impl="local")
    theirs = to_megatron(source, config, transformer_impl="local")
    assert_same(contents(ours, other_store), contents(theirs, store))
    assert "h.0.attn.bias" in [name for entry in ours.dropped for name in entry.names]
    # Written out once without the tables: the rows of each head, not transposed.
    key = "transformer.h.1.attn.c_attn.weight"
    wanted = _in_megatrons_order(weights[key], 8)
    content = contents(theirs, store)[f"decoder.layers.1.{QKV}"]
    assert np.array_equal(content, wanted.contiguous().view(torch.uint8).numpy().reshape(96, 32, 2))
    assert arguments(theirs)["position_embedding_type"] == "learned_absolute"


def test_states_of_transposed_matrices_are_their_own_both_ways(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    states = save_stepped(model, torch.optim.AdamW(model.parameters()), tmp_path)
    run(
        Job(
            src=tmp_path / "state.pt",
            dst=tmp_path / "megatron",
            to="torch_dist",
            config=tmp_path / "config.json",
            strip_prefix=("model.",),
            transformer_impl="local",
            fsync=False,
        )
    )
    (folder,) = (tmp_path / "megatron").glob("iter_*")
    for state in ("exp_avg", "exp_avg_sq"):
        name = f"optimizer.state.{state}.decoder.layers.{QKV}"
        restored = {name: torch.empty(2, 48, 16)}
        dcp.load(restored, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        for number in range(2):
            key = f"transformer.h.{number}.attn.c_attn.weight"
            wanted = _in_megatrons_order(states[key][state], 4)
            assert torch.equal(restored[name][number], wanted), (state, number)

    run(Job(src=tmp_path / "megatron", dst=tmp_path / "back", to="ucp", names="hf", fsync=False))
    (zero,) = (tmp_path / "back").glob("**/zero")
    for number in range(2):
        for module in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            key = f"transformer.h.{number}.{module}.weight"
            for state in ("exp_avg", "exp_avg_sq"):
                restored = torch.load(zero / key / f"{state}.pt", weights_only=False)["param"]
                assert torch.equal(restored, states[key][state]), (key, state)


def test_one_key_head_for_all_queries_is_one_query_group(tmp_path: Path) -> None:
    for name, groups in (("gpt_bigcode", 1), ("gpt_bigcode_heads", 8)):
        folder = saved(name, tmp_path / name)
        middle = to_megatron(catalog_of(folder)[1], config_of(folder), transformer_impl="local")
        assert arguments(middle)["num_query_groups"] == groups
        topology = TopologyChange(tp=2, pp=3)
        ranks, back = tmp_path / f"{name}-ranks", tmp_path / f"{name}-back"
        run(Job(src=folder, dst=ranks, to="megatron", topology=topology, fsync=False))
        run(Job(src=ranks, dst=back, to="hf", fsync=False))
        assert_same(tensors(back), tensors(folder))
        assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("family", "name", "written"),
    [
        ("gpt2", "activation_function", "gelu_new"),
        ("gpt_bigcode", "activation_function", "gelu_pytorch_tanh"),
        ("gpt_neox", "hidden_act", "gelu_new"),
        ("starcoder2", "hidden_act", "gelu_pytorch_tanh"),
    ],
)
def test_the_gelu_is_megatrons_fused_one_or_the_exact_one(
    family: str, name: str, written: str, tmp_path: Path
) -> None:
    folder = saved(family, tmp_path / "model")
    source, config = catalog_of(folder)[1], config_of(folder)
    for value, is_fused in (("gelu", False), ("gelu_pytorch_tanh", True), ("gelu_fast", True)):
        middle = to_megatron(source, config | {name: value})
        fields = arguments(middle)
        assert fields["bias_gelu_fusion"] is is_fused
        option = "without --no-bias-gelu-fusion" if is_fused else "with --no-bias-gelu-fusion"
        assert any(note.endswith(option) for note in middle.notes)
        # config.json as the arguments alone describe it, and as a run with the other option says.
        remaining = {key: item for key, item in fields.items() if "config" not in key}
        for fusion in (is_fused, not is_fused):
            args = make_namespace(remaining | {"bias_gelu_fusion": fusion})
            back = to_hf(replace(middle, args=args), model_type=family)
            stated = json.loads(back.documents["config.json"])[name]
            assert stated == (written if fusion else "gelu")
            args = make_namespace(fields | {"bias_gelu_fusion": fusion})
            stated = json.loads(to_hf(replace(middle, args=args)).documents["config.json"])[name]
            assert stated == (value if fusion is is_fused else written if fusion else "gelu")
    with pytest.raises(UnsupportedError, match=f"{name} is 'relu'"):
        to_megatron(source, config | {name: "relu"})


def test_what_megatron_has_no_layers_for_is_refused_with_the_reason(tmp_path: Path) -> None:
    neox, gpt2 = saved("gpt_neox", tmp_path / "neox"), saved("gpt2", tmp_path / "gpt2")
    config = {**config_of(neox), "use_parallel_residual": True}
    with pytest.raises(UnsupportedError, match="read the same input"):
        to_megatron(catalog_of(neox)[1], config)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        with pytest.raises(UnsupportedError, match=f"{name} is True"):
            to_megatron(catalog_of(gpt2)[1], {**config_of(gpt2), name: True})


def test_names_of_rotary_embeddings_in_older_files_of_gpt_neox_are_read(tmp_path: Path) -> None:
    folder = saved("gpt_neox", tmp_path / "model")
    _, source = catalog_of(folder)
    new = config_of(folder)
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rotary_pct": 0.5, "rotary_emb_base": 10000}
    ours, theirs = (arguments(to_megatron(source, config)) for config in (old, new))
    for name in ("rotary_percent", "rotary_base"):
        assert ours[name] == theirs[name]
    assert ours["rotary_percent"] == 0.5
