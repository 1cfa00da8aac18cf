"""Optimizers of torch on their way to Megatron: what its Adam and SGD cannot go on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.errors import UnsupportedError
from core.verbs.convert.run import Job, Report, run
from tests.hf.stepped import save_stepped
from tests.support.rank_files import MODEL_FILE, load_rank_file, rank_dirs

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def _by_kind(model: torch.nn.Module, **of_norms: Any) -> list[dict[str, Any]]:
    """Return the groups embedding, matrices and norms; only the matrices have weight decay."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0} for _ in range(3)]
    groups[1]["weight_decay"] = 0.25
    groups[2] |= of_norms
    for name, parameter in model.named_parameters():
        groups[0 if "embed" in name else 1 if parameter.ndim == 2 else 2]["params"].append(
            parameter
        )
    return groups


def _convert(
    tmp_path: Path, optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> Report:
    """Take two steps with an optimizer, save with torch, and convert to rank files."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    save_stepped(model, optimizer_of(model), tmp_path)
    return run(
        Job(
            src=tmp_path / "state.pt",
            dst=tmp_path / "out",
            to="megatron",
            config=tmp_path / "config.json",
            strip_prefix=("model.",),
            fsync=False,
        )
    )


def test_an_embedding_without_decay_does_not_take_it_from_all_matrices(tmp_path: Path) -> None:
    report = _convert(tmp_path, lambda model: torch.optim.AdamW(_by_kind(model)))
    assert any("the matrix model.embed_tokens.weight had" in note for note in report.notes)
    (folder,) = rank_dirs(tmp_path / "out").values()
    content = load_rank_file(folder / MODEL_FILE)
    groups = content["optimizer"]["param_groups"]
    assert sorted((group["wd_mult"], group["weight_decay"]) for group in groups) == [
        (0.0, 0.0),
        (1.0, 0.25),
    ]
    assert content["opt_param_scheduler"]["start_wd"] == 0.25


def test_decay_that_is_added_to_gradients_is_noted(tmp_path: Path) -> None:
    report = _convert(
        tmp_path, lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1)
    )
    assert any("to the gradients (L2)" in note for note in report.notes)


@pytest.mark.parametrize(
    ("optimizer_of", "reason"),
    [
        (lambda m: torch.optim.AdamW(_by_kind(m, betas=(0.8, 0.9))), "groups differ in betas"),
        (lambda m: torch.optim.AdamW(_by_kind(m, eps=1e-5)), "groups differ in eps"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "max_exp_avg_sq"),
        (lambda m: torch.optim.AdamW(m.parameters(), maximize=True), "maximize"),
        (lambda m: torch.optim.RAdam(m.parameters()), "RAdam"),
        (lambda m: torch.optim.NAdam(m.parameters()), "mu_product|momentum_decay|shape"),
        (lambda m: torch.optim.Adamax(m.parameters()), "exp_inf"),
        (lambda m: torch.optim.Adagrad(m.parameters()), "states are sum"),
        (lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9), "square_avg"),
    ],
)
def test_other_algorithms_are_refused(
    tmp_path: Path,
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer],
    reason: str,
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        _convert(tmp_path, optimizer_of)
    assert not (tmp_path / "out").exists()
