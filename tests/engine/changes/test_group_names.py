"""The names in an optimizer's groups follow every change that gives its states new names.

In torch files the groups lie in the tree as it was read, in DCP they are objects of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from core.verbs.convert.run import Job, run


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
        self.head = torch.nn.Linear(3, 3, bias=False)
        self.copy = torch.nn.Linear(3, 3, bias=False)


def _saved(folder: Path) -> Path:
    """Save a model with two parameter groups after a step; ``copy`` has the weights of ``head``."""
    model = _Model()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0}])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.copy.weight.data = model.head.weight.data.clone()
    weights, states = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optimizer": states}, folder / "state.pt")
    return folder / "state.pt"


STACKED = {"stack_layers": True}


@pytest.mark.parametrize(
    "steps",
    [
        (STACKED,),
        (STACKED, {"unstack_layers": ()}),
        ({"tie": (("model.copy.weight", "model.head.weight"),)},),
        ({"untie": (("model.new.weight", "model.head.weight"),)},),
        ({"rename": ((r"layers\.", "blocks."),)},),
        ({"strip_prefix": ("model.",)},),
        ({"exclude": ("model.layers.1.*",)},),
    ],
    ids=["stack", "unstack", "tie", "untie", "rename", "strip", "exclude"],
)
def test_groups_list_the_parameters_that_have_states(
    tmp_path: Path, steps: tuple[dict[str, Any], ...]
) -> None:
    src = _saved(tmp_path)
    for number, options in enumerate(steps):
        dst = tmp_path / f"{number}.pt"
        run(Job(src=src, dst=dst, to="torch", fsync=False, **options))
        src = dst
    content = torch.load(src, weights_only=True)
    optimizer = content["optimizer"]
    listed = [name for group in optimizer["param_groups"] for name in group["params"]]
    assert sorted(listed) == sorted(optimizer["state"])
    weights = content.get("model", content)
    assert sorted(listed) == sorted(name for name in weights if name != "optimizer")
    # Vectors remain in the group without weight decay.
    assert all("bias" in name for name in optimizer["param_groups"][1]["params"])
