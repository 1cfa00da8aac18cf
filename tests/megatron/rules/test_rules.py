"""core.megatron.rules.rules: rules as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import MissingShardError, UnknownTensorError, UnsupportedError, UsageError
from core.megatron.reshard.equal_shards import EqualShards, suggest_rules
from core.megatron.rules.rules import format_table
from core.megatron.rules.tables import load_rules
from tests.support.followed_hints import read_rules

RULES = load_rules()


@pytest.mark.parametrize(
    ("name", "kind", "axis", "parts"),
    [
        ("embedding.word_embeddings.weight", "vocab", 0, "whole"),
        ("output_layer.weight", "vocab", 0, "whole"),
        ("embedding.position_embeddings.weight", "replicate", None, "whole"),
        ("decoder.layers.0.input_layernorm.weight", "replicate", None, "whole"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_bias", "replicate", None, "whole"),
        ("decoder.layers.11.self_attention.linear_qkv.weight", "split", 0, "whole"),
        ("decoder.layers.11.self_attention.linear_qkv.bias", "split", 0, "whole"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "replicate", None, "whole"),
        ("decoder.layers.0.self_attention.linear_proj.weight", "split", 1, "whole"),
        ("decoder.layers.0.self_attention.linear_proj.bias", "replicate", None, "whole"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "split", 0, "gated"),
        ("decoder.layers.0.mlp.linear_fc1.bias", "split", 0, "gated"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "replicate", None, "whole"),
        ("decoder.layers.0.mlp.linear_fc2.weight", "split", 1, "whole"),
        ("decoder.layers.0.mlp.linear_fc2.bias", "replicate", None, "whole"),
        ("decoder.layers.0.mlp.linear_fc2._extra_state", "opaque", None, "whole"),
        ("decoder.layers.0.mlp.router.weight", "replicate", None, "whole"),
        ("decoder.layers.0.mlp.router.expert_bias", "replicate", None, "whole"),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", "split", 0, "gated"),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", "split", 1, "whole"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.bias",
            "replicate",
            None,
            "whole",
        ),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "split", 0, "gated"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", "split", 1, "whole"),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", "replicate", None, "whole"),
        ("decoder.layers.0.mlp.fc1_latent_proj.weight", "replicate", None, "whole"),
        ("decoder.layers.0.self_attention.linear_q_proj.weight", "split", 0, "whole"),
        ("decoder.layers.0.self_attention.linear_q_down_proj.weight", "replicate", None, "whole"),
        ("decoder.layers.0.self_attention.linear_q_up_proj.weight", "split", 0, "whole"),
        (
            "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
            "replicate",
            None,
            "whole",
        ),
        ("decoder.layers.0.self_attention.linear_kv_down_proj.weight", "replicate", None, "whole"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.weight", "split", 0, "whole"),
        ("decoder.layers.0.self_attention.kv_layernorm.weight", "replicate", None, "whole"),
        ("decoder.final_layernorm.weight", "replicate", None, "whole"),
    ],
)
def test_rule_of_a_gpt_parameter(name: str, kind: str, axis: int | None, parts: str) -> None:
    rule = RULES.rule_of(name)
    assert (rule.kind, rule.cut_axis, rule.parts) == (kind, axis, parts)


@pytest.mark.parametrize(
    ("names", "rest", "name"),
    [
        ("sequential", "linear_fc1.weight", "local_experts.12.linear_fc1.weight"),
        ("te_grouped", "linear_fc1.weight", "linear_fc1.weight12"),
        ("te_grouped", "linear_fc2.bias", "linear_fc2.bias12"),
        ("te_grouped", "linear_fc2._extra_state", "linear_fc2._extra_state"),
        ("stacked", "linear_fc2._extra_state", "experts.linear_fc2._extra_state"),
        ("single", "linear_fc2.weight", "experts.12.linear_fc2.weight"),
    ],
)
def test_experts_have_the_names_of_their_implementation(names: str, rest: str, name: str) -> None:
    expert = RULES.expert_of(f"decoder.layers.3.mlp.experts.local_experts.12.{rest}")
    assert expert is not None and (expert.number, expert.rest, expert.names) == (
        12,
        rest,
        "sequential",
    )
    full_name = RULES.expert_name(expert, names=names, number=12)
    assert full_name == f"decoder.layers.3.mlp.experts.{name}"
    again = RULES.expert_of(full_name)
    assert again is not None and (again.before, again.rest, again.names) == (
        expert.before,
        rest,
        names,
    )
    assert again.number == (12 if "12" in name else None)


def test_grouped_parameters_and_other_modules_are_told_from_experts() -> None:
    first = RULES.expert_of("decoder.layers.0.mlp.experts.weight1")
    assert first is not None and (first.number, first.rest, first.names) == (
        None,
        "linear_fc1.weight",
        "grouped",
    )
    assert RULES.expert_of("decoder.layers.0.mlp.shared_experts.linear_fc1.weight") is None
    assert RULES.expert_of("decoder.layers.0.mlp.experts.weight3") is None
    assert (
        RULES.expert_name(first, names="grouped", number=3)
        == "decoder.layers.0.mlp.experts.weight1"
    )
    bias = RULES.expert_of("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.bias")
    assert bias is not None
    with pytest.raises(UnsupportedError, match="do not have this parameter"):
        RULES.expert_name(bias, names="grouped", number=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight",
            "adapters that several experts share",
        ),
        ("decoder.layers.0.mlp.linear_fc1.weight_quantizer._scale", "quantized models"),
        (
            "decoder.layers.0.mlp.linear_fc1.weight_scale_inv",
            "float8 weights with scales of blocks",
        ),
    ],
)
def test_what_is_not_handled_yet_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        RULES.rule_of(name)
    assert not isinstance(caught.value, UnknownTensorError)
    assert caught.value.key == name


def test_an_unknown_name_is_an_error_with_shapes_and_a_row_that_works(tmp_path: Path) -> None:
    name = "decoder.layers.3.mlp.extra.weight"
    with pytest.raises(UnknownTensorError) as caught:
        RULES.rule_of(name, shapes=[(4, 8), (4, 8)])
    assert "2 ranks: 4×8" in caught.value.message
    path = tmp_path / "rules.toml"
    path.write_text(read_rules(caught.value.hint))
    more = load_rules(path)
    assert more.rule_of(name).kind == "split"
    assert more.rule_of(name.replace("3", "17")).kind == "split"
    assert more.rule_of("decoder.layers.3.mlp.linear_fc2.weight").cut_axis == 1


@pytest.mark.parametrize(
    ("shape", "tp", "kind", "axis"),
    [
        ((24, 16), 2, "split", 0),
        ((16, 24), 2, "split", 1),
        ((16, 16), 2, "replicate", None),
        ((16,), 2, "replicate", None),
        ((), 1, "replicate", None),
    ],
)
def test_a_proposed_row_follows_the_hidden_size(
    tmp_path: Path, shape: tuple[int, ...], tp: int, kind: str, axis: int | None
) -> None:
    with pytest.raises(UnknownTensorError) as caught:
        RULES.rule_of(
            "decoder.layers.3.mlp.extra.weight", shapes=[shape] * tp, hidden_size=16, tp=tp
        )
    path = tmp_path / "rules.toml"
    path.write_text(read_rules(caught.value.hint))
    rule = load_rules(path).rule_of("decoder.layers.7.mlp.extra.weight")
    assert (rule.kind, rule.cut_axis) == (kind, axis)


@pytest.mark.parametrize("name", ["a'b.weight", "a\nb", 'a"b\\d.0.weight', "ä.[x]", "\u2028", ""])
def test_a_proposed_row_holds_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(format_table("rule", [name, "other"], 'rule = "replicate"'))
    rules = load_rules(path)
    assert rules.rule_of(name).is_users
    assert rules.rule_of("other").is_users
    assert not rules.rule_of("decoder.layers.0.mlp.linear_fc2.weight").is_users


CUT = (
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_q_up_proj.weight",
    "decoder.layers.0.mixer.in_proj.weight",
    "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
    "embedding.word_embeddings.weight",
)


@pytest.mark.parametrize("names", [*((name,) for name in CUT), CUT[:2], CUT])
def test_rules_for_equal_shards_can_be_copied_as_they_are(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    equal = [EqualShards(name, RULES.rule_of(name), (0, 1), 2) for name in names]
    path = tmp_path / "rules.toml"
    path.write_text(read_rules(suggest_rules(equal)))
    rules = load_rules(path)
    assert {rules.rule_of(name).kind for name in names} == {"replicate"}

    # So can the alternative, without its marks: it cuts as before.
    lines = path.read_text().replace('rule = "replicate"\n# or', "# Or").split("\n")
    path.write_text("\n".join(line.removeprefix("# ") for line in lines if "# Or" not in line))
    rules = load_rules(path)
    for name in names:
        old, new = RULES.rule_of(name), rules.rule_of(name)
        assert new.is_users
        for field in ("kind", "axis", "parts", "segments", "unit", "group"):
            assert getattr(new, field) == getattr(old, field), (name, field)


def test_the_first_of_two_rows_that_fit_decides(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    rows = ("rule = 'split'\naxis = 1", "rule = 'split'\naxis = 0", "rule = 'replicate'")
    path.write_text("".join(f"[[rule]]\npattern = 'mlp'\n{row}\n" for row in rows))
    rules = load_rules(path)
    assert rules.rule_of("decoder.layers.0.mlp.linear_fc1.weight").cut_axis == 1
    assert rules.rule_of("decoder.layers.0.mlp.linear_fc2.bias").cut_axis == 1
    assert rules.rule_of("decoder.layers.0.self_attention.linear_qkv.weight").cut_axis == 0


def test_a_users_row_may_set_every_field(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        "[[rule]]\npattern = 'gadget$'\nrule = 'split'\naxis = 0\nparts = 'gated'\ngroup = "
        "'etp'\nunit = 'heads'\n"
        "shape = ['kv_lora_rank', '']\ntied = 'a'\nsingle = 'b'\nsource = 'c'\n"
        "[[rule]]\npattern = 'later$'\nrule = 'opaque'\nlater = 'gadgets'\n"
    )
    rule = load_rules(path).rule_of("gadget")
    assert (rule.kind, rule.axis, rule.parts, rule.group, rule.unit) == (
        "split",
        0,
        "gated",
        "etp",
        "heads",
    )
    assert [None if size is None else size.text for size in rule.shape] == ["kv_lora_rank", None]
    assert (rule.tied, rule.single, rule.source, rule.is_users) == ("a", "b", "c", True)
    with pytest.raises(UnsupportedError, match="gadgets cannot be resharded"):
        load_rules(path).rule_of("later")


def test_a_users_rows_come_first(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        "[[rule]]\npattern = 'position_embeddings'\nrule = 'split'\naxis = 1\n"
        "[[stage]]\npattern = '^embedding'\nstage = 'last'\n"
    )
    rules = load_rules(path)
    assert rules.rule_of("embedding.position_embeddings.weight").cut_axis == 1
    assert rules.stage_of("embedding.position_embeddings.weight") == "last"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]\n", "not valid TOML"),
        ("[[rule]]\nrule = 'split'\naxis = 0\n", "has no pattern"),
        ("[[rule]]\npattern = '('\nrule = 'replicate'\n", "not a valid regular expression"),
        ("[[rule]]\npattern = 'a'\nrule = 'mirror'\n", "rule = 'mirror'"),
        ("[[rule]]\npattern = 'a'\nrule = 'split'\n", "needs an axis"),
        ("[[rule]]\npattern = 'a'\nrule = 'split'\naxis = -1\n", "needs an axis"),
        ("[[rule]]\npattern = 'a'\nrule = 'split'\naxis = 0\nparts = 'three'\n", "parts = 'three'"),
        ("[[rule]]\npattern = 'a'\nrule = 'expert'\n", "rule = 'expert'"),
        (
            "[[rule]]\npattern = 'a'\nrule = 'replicate'\ngroup = 'ep'\n",
            "group = 'ep', but group must be tp or etp",
        ),
        ("[[rule]]\npattern = 'a'\nrule = 'replicate'\nshape = 'rows'\n", "has shape = 'rows'"),
        ("[[rule]]\npattern = 'a'\nrule = 'replicate'\nshape = ['a b']\n", "has shape"),
        ("[[rule]]\npattern = 'a'\nrule = 'replicate'\nnames = 'x'\n", "not a list of strings"),
        ("[[rule]]\npattern = 'a'\nrule = 'replicate'\ncolour = 1\n", "unknown fields: colour"),
        ("[[stage]]\npattern = 'a'\nstage = 'middle'\n", "must have only a pattern and a stage"),
        ("[rule]\npattern = 'a'\n", "must be a list of tables"),
        ("[[rules]]\npattern = 'a'\n", "unknown tables: rules"),
    ],
)
def test_rows_that_make_no_sense_name_the_file_and_the_fault(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_rules(path)
    assert caught.value.file == str(path)


def test_a_rules_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError):
        load_rules(tmp_path / "absent.toml")


def test_fused_and_local_names_are_inverse() -> None:
    for sub in ("input_layernorm.weight", "pre_mlp_layernorm.bias", "mlp.linear_fc1.weight"):
        assert RULES.local(RULES.fused(sub)) == sub
    assert RULES.fused("input_layernorm.weight") == "self_attention.linear_qkv.layer_norm_weight"


def test_every_rule_says_where_it_was_established() -> None:
    assert all(rule.source for rule in RULES.rules)
