"""Resumes training with Lightning's Trainer on one device, from a file, and compares what it has.

    python lightning_resume.py FILE CONSOLIDATED

FILE is the file of a run of ``lightning_run.py`` with one optimizer; CONSOLIDATED, what Lightning's
own tool read of the run's directory. Weights, states of the optimizer by the names of the live
parameters, schedulers and loops must be those of CONSOLIDATED before the first step.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "LIGHTNING_CASE": "trainer_fsdp"}

import lightning
import torch
from lightning_run import Module, samples


class Compare(lightning.Callback):
    """Compares the state of the Trainer with that of a run."""

    def __init__(self, truth: dict[str, dict[str, object]]) -> None:
        self.truth = truth

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        truth, weights = self.truth, module.state_dict()
        assert weights.keys() == truth["model"].keys()
        for name, weight in weights.items():
            assert torch.equal(weight, truth["model"][name]), name
        (optimizer,) = trainer.optimizers
        states = truth["optimizer_0"]["state"]
        for name, parameter in module.named_parameters():
            for kind, state in optimizer.state[parameter].items():
                assert torch.equal(state, states[name][kind]), (name, kind)
        assert optimizer.param_groups[0]["lr"] == truth["optimizer_0"]["param_groups"][0]["lr"]
        (config,) = trainer.lr_scheduler_configs
        assert config.scheduler.state_dict() == truth["lr_schedulers"][0]
        assert (trainer.global_step, trainer.current_epoch) == (
            truth["global_step"],
            truth["epoch"],
        )


def main(file: str, consolidated: str) -> None:
    assert Module.load_from_checkpoint(file).hparams == {"width": 16, "learning_rate": 1e-2}
    truth = torch.load(consolidated, weights_only=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=truth["epoch"] + 1,
        limit_train_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Compare(truth)],
    )
    trainer.fit(Module(), samples(), ckpt_path=file)
    assert trainer.global_step == truth["global_step"] + 2


if __name__ == "__main__":
    main(*sys.argv[1:])
