"""``--explain``: the rule of every tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import UsageError
from core.verbs.convert.prepare import prepare
from core.verbs.convert.run import Job, TopologyChange


def _lines(golden: Path, case: str, **options: object) -> dict[str, tuple[str, str, str]]:
    job = Job(
        src=golden / case,
        topology=TopologyChange(tp=4),
        is_reshard=True,
        optim="drop",
        **options,  # type: ignore[arg-type]
    )
    with prepare(job) as prepared:
        return {line.names: (line.rule, line.cut, line.where) for line in prepared.explain_layout()}


def test_alike_tensors_share_a_line_that_names_rule_cut_and_row(golden: Path) -> None:
    lines = _lines(golden, "mcore_legacy/dense_gqa/tp2_pp2")
    assert len(lines) == 10
    rule, cut, where = lines["decoder.layers.[0-3].mlp.linear_fc1.weight"]
    assert (rule, cut) == ("split", "axis 0 over TP 4, in 2 parts of 96 + 96")
    assert where.startswith("megatron.toml [[rule]] ")
    assert lines["embedding.word_embeddings.weight"][:2] == ("vocab", "axis 0 over TP 4")
    assert lines["decoder.final_layernorm.weight"][:2] == (
        "replicate",
        "every rank holds all of it",
    )


def test_experts_are_folded_too(golden: Path) -> None:
    lines = _lines(golden, "mcore_legacy/moe_seq/tp2_pp1")
    assert "decoder.layers.[0-3].mlp.experts.local_experts.[0-3].linear_fc2.weight" in lines


def test_a_users_row_is_named(golden: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    rules.write_text(
        "[[rule]]\npattern = 'layers\\.2\\..*linear_proj'\nrule = \"split\"\naxis = 1\nsource "
        '= "me"\n'
    )
    lines = _lines(golden, "mcore_legacy/dense_gqa/tp2_pp2", rules=rules)
    assert lines["decoder.layers.2.self_attention.linear_proj.weight"][2] == f"{rules} [[rule]] 1"
    assert "decoder.layers.[0-1,3].self_attention.linear_proj.weight" in lines


def test_where_no_rule_is_used_it_says_so(golden: Path) -> None:
    job = Job(src=golden / "mcore_legacy/dense_gqa/tp2_pp2", to="safetensors", optim="drop")
    with prepare(job) as prepared, pytest.raises(UsageError, match="--explain: this conversion to"):
        prepared.explain_layout()
