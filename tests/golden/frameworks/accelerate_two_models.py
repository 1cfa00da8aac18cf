"""Saves the state of accelerate with two models, as a GAN has them.

    python accelerate_two_models.py FOLDER

Writes FOLDER/two_models/state (safetensors) and state_bin (torch files, whose optimizers and random
states are the same), and FOLDER/two_models/truth.pt: the optimizers' states by name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def main(folder: str) -> None:
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True)
    # The same shapes, so that only the number of a model tells whose the states are.
    models = [nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    for step in range(2):
        torch.manual_seed(step)
        loss = sum(model(torch.randn(3, 8)).square().sum() for model in prepared[:2])
        accelerator.backward(loss)
        for optimizer in prepared[2:]:
            optimizer.step()
            optimizer.zero_grad()
    truth = [
        get_optimizer_state_dict(model, optimizer)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    out = Path(folder) / "two_models"
    out.mkdir(parents=True)
    torch.save(truth, out / "truth.pt")
    accelerator.save_state(str(out / "state"))
    accelerator.save_state(str(out / "state_bin"), safe_serialization=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
