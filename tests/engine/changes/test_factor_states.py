"""Optimizers whose states are factors of complete matrices: copied, or refused by name.

The names and shapes are those of SOAP and Shampoo of pytorch-optimizer 4.1.0 and of Distributed
Shampoo (facebookresearch/optimizers, 2026-08) under FSDP2, as torch's DCP saves them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.errors import UnsupportedError
from core.verbs.convert.job import Job
from core.verbs.convert.run import run

SHAPE = (8, 6)
STATES: dict[str, dict[str, tuple[int, ...]]] = {
    "SOAP": {"exp_avg": SHAPE, "GG.0": (8, 8), "GG.1": (6, 6), "Q.0": (8, 8), "Q.1": (6, 6)},
    "Shampoo": {"momentum_buffer": SHAPE, "pre_cond_0": (8, 8), "inv_pre_cond_0": (8, 8)},
    "distributed Shampoo": {
        "rank_0-block_0.shampoo.factor_matrices.0": (300,),
        "rank_0-block_0.filtered_grad": (24,),
        "rank_1-block_0.shampoo.factor_matrices.0": (300,),
    },
}


def _tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _saved(folder: Path, optimizer: str, *, is_stacked: bool) -> dict[str, torch.Tensor]:
    """Save two layers, or one stack of them, with the optimizer's states in DCP."""
    names = ["layers.w"] if is_stacked else ["layers.0.w", "layers.1.w"]
    content = {f"model.{name}": _tensor((2, *SHAPE) if is_stacked else SHAPE, 1) for name in names}
    for seed, name in enumerate(names):
        for number, (state, shape) in enumerate(STATES[optimizer].items()):
            content[f"optim.state.{name}.{state}"] = _tensor(shape, 10 * seed + number)
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return content


@pytest.mark.parametrize("optimizer", STATES)
def test_factors_are_copied_and_refused_for_parameters_of_other_shapes(
    tmp_path: Path, optimizer: str
) -> None:
    content = _saved(tmp_path / "a", optimizer, is_stacked=False)
    run(Job(src=tmp_path / "a", dst=tmp_path / "copy", to="dcp", fsync=False))
    loaded = {key: torch.zeros_like(value) for key, value in content.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "copy", no_dist=True)
    assert all(torch.equal(loaded[key], value) for key, value in content.items())

    _saved(tmp_path / "b", optimizer, is_stacked=True)
    for name, options in (("a", {"stack_layers": True}), ("b", {"unstack_layers": ()})):
        job = Job(src=tmp_path / name, dst=tmp_path / "out", to="dcp", fsync=False, **options)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="with S[a-zA-Z]+, because its factors") as err:
            run(job)
        assert optimizer.split()[-1] in err.value.message
        assert "--no-optim" in (err.value.hint or "")
        assert not (tmp_path / "out").exists()


def test_without_the_optimizer_layers_are_stacked(tmp_path: Path) -> None:
    _saved(tmp_path / "a", "SOAP", is_stacked=False)
    run(
        Job(
            src=tmp_path / "a",
            dst=tmp_path / "out.pt",
            to="torch",
            stack_layers=True,
            optim="drop",
            fsync=False,
        )
    )
    content = torch.load(tmp_path / "out.pt")
    assert list(content) == ["model.layers.w"]
    assert torch.equal(content["model.layers.w"], torch.stack([_tensor(SHAPE, 1)] * 2))
