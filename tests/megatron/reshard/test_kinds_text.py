"""BERT and T5: what megatron-core itself builds, cuts and saves at one layout becomes what it saves
at another.

The oracle is ``text_models``: its values come from the offsets that the models' own
``sharded_state_dict`` states.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.store import LocalStore
from core.formats.dcp import torch_dist
from core.formats.megatron import format as megatron
from core.megatron.model.args import fields_of, parse_facts, replaced
from core.megatron.model.topology import Topology
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import to_torch_dist
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.support.old_names import BERT, T5, assert_same_nested, old_order, rewrite
from tests.support import forked
from tests.support.covering import covering_cases
from tests.support.materialize import tensor_bytes
from tests.support.rank_files import assert_same_weights

if (
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.core") is None
):
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.dist]

RULES = load_rules()
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "bert": ({"kind": "bert", "is_tied": True}, ("tp1_pp1", "tp2_pp1", "tp1_pp2", "tp2_pp2")),
    "bert_untied": ({"kind": "bert", "is_tied": False}, ("tp1_pp2", "tp2_pp1")),
    "t5": ({"kind": "t5", "is_tied": True}, ("tp1_pp1", "tp2_pp1", "tp4_pp1")),
    "t5_untied": (
        {"kind": "t5", "is_tied": False, "positions": "relative"},
        ("tp1_pp1", "tp2_pp1"),
    ),
}
CASES = [(model, case) for model, (_, cases) in MODELS.items() for case in cases]
PAIRS = [(model, a, b) for model, (_, cases) in MODELS.items() for a in cases for b in cases]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case as megatron-core saved it: <model>/<layout>/{ranks,dist}."""
    root_dir = tmp_path_factory.mktemp("text_models")
    jobs = [
        {**MODELS[model][0], **sizes(case), "dir": str(root_dir / model / case)}
        for model, case in CASES
    ]
    program = Path(__file__).parents[1] / "support/text_models.py"
    done = forked.run([program, json.dumps(jobs)], timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return root_dir


def sizes(case: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"(tp|pp)(\d+)", case)}


@cache
def opened(root_dir: Path, model: str, case: str, kind: str) -> tuple[LocalStore, Any]:
    store = LocalStore(root_dir / model / case / kind / "iter_0000010")
    return store, (megatron if kind == "ranks" else torch_dist).read(store)


