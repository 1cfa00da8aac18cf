"""Families are data: found by tensors alone, or described by a user's own table."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import core
import core.hf.family
from ckpt_cli.app import main
from core.engine.catalog.catalog import Catalog
from core.errors import CheckpointingException, UnsupportedError, UsageError
from core.files.store import LocalStore
from core.hf.detection import refused_types
from core.hf.family import SECTIONS, families, find_family, parse_family
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.pickle.inert import make_namespace
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.models import (
    COMMON,
    arguments,
    assert_same,
    catalog_of,
    config_of,
    contents,
    saved,
    tensors,
)

OWN = """
model_type = "starship"
architecture = "StarshipForCausalLM"
rows_of = "llama"
without = ["self_attention.linear_proj.bias", "mlp.linear_fc1.bias", "mlp.linear_fc2.bias",
           "self_attention.linear_qkv.bias"]
requires = []
allows = ["tied"]

[config]
hidden_size = "hidden_size"
num_layers = "num_hidden_layers"
num_attention_heads = "num_attention_heads"
max_position_embeddings = "max_position_embeddings"
layernorm_epsilon = "rms_norm_eps"
ffn_hidden_size = "intermediate_size"

[fixed.args]
normalization = "RMSNorm"
swiglu = true

[fixed.config]
hidden_act = "silu"

