"""Tensors that no rule fits: refused with a row that might, or replicated on request if the ranks
hold the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_cli.app import main
from core.errors import CorruptError, UnknownTensorError, UnsupportedError, UsageError
from core.verbs.convert.run import Job, Report, TopologyChange, run
from tests.megatron.support.rewritten import model_of, rewritten
from tests.support.rank_files import rank_dirs

NAME = "decoder.layers.2.gadget.weight"


def with_entry(
    golden: Path,
    target: Path,
    value: torch.Tensor,
    other: torch.Tensor | None = None,
    *,
    layers: tuple[int, ...] = (2,),
) -> Path:
    """dense_gqa at TP 2 with a tensor that nobody knows."""
    more = {NAME.replace("2", str(layer)): value for layer in layers}
    source = rewritten(
        golden / "mcore_legacy/dense_gqa/tp2_pp1", target, lambda _, __, old: old, more=more
    )
    if other is not None:
        path = rank_dirs(source)["mp_rank_01"] / "model_optim_rng.pt"
        loaded = torch.load(path, weights_only=False)
        loaded["model"][NAME] = other
        torch.save(loaded, path)
    return source


def resharded(
    src: Path, dst: Path, *, unknown: str = "refuse", rules: Path | None = None, **sizes: int
) -> Report:
    change = TopologyChange(**sizes)  # type: ignore[arg-type]
    return run(
        Job(
            src=src,
            dst=dst,
            to="megatron",
            topology=change,
            unknown=unknown,
            rules=rules,
            fsync=False,
        )
    )


def test_equal_shards_are_replicated_on_request(golden: Path, tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    source = with_entry(golden, tmp_path / "a", value)
    report = resharded(source, tmp_path / "out", unknown="replicate", tp=4, pp=2)
    for folder in rank_dirs(tmp_path / "out"):
        model = model_of(tmp_path / "out", folder)
        gadget = model.get("decoder.layers.0.gadget.weight")
        assert (gadget is not None) == folder.endswith("_001")
        assert gadget is None or gadget.equal(value)
    assert any(NAME in note and "--unknown replicate" in note for note in report.notes)


def test_shards_that_differ_are_not_replicated(golden: Path, tmp_path: Path) -> None:
    source = with_entry(golden, tmp_path / "a", torch.zeros(3, 4), torch.ones(3, 4))
    with pytest.raises(CorruptError, match="gadget"):
        resharded(source, tmp_path / "out", unknown="replicate", tp=1)
    source = with_entry(golden, tmp_path / "b", torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(CorruptError, match="gadget"):
        resharded(source, tmp_path / "out", unknown="replicate", tp=1)
    assert not (tmp_path / "out").exists()


def test_without_a_word_the_proposed_row_does_it(golden: Path, tmp_path: Path) -> None:
    source = with_entry(
        golden, tmp_path / "a", torch.arange(24.0 * 64).reshape(24, 64), layers=(0, 1, 2, 3)
    )
    with pytest.raises(UnknownTensorError, match="2 ranks: 24×64") as caught:
        resharded(source, tmp_path / "out", tp=4)
    assert caught.value.hint is not None and "--unknown replicate" in caught.value.hint
    path = tmp_path / "rules.toml"
    path.write_text(caught.value.hint.split("\n", 1)[1])
    resharded(source, tmp_path / "out", rules=path, tp=4)
    assert model_of(tmp_path / "out", "mp_rank_03")[NAME].shape == (12, 64)


def test_what_is_known_but_not_handled_stays_refused(golden: Path, tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight_scale_inv"
    source = rewritten(
        golden / "mcore_legacy/dense_gqa/tp2_pp1",
        tmp_path / "a",
        lambda _, __, old: old,
        more={name: torch.ones(2, 2)},
    )
    with pytest.raises(UnsupportedError, match="scales of blocks"):
        resharded(source, tmp_path / "out", unknown="replicate", tp=1)


def test_the_option_is_not_ignored(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf" / "llama" / "safetensors_single"
    with pytest.raises(UsageError, match="--unknown has no effect"):
        run(Job(src=source, dst=tmp_path / "out", to="dcp", unknown="replicate", fsync=False))


def test_the_command_line_has_it(golden: Path, tmp_path: Path) -> None:
    source = with_entry(golden, tmp_path / "a", torch.zeros(3, 4))
    words = ["reshard", str(source), str(tmp_path / "out"), "--tp-new", "1", "--quiet", "--unknown"]
    assert main([*words, "guess"]) != 0
    assert main([*words, "replicate"]) == 0
    assert model_of(tmp_path / "out", "mp_rank_00")[NAME].shape == (3, 4)
