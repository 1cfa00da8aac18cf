"""Rank files of forks with the names of megatron.legacy: gates by other arguments, heads that share
keys and values, tensors that every rank holds complete.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.support.followed_hints import read_rules
from tests.support.rank_files import MODEL_FILE

LAYERS, HIDDEN, HEADS, HEAD, FFN, ROWS = 2, 16, 4, 4, 24, 128
Tensors = dict[str, torch.Tensor]
AXES = {
    "dense.weight": 1,
    "dense_4h_to_h.weight": 1,
    "word_embeddings.weight": 0,
    "query.weight": 0,
    "query_key_value.weight": 0,
    "query_key_value.bias": 0,
    "dense_h_to_4h.weight": 0,
    "dense_h_to_4h.bias": 0,
    "query.bias": 0,
}


def complete(*, gated: bool = False, groups: int | None = None, split: bool = False) -> Tensors:
    """The tensors of a model, by their names in one file, with random values."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"embedding.word_embeddings.weight": random(ROWS, HIDDEN)}
    for layer in range(LAYERS):
        start = f"encoder.layers.{layer}."
        rows = (HEADS + 2 * (groups or HEADS)) * HEAD
        if split:
            tensors[start + "self_attention.query.weight"] = random(HEADS * HEAD, HIDDEN)
            tensors[start + "self_attention.query.bias"] = random(HEADS * HEAD)
            tensors[start + "self_attention.key_value.weight"] = random(
                2 * (groups or HEADS) * HEAD, HIDDEN
            )
            tensors[start + "self_attention.key_value.bias"] = random(2 * (groups or HEADS) * HEAD)
        else:
            tensors[start + "self_attention.query_key_value.weight"] = random(rows, HIDDEN)
            tensors[start + "self_attention.query_key_value.bias"] = random(rows)
        tensors[start + "self_attention.dense.weight"] = random(HIDDEN, HEADS * HEAD)
        tensors[start + "input_layernorm.weight"] = random(HIDDEN)
        tensors[start + "post_attention_layernorm.weight"] = random(HIDDEN)
        tensors[start + "mlp.dense_h_to_4h.weight"] = random((1 + gated) * FFN, HIDDEN)
        tensors[start + "mlp.dense_h_to_4h.bias"] = random((1 + gated) * FFN)
        tensors[start + "mlp.dense_4h_to_h.weight"] = random(HIDDEN, FFN)
    tensors["encoder.final_layernorm.weight"] = random(HIDDEN)
    return tensors


def shards(name: str, tensor: torch.Tensor, tp: int, *, gated: bool, cut: dict[str, int]) -> Any:
    axis = next((axis for end, axis in cut.items() if name.endswith("." + end)), None)
    if axis is None:
        return [tensor.clone() for _ in range(tp)]
    parts = tensor.chunk(2) if gated and "h_to_4h" in name else (tensor,)
    cuts = [part.chunk(tp, axis) for part in parts]
    return [torch.cat([item[rank] for item in cuts], axis) for rank in range(tp)]


def save(
    root: Path,
    tensors: Tensors,
    tp: int = 2,
    *,
    gated: bool = False,
    cut: dict[str, int] = AXES,
    **arguments: object,
) -> Path:
    """Save rank files as such a fork does."""
    args = Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        kv_channels=HEAD,
        ffn_hidden_size=FFN,
        padded_vocab_size=ROWS,
        make_vocab_size_divisible_by=16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    vars(args).update(arguments)
    by_rank: list[dict[str, Any]] = [
        {"embedding": {"word_embeddings": {}}, "encoder": {}} for _ in range(tp)
    ]
    for name, tensor in tensors.items():
        for model, shard in zip(
            by_rank, shards(name, tensor, tp, gated=gated, cut=cut), strict=True
        ):
            module, _, rest = name.partition(".")
            if module == "embedding":
                model["embedding"]["word_embeddings"][rest.rpartition(".")[2]] = shard
            else:
                model["encoder"][rest] = shard
    for rank, model in enumerate(by_rank):
        folder = root / "iter_0000010" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        torch.save(
            {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": 10,
                "model": {"language_model": model},
            },
            folder / MODEL_FILE,
        )
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def reshard(source: Path, target: Path, tp: int, rules: Path | None = None) -> list[Tensors]:
    """The encoders in the files of a checkpoint at another size."""
    run(
        Job(
            src=source,
            dst=target,
            topology=TopologyChange(tp=tp),
            keep_padded_vocab=True,
            rules=rules,
            fsync=False,
        )
    )
    return [
        torch.load(path, weights_only=False)["model"]["language_model"]["encoder"]
        for path in sorted(target.glob(f"*/*/{MODEL_FILE}"))
    ]