@pytest.mark.parametrize(
    ("model", "a", "b", "kind"),
    covering_cases(
        (pytest.param(*pair, kind) for pair in PAIRS for kind in ("ranks", "dist")),
        lambda model, a, b, kind: {"from": (model, a), "to": (model, b), "kind": kind},
    ),
)
def test_any_layout_becomes_any_other(
    saved: Path, tmp_path: Path, model: str, a: str, b: str, kind: str
) -> None:
    change = TopologyChange(**sizes(b))
    run(
        Job(
            src=saved / model / a / kind,
            dst=tmp_path / "out",
            to="megatron",
            topology=change,
            fsync=False,
        )
    )
    assert_same_weights(tmp_path / "out", saved / model / b / "ranks")


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "a", "b"), [pair for pair in PAIRS if pair[1] != pair[2]])
def test_torch_dist_has_the_keys_chunks_and_values_that_megatron_saves(
    saved: Path, tmp_path: Path, model: str, a: str, b: str
) -> None:
    change = TopologyChange(**sizes(b))
    run(
        Job(
            src=saved / model / a / "ranks",
            dst=tmp_path / "out",
            to="torch_dist",
            topology=change,
            fsync=False,
        )
    )
    store = LocalStore(tmp_path / "out" / "iter_0000010")
    ours = torch_dist.read(store)
    their_store, theirs = opened(saved, model, b, "dist")
    assert dict(ours.tensors) == dict(theirs.tensors)
    assert set(ours.objects) == set(theirs.objects)
    for key in theirs.tensors:
        assert {piece.box for piece in ours.fragments(key)} == {
            piece.box for piece in theirs.fragments(key)
        }, key
        assert (tensor_bytes(ours, store, key) == tensor_bytes(theirs, their_store, key)).all(), key
    store.close()


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("model", "a", "b"),
    [
        ("bert", "tp2_pp2", "tp1_pp1"),
        ("bert", "tp1_pp1", "tp2_pp2"),
        ("t5", "tp1_pp1", "tp4_pp1"),
        ("t5", "tp4_pp1", "tp2_pp1"),
    ],
)
@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_models_of_megatron_legacy(
    saved: Path, tmp_path: Path, model: str, a: str, b: str, version: float
) -> None:
    names = BERT if model == "bert" else T5
    order = old_order(version, heads=4 // sizes(a)["tp"], channels=4)
    rewrite(saved / model / a / "ranks", tmp_path / "a", names, version=version, change=order)
    rewrite(saved / model / b / "ranks", tmp_path / "b", names)
    run(
        Job(
            src=tmp_path / "a",
            dst=tmp_path / "out",
            topology=TopologyChange(**sizes(b)),
            fsync=False,
        )
    )
    assert_same_nested(tmp_path / "out", tmp_path / "b")


def test_a_model_is_told_by_its_names(saved: Path) -> None:
    for model, kind in (("bert", "BERT"), ("t5", "T5")):
        for form in ("ranks", "dist"):
            unsharded = unshard(opened(saved, model, "tp2_pp1", form)[1], rules=RULES)
            facts = parse_facts(unsharded.args, names=RULES.model_of(unsharded.tensors))
            assert facts.kind.kind == kind
            assert facts.stacks == (
                {"encoder.layers.": 4}
                if model == "bert"
                else {"encoder.layers.": 2, "decoder.layers.": 4}
            )


def test_the_decoders_count_may_be_that_of_either_argument(saved: Path) -> None:
    _, catalog = opened(saved, "t5", "tp1_pp1", "ranks")
    for changes in ({"num_layers": 2}, {"decoder_num_layers": None}, {"decoder_num_layers": 2}):
        args = replaced(catalog.args, changes)
        unsharded = unshard(replace(catalog, args=args), rules=RULES)
        assert "decoder.layers.3.cross_attention.linear_kv.weight" in unsharded.tensors
    args = replaced(catalog.args, {"num_layers": 7, "decoder_num_layers": 5})
    with pytest.raises(CorruptError, match="should have 5 layers, but layer 4 is missing"):
        unshard(replace(catalog, args=args), rules=RULES)


def test_t5_has_no_pipeline(saved: Path) -> None:
    unsharded = unshard(opened(saved, "t5", "tp1_pp1", "ranks")[1], rules=RULES)
    with pytest.raises(UnsupportedError, match="T5 models cannot be split into 2 pipeline stages"):
        shard(unsharded, Topology(pp=2), rules=RULES)
    with pytest.raises(UnsupportedError, match="T5 models"):
        to_torch_dist(unsharded, Topology(pp=2), rules=RULES)


def test_heads_that_do_not_divide_are_named(saved: Path) -> None:
    unsharded = unshard(opened(saved, "t5", "tp1_pp1", "ranks")[1], rules=RULES)
    with pytest.raises(UnsupportedError, match="4 attention heads are not divisible by TP 8"):
        shard(unsharded, Topology(tp=8), rules=RULES)


def test_what_is_absent_is_named(saved: Path) -> None:
    _, catalog = opened(saved, "bert", "tp1_pp2", "ranks")
    fields = fields_of(catalog.args)
    assert fields["num_layers"] == 4
    unsharded = unshard(catalog, rules=RULES)
    assert unsharded.tensors["output_layer.bias"].shape == (60,)
    with pytest.raises(MissingShardError, match=r"should have 3 layers, but layer 2 is"):
        unshard(replace(catalog, args=replaced(catalog.args, {"num_layers": 6})), rules=RULES)
