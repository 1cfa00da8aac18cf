"""States of torch's optimizers on models of transformers, saved as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict


def save_stepped(
    model: Any, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """Take two steps with random gradients; write ``state.pt`` and ``config.json``.

    Returns:
        Parameter → its states by name.
    """
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optimizer": states}, folder / "state.pt")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return states["state"]  # type: ignore[return-value]