def assert_shards(
    encoders: list[Tensors], tensors: Tensors, *, gated: bool = False, cut: dict[str, int] = AXES
) -> None:
    for name, tensor in tensors.items():
        if name.startswith("encoder."):
            expected = shards(name, tensor, len(encoders), gated=gated, cut=cut)
            for encoder, shard in zip(encoders, expected, strict=True):
                assert torch.equal(encoder[name.removeprefix("encoder.")], shard), name


def codes(root: Path, level: Level = Level.DEEP) -> set[str]:
    findings = validate(root, level=level).findings
    return {finding.code for finding in findings if finding.severity is not Severity.NOTE}


@pytest.mark.parametrize(
    "arguments",
    [
        {"glu_activation": "swiglu"},
        {"geglu": True},
        {"reglu": True},
        {"swiglu": True},
        {},  # only the shapes show the gate
    ],
)
@pytest.mark.parametrize("tp", [1, 4])
def test_a_gate_by_any_argument_or_by_shapes_alone(
    tmp_path: Path, arguments: dict[str, object], tp: int
) -> None:
    tensors = complete(gated=True)
    source = save(tmp_path / "a", tensors, gated=True, **arguments)
    assert_shards(reshard(source, tmp_path / "b", tp), tensors, gated=True)


@pytest.mark.each_value
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("source_tp", [1, 2, 4])
def test_multi_query_keys_are_one_tensor_at_every_size(
    tmp_path: Path, source_tp: int, tp: int
) -> None:
    tensors = complete(groups=1, split=True)
    source = save(tmp_path / "a", tensors, source_tp, attention_head_type="multiquery")
    assert not codes(source)
    assert_shards(reshard(source, tmp_path / "b", tp), tensors)


@pytest.mark.parametrize(("source_tp", "tp"), [(1, 2), (2, 1), (2, 4)])
def test_separate_keys_of_every_head_are_cut(tmp_path: Path, source_tp: int, tp: int) -> None:
    tensors = complete(split=True)
    cut = AXES | {"key_value.weight": 0, "key_value.bias": 0}
    source = save(tmp_path / "a", tensors, source_tp, cut=cut)
    assert_shards(reshard(source, tmp_path / "b", tp), tensors, cut=cut)


@pytest.mark.parametrize(("source_tp", "tp"), [(1, 2), (2, 1)])
def test_groups_of_a_fork_s_own_argument(tmp_path: Path, source_tp: int, tp: int) -> None:
    tensors = complete(groups=2)
    source = save(
        tmp_path / "a", tensors, source_tp, use_multiquery_attn=True, num_attention_heads_kv=2
    )
    assert not codes(source)
    assert_shards(reshard(source, tmp_path / "b", tp), tensors)


