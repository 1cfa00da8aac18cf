"""Arguments of MindSpeed that change which layers, stages and experts rank files have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import core
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import parse_noop_layers
from core.megatron.model.pipeline_args import changes_for, pipeline_of
from core.verbs.checks.check import Level
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.validate.run import validate
from tests.support.edited import edit_rank
from tests.support.rank_files import load_rank_file, rank_dirs

RANKS = "mcore_legacy/dense_gqa/tp2_pp2"


@pytest.fixture
def edited(golden: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """Copies rank files, edits every file's content, and returns their root."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        root = tmp_path / "run"
        shutil.copytree(golden / RANKS, root)
        for folder in rank_dirs(root).values():
            edit_rank(folder, change)
        return root

    return edit


@pytest.mark.parametrize("value", ["1,3", {1, 3}, [3, 1]])
def test_noop_layers_are_a_text_or_a_set(value: object) -> None:
    assert parse_noop_layers({"noop_layers": value}) == {1, 3}
    assert parse_noop_layers({"noop_layers": None}) == frozenset()


@pytest.mark.parametrize("value", ["1,x", 3, {"a"}])
def test_other_noop_layers_are_an_error(value: object) -> None:
    with pytest.raises(CorruptError, match="noop_layers"):
        parse_noop_layers({"noop_layers": value})


def test_a_layer_without_parameters_is_not_missing(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    def empty(content: dict[str, Any]) -> None:
        content["args"].noop_layers = {1}
        model = content["model"]
        # Layer 1 of the model is the second one of the first stage.
        if "embedding.word_embeddings.weight" in model:
            for name in [name for name in model if name.startswith("decoder.layers.1.")]:
                del model[name]

    root = edited(empty)
    assert not [f for f in validate(root, level=Level.DEEP).findings if f.code == "CK304"]
    topology = TopologyChange(tp=1, pp=1)
    job = Job(src=root, dst=root / "one", topology=topology, is_reshard=True, optim="drop")
    run(job)
    model = load_rank_file(root / "one/iter_0000010/mp_rank_00/model_optim_rng.pt")["model"]
    layers = {name.split(".")[2] for name in model if name.startswith("decoder.layers.")}
    assert "1" not in layers
    assert "2" in layers
    with pytest.raises(UnsupportedError, match="noop_layers"):
        core.convert(root, root / "hf", to="hf")


def test_a_list_of_layers_is_a_pipeline_layout() -> None:
    fields = {"num_layer_list": "2,0,1", "mtp_num_layers": None}
    assert pipeline_of(fields).layout == ("Ett", "", "tL")
    assert pipeline_of(fields | {"mtp_num_layers": 1}).layout == ("Ett", "", "tmL")
    assert changes_for(fields, pipeline_of({})) == {"num_layer_list": None}
    with pytest.raises(CorruptError, match="num_layer_list"):
        pipeline_of({"num_layer_list": "2,x"})


def test_experts_that_tp_ranks_divide_are_named(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    def extend(content: dict[str, Any]) -> None:
        content["args"].moe_tp_extend_ep = True

    root = edited(extend)
    with pytest.raises(UnsupportedError, match="moe_tp_extend_ep"):
        core.convert(root, root / "one.safetensors")