[[layer]]
megatron = "mlp.linear_fc1.weight"
hf = ["mlp.thrust.weight", "mlp.thrust.weight"]
shape = ["ffn hidden", "ffn hidden"]
fuse = "gated"
source = "our own model"
"""


def _renamed(folder: Path, **changes: object) -> tuple[LocalStore, Catalog, dict[str, object]]:
    """A model with another configuration."""
    store, source = catalog_of(folder)
    return store, source, {**config_of(folder), **changes}


def test_a_model_of_an_unknown_type_with_the_tensors_of_a_family_is_taken_with_a_note(
    tmp_path: Path,
) -> None:
    folder = saved("qwen3", tmp_path / "model")
    store, source, config = _renamed(folder, model_type="starship")
    middle = to_megatron(source, config)
    (note,) = [note for note in middle.notes if "starship" in note]
    assert "exactly those of a qwen3 model" in note
    assert_same(contents(to_hf(middle, model_type="qwen3"), store), tensors(folder))
    # The way back does not guess: the type has no table.
    with pytest.raises(UnsupportedError, match="'starship', which is not a supported family"):
        to_hf(middle)


def test_a_model_that_no_family_fits_is_refused_with_the_nearest_and_what_does_not_fit(
    tmp_path: Path,
) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source, config = _renamed(folder, model_type="starship")
    key = "model.layers.1.self_attn.q_norm.weight"
    source = replace(source, tensors={**source.tensors, key: next(iter(source.tensors.values()))})
    with pytest.raises(UnsupportedError, match="not those of a supported family") as caught:
        to_megatron(source, config)
    hint = str(caught.value.hint)
    assert hint.startswith(f"closest families: llama (differs in {key}); ")
    assert hint.count(" (differs in ") == 3
    assert "--family FILE.toml" in hint


def test_every_family_has_its_file_and_is_found_by_each_of_its_types() -> None:
    tables = Path(core.hf.family.__file__).parent / "tables"
    for name, family in families().items():
        table = tomllib.loads((tables / f"{name}.toml").read_text())
        assert family.model_type == table["model_type"] == name
        assert (*family.aliases,) == (*table.get("aliases", ()),)
        assert all(find_family(item) is family for item in (name, *family.aliases))
        if "rows_of" not in table:
            assert {section: len(rows) for section, rows in family.rows.items()} == {
                section: len(table.get(section, ())) for section in SECTIONS
            }
    assert [find_family(item) for item in ("Llama", "", None, 1, ["llama"])] == [None] * 5


def test_a_known_type_that_megatron_cannot_represent_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source, config = _renamed(folder, model_type="granite")
    with pytest.raises(UnsupportedError, match="residual_multiplier"):
        to_megatron(source, config)
    assert not set(refused_types()) & set(families())


def test_a_refused_family_goes_both_ways_with_the_table_of_the_howto(tmp_path: Path) -> None:
    import transformers

    page = (Path(__file__).parents[2] / "docs/howto/huggingface-megatron.md").read_text()
    (text,) = [
        block.partition("```")[0]
        for block in page.split("```toml\n")
        if block.startswith('model_type = "granite"')
    ]
    table, folder = tmp_path / "granite.toml", tmp_path / "granite"
    table.write_text(text)
    multipliers = {
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.0078125,
    }
    config = transformers.GraniteConfig(**COMMON, **multipliers)
    transformers.GraniteForCausalLM(config).save_pretrained(folder)
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    with pytest.raises(UnsupportedError, match="residual_multiplier") as caught:
        run(Job(src=folder, dst=ranks, to="megatron"))
    assert "--family FILE.toml" in str(caught.value.hint)
    topology = TopologyChange(tp=2, pp=3)
    run(Job(src=folder, dst=ranks, to="megatron", topology=topology, family=table, fsync=False))
    run(Job(src=ranks, dst=back, to="hf", family=table, fsync=False))
    assert_same(tensors(back), tensors(folder))
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    # The fork finds the multipliers among the arguments, and what it changes comes back.
    _, source = catalog_of(folder)
    family = parse_family(text.encode(), file="granite.toml")
    middle = to_megatron(source, config_of(folder), family=family)
    fields = arguments(middle)
    assert [fields[name] for name in ("residual_multiplier", "softmax_scale")] == [0.22, 0.0078125]
    changed = replace(middle, args=make_namespace(fields | {"residual_multiplier": 0.5}))
    document = json.loads(to_hf(changed, family=family).documents["config.json"])
    assert document == config_of(folder) | {"residual_multiplier": 0.5}


def test_a_family_that_megatron_computes_differently_is_converted_with_a_warning(
    tmp_path: Path,
) -> None:
    folder = saved("ernie4_5_moe", tmp_path / "model")
    _, source, config = _renamed(folder)
    middle = to_megatron(source, config)
    for catalog in (middle, to_hf(replace(middle, notes=()))):
        (note,) = (note for note in catalog.notes if "differently" in note)
        assert "computes ernie4_5_moe models differently: the router adds the bias" in note


def test_a_model_with_windows_is_not_taken_for_one_without(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source, config = _renamed(folder, model_type="starship", sliding_window=8)
    fields = arguments(to_megatron(source, config))  # a Mistral, whose layers all have one
    assert fields["window_size"] == (7, 0)
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = arguments(to_megatron(source, config))
    assert fields["window_attn_skip_freq"] == [1, 0, 1]
    folder = saved("qwen2", tmp_path / "qwen2")
    _, source, config = _renamed(folder, model_type="starship", use_sliding_window=None)
    config |= {"sliding_window": 8, "layer_types": None}
    with pytest.raises(UnsupportedError, match="have no sliding window, but sliding_window is set"):
        to_megatron(source, config)


def test_a_familys_values_are_checked_even_if_its_tensors_fit(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source, config = _renamed(folder, model_type="starship", hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="hidden_act is 'gelu'"):
        to_megatron(source, config)


def test_arguments_that_fit_several_families_are_refused_unless_one_is_named(
    tmp_path: Path,
) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source, config = _renamed(folder)
    middle = to_megatron(source, config)
    # Only families that are never recognised by their arguments have such rotary embeddings.
    fields = arguments(middle) | {"rotary_percent": 0.5, "huggingface_config": None}
    middle = replace(middle, args=make_namespace(fields))
    assert to_hf(middle, model_type="phi3").documents
    with pytest.raises(
        UnsupportedError,
        match="does not belong to the llama family, because .*rotary_percent is 0.5",
    ):
        to_hf(middle, model_type="llama")


def test_a_users_own_family_goes_both_ways_through_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("phi3", tmp_path / "phi3")
    model = _starship(folder, tmp_path / "starship")
    table = tmp_path / "starship.toml"
    table.write_text(OWN)
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    args = ["--family", str(table), "--quiet"]
    main(["convert", str(model), str(ranks), "--to", "megatron", "--tp-new", "2", *args])
    main(["convert", str(ranks), str(back), "--to", "hf", *args])
    capsys.readouterr()
    assert_same(tensors(back), tensors(model))
    assert (back / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_a_users_own_family_names_the_tensors_of_an_opened_checkpoint(tmp_path: Path) -> None:
    model = _starship(saved("phi3", tmp_path / "phi3"), tmp_path / "starship")
    table = tmp_path / "starship.toml"
    table.write_text(OWN)
    truth = load_file(model / "model.safetensors")["model.layers.0.mlp.thrust.weight"]
    with core.open(model) as checkpoint:
        with pytest.raises(UnsupportedError, match="'starship' are not supported"):
            checkpoint.named("megatron")
        fused = checkpoint.named("megatron", family=table)
        gate_up = fused["decoder.layers.0.mlp.linear_fc1.weight"]
        assert gate_up.torch().equal(truth)
        with pytest.raises(CheckpointingException, match="nowhere"):
            checkpoint.named("megatron", family=tmp_path / "nowhere.toml")
    ranks = tmp_path / "ranks"
    core.convert(model, ranks, to="megatron", family=table)
    with core.open(ranks) as checkpoint:
        named = checkpoint.named("hf", family=table)
        assert named["model.layers.0.mlp.thrust.weight"].torch().equal(truth)


def _starship(phi3: Path, folder: Path) -> Path:
    """A model of a type of its own, with a fused matrix under another name."""
    from safetensors.torch import save_file

    weights = load_file(phi3 / "model.safetensors")
    q, k, v = 32, 16, 16
    starship = {}
    for key, tensor in weights.items():
        if "qkv_proj" in key:
            for part, rows in zip("qkv", tensor.split((q, k, v)), strict=True):
                starship[key.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()
        else:
            starship[key.replace("gate_up_proj", "thrust")] = tensor
    folder.mkdir()
    save_file(starship, folder / "model.safetensors")
    config = {**config_of(phi3), "model_type": "starship", "architectures": ["StarshipForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rows_of", "rows_off"), "no field 'rows_off'"),
        (('"llama"', '"lama"'), "the table 'lama', which does not exist"),
        (("[config]", "[config"), "not valid TOML"),
        (('model_type = "starship"', ""), "the field 'model_type' is missing"),
        (('megatron = "mlp.linear_fc1.weight"', 'megatron = "mlp.fc9"'), "layer has no row"),
        (('fuse = "gated"', ""), "must have one shape per name"),
        (
            ('model_type = "starship"', 'model_type = "starship"\nbody = []'),
            "body is an empty list",
        ),
        (
            ('model_type = "starship"', 'model_type = "starship"\nlayers = 3'),
            "layers is 3, not a string",
        ),
        (
            ('model_type = "starship"', 'model_type = "starship"\ninner = "x"'),
            "inner is 'x', not a positive number",
        ),
        (
            ('hidden_size = "hidden_size"', "hidden_size = []"),
            r"hidden_size in \[config\] is an empty list; only num_query_groups and kv_channels",
        ),
    ],
)
def test_a_table_with_a_mistake_is_refused_naming_it(change: tuple[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_family(OWN.replace(*change, 1).encode(), file="starship.toml")


def test_an_unknown_size_in_a_users_table_is_refused(tmp_path: Path) -> None:
    _, source, config = _renamed(_starship(saved("phi3", tmp_path / "m"), tmp_path / "model"))
    family = parse_family(OWN.replace("ffn hidden", "fnn hidden").encode(), file="starship.toml")
    with pytest.raises(UnsupportedError, match="the size 'fnn' for"):
        to_megatron(source, config, family=family)


def test_config_supplies_what_a_run_of_megatron_has_lost(tmp_path: Path) -> None:
    folder = saved("mistral_window", tmp_path / "model")
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    run(Job(src=folder, dst=ranks, to="megatron"))
    text = json.loads((folder / "config.json").read_text()) | {"our_own": 3}
    (tmp_path / "config.json").write_text(json.dumps(text))
    run(Job(src=ranks, dst=back, to="hf", config=tmp_path / "config.json"))
    assert (back / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    table = tmp_path / "starship.toml"
    table.write_text(OWN)
    with pytest.raises(UsageError, match="--family has no effect"):
        run(Job(src=folder, dst=tmp_path / "x", to="safetensors", family=table))