def by_part(tensor: torch.Tensor, groups: int, tp: int) -> torch.Tensor:
    """Return rows by group as GLM's fork has them: on each rank all queries, keys, values."""
    ranks = tensor.view(tp, groups // tp, HEADS // groups + 2, HEAD, -1)
    parts = (ranks[:, :, :-2], ranks[:, :, -2:-1], ranks[:, :, -1:])
    rows = torch.cat([part.reshape(tp, -1, *ranks.shape[4:]) for part in parts], 1)
    return rows.reshape(tensor.shape)


@pytest.mark.parametrize(
    ("groups", "source_tp", "tp"), [(2, 1, 2), (2, 2, 1), (2, 2, 4), (1, 1, 2), (4, 4, 2)]
)
def test_glm_s_queries_keys_and_values_get_the_order_of_groups(
    tmp_path: Path, groups: int, source_tp: int, tp: int
) -> None:
    tensors = complete(groups=groups)
    stored = {
        name: by_part(tensor, groups, source_tp) if "query_key_value" in name else tensor
        for name, tensor in tensors.items()
    }
    arguments = {"multi_query_attention": True, "multi_query_group_num": groups}
    source = save(tmp_path / "a", stored, source_tp, **arguments)
    assert not codes(source)
    assert_shards(reshard(source, tmp_path / "b", tp), tensors)

    # The result is Megatron's: its arguments no longer say that the rows have another order.
    (file, *_) = sorted((tmp_path / "b").glob(f"*/*/{MODEL_FILE}"))
    args = torch.load(file, weights_only=False)["args"]
    assert (args.group_query_attention, args.num_query_groups) == (True, groups)
    assert not args.multi_query_attention
    assert_shards(reshard(tmp_path / "b", tmp_path / "c", source_tp), tensors)


def test_glm_s_heads_that_share_no_keys_have_megatron_s_order(tmp_path: Path) -> None:
    tensors = complete()
    arguments = {"multi_query_attention": False, "multi_query_group_num": 2}
    source = save(tmp_path / "a", tensors, **arguments)
    assert_shards(reshard(source, tmp_path / "b", 1), tensors)


def test_copies_of_glm_s_keys_on_several_ranks_are_refused(tmp_path: Path) -> None:
    arguments = {"multi_query_attention": True, "multi_query_group_num": 1}
    source = save(tmp_path / "a", complete(groups=1), 2, **arguments)
    with pytest.raises(UnsupportedError, match="ranks then have copies of the same keys"):
        reshard(source, tmp_path / "b", 1)


@pytest.mark.parametrize("level", [Level.METADATA, Level.HEADERS, Level.DEEP])
@pytest.mark.parametrize("half", ["dense_h_to_4h", "dense_4h_to_h"])
def test_a_complete_half_of_a_gated_mlp_does_not_blame_the_other(
    tmp_path: Path, half: str, level: Level
) -> None:
    cut = {end: axis for end, axis in AXES.items() if not end.startswith(half)}
    source = save(tmp_path / "a", complete(gated=True), gated=True, cut=cut, swiglu=True)
    findings = validate(source, level=level).findings
    errors = [item for item in findings if item.severity is not Severity.NOTE]
    assert {item.code for item in errors} == {"CK317"}
    assert all(half in (item.key or "") for item in errors)
    with pytest.raises(UnsupportedError) as caught:
        reshard(source, tmp_path / "b", 1)
    assert caught.value.message.startswith(errors[0].message)


WHOLE = [
    "query_key_value",
    "dense.weight",
    "dense_h_to_4h",
    "dense_4h_to_h",
    "word_embeddings",
]


@pytest.mark.first(2)
@pytest.mark.parametrize("matrix", WHOLE)
def test_tensors_that_every_rank_holds_complete_need_a_rule(tmp_path: Path, matrix: str) -> None:
    tensors = complete()
    cut = {end: axis for end, axis in AXES.items() if not end.startswith(matrix)}
    source = save(tmp_path / "a", tensors, cut=cut)
    with pytest.raises(UnsupportedError, match="all 2 TP ranks have identical shards") as caught:
        reshard(source, tmp_path / "b", 1)
    # The shapes follow from that, and are no findings of their own.
    assert codes(source) == codes(source, Level.METADATA) == {"CK317"}

    # What the hint says leads on.
    rules = tmp_path / "rules.toml"
    rules.write_text(read_rules(caught.value.hint))
    assert_shards(reshard(source, tmp_path / "c", 1, rules), tensors, cut=cut)
    assert_shards(reshard(source, tmp_path / "d", 4, rules), tensors, cut=cut)


def test_the_tables_that_hints_propose_lead_on_as_they_are(tmp_path: Path) -> None:
    tensors = complete()
    source = save(tmp_path / "a", tensors)
    for path in source.glob(f"*/*/{MODEL_FILE}"):
        content = torch.load(path, weights_only=False)
        content["model"]["language_model"]["extra.0"] = {"weight": torch.ones(3)}
        torch.save(content, path)
    rules = tmp_path / "rules.toml"
    rules.touch()
    for message in ("no layout rule matches", "no rule assigns this tensor"):
        with pytest.raises(UnsupportedError, match=message) as caught:
            reshard(source, tmp_path / "b", 1, rules)
        rules.write_text(rules.read_text() + read_rules(caught.value.hint) + "\n")
    assert_shards(reshard(source, tmp_path / "b", 1, rules), tensors)


@pytest.mark.parametrize("is_zip", [True, False])
def test_keys_that_some_ranks_share_are_not_joined(tmp_path: Path, is_zip: bool) -> None:
    tensors = complete(groups=2, split=True)
    source = save(tmp_path / "a", tensors, 4)
    for rank, path in enumerate(sorted(source.glob(f"*/*/{MODEL_FILE}"))):
        content = torch.load(path, weights_only=False)
        encoder = content["model"]["language_model"]["encoder"]
        for name in encoder:
            if "key_value" in name:
                encoder[name] = tensors["encoder." + name].chunk(2)[rank // 2].clone()
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsupportedError, match="TP ranks 0, 1 of 4 have identical shards"):
        reshard(source, tmp_path / "b", 1)
    assert "CK317" in codes(source)
    # Older files store tensors in the order of their addresses, so no file stands for another.
    assert ("CK317" in codes(source, Level.METADATA)) == is_zip


def test_padding_rows_may_fill_several_shards(tmp_path: Path) -> None:
    tensors = complete()
    rows = tensors["embedding.word_embeddings.weight"]
    rows[ROWS // 4 :] = rows[ROWS // 4]
    source = save(tmp_path / "a", tensors, 4)
    assert not codes(source) | codes(source, Level.METADATA)
    assert_shards(reshard(source, tmp_path / "b", 1), tensors)


@pytest.mark.parametrize("is_whole", [True, False])
def test_without_checksums_the_values_tell(tmp_path: Path, is_whole: bool) -> None:
    tensors = complete()
    cut = {end: axis for end, axis in AXES.items() if not (is_whole and end == "dense.weight")}
    source = save(tmp_path / "a", tensors, cut=cut)
    for path in source.glob(f"*/*/{MODEL_FILE}"):
        content = torch.load(path, weights_only=False)
        torch.save(content, path, _use_new_zipfile_serialization=False)
    assert ("CK317" in codes(source)) == is_whole
    if not is_whole:
        assert_shards(reshard(source, tmp_path / "b", 1), tensors)


def test_shards_that_happen_to_be_equal_are_taken_at_a_rule_s_word(tmp_path: Path) -> None:
    half = complete()["encoder.layers.0.self_attention.dense.weight"]
    tensors = complete() | {
        f"encoder.layers.{layer}.self_attention.dense.weight": torch.cat([half[:, :8]] * 2, 1)
        for layer in range(LAYERS)
    }
    source = save(tmp_path / "a", tensors)
    with pytest.raises(UnsupportedError, match="axis 1"):
        reshard(source, tmp_path / "b", 1)
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\npattern = 'dense.weight$'\nrule = 'split'\naxis = 1\n")
    assert_shards(reshard(source, tmp_path / "c", 1, rules), tensors)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_tensors_may_be_equal(tmp_path: Path, value: float) -> None:
    tensors = {name: torch.full_like(tensor, value) for name, tensor in complete().items()}
    source = save(tmp_path / "a", tensors)
    assert "CK317" not in codes(source) | codes(source, Level.METADATA)
    assert_shards(reshard(source, tmp_path / "b", 1), tensors)


def test_rows_that_repeat_along_the_cut_may_be_equal(tmp_path: Path) -> None:
    rows = torch.arange(float(ROWS)).repeat(ROWS, 1)
    tensors = {
        name: rows[:FFN, :HIDDEN].clone() if "h_to_4h.weight" in name else tensor
        for name, tensor in complete().items()
    }
    source = save(tmp_path / "a", tensors)
    assert not codes(source) | codes(source, Level.METADATA)
    assert_shards(reshard(source, tmp_path / "b", 1), tensors)


@pytest.mark.parametrize(
    ("argument", "value", "tensor"),
    [
        ("hidden_size", 32, "word_embeddings"),
        ("kv_channels", 8, "query_key_value"),
        ("ffn_hidden_size", 48, "dense_4h_to_h"),
    ],
)
def test_every_size_is_compared_with_the_arguments(
    tmp_path: Path, argument: str, value: int, tensor: str
) -> None:
    source = save(tmp_path / "a", complete(), **{argument: value})
    with pytest.raises(CorruptError) as caught:
        reshard(source, tmp_path / "b", 1)
    assert isinstance(caught.value, CheckpointingException)
    assert "CK314" in codes(source)
    names = [finding.key or "" for finding in validate(source, level=Level.DEEP).findings]
    assert any(tensor in name for name in names)


def test_a_bias_has_as_many_elements_as_its_weight_has_rows(tmp_path: Path) -> None:
    tensors = complete()
    for layer in range(LAYERS):
        tensors[f"encoder.layers.{layer}.mlp.dense_h_to_4h.bias"] = torch.randn(2 * FFN)
    source = save(tmp_path / "a", tensors)
    with pytest.raises(CorruptError, match="the bias has 48 elements, but its weight has 24 rows"):
        reshard(source, tmp_path / "b", 1)
