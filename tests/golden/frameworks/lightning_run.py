"""Trains a small model with Lightning's Trainer or with Fabric, and lets it save.

    python lightning_run.py CASE FOLDER                                (trainer, fabric)
    torchrun --nproc-per-node 2 lightning_run.py CASE FOLDER           (the others)

CASE is one of

- ``trainer``: FOLDER/checkpoints with the files of two epochs and ``last.ckpt``;
- ``trainer_fsdp``, ``trainer_fsdp_flat``: FOLDER/step.ckpt, a directory of FSDPStrategy; ``flat``
  wraps the first layer, with ``use_orig_params=False``;
- ``fabric``: FOLDER/state.ckpt, a file;
- ``fabric_fsdp``, ``fabric_model_parallel``: FOLDER/state.ckpt, a directory;
- ``fabric_model_parallel_full``: FOLDER/state.ckpt, a file.

FOLDER/truth.pt has what torch gathers from the live model and optimizer, by name. Lightning refuses
FSDPStrategy itself on a CPU, but not a class derived from it; FSDP1 does not gather on a CPU, so
``*_fsdp`` have no truth but what Lightning's own consolidation reads (``consolidated.pt``).
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": ""}

import lightning
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy


class FSDPOnCPU(FullyShardedDataParallel):
    """FSDP1, told that it may run on a CPU, which Lightning does not tell it."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **{**options, "device_id": torch.device("cpu")})


class TrainerFSDP(FSDPStrategy):
    pass


class FabricFSDPOnCPU(FabricFSDP):
    pass


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Module(lightning.LightningModule):
    """Two groups of parameters, so that the optimizer's order is not the model's."""

    def __init__(self, width: int = 16, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = net()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        if os.environ.get("LIGHTNING_CASE", "").startswith("trainer_fsdp"):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(grouped(self.model), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }


def grouped(model: nn.Module) -> list[dict[str, object]]:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    undecayed = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]


def samples() -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(16, 6, generator=generator), torch.arange(16) % 3
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)


def write_truth(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, states = get_state_dict(model, optimizer, options=options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"model": dict(weights), "optimizer": states}, folder / "truth.pt")


def is_first_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features == 6


def fsdp_strategy(case: str) -> TrainerFSDP:
    if not case.endswith("flat"):
        return TrainerFSDP(state_dict_type="sharded")
    # The rest of the model, which includes the last layer, is the unit whose parameters come first.
    policy = partial(lambda_auto_wrap_policy, lambda_fn=is_first_layer)
    return TrainerFSDP(state_dict_type="sharded", use_orig_params=False, auto_wrap_policy=policy)


def run_trainer(case: str, folder: Path) -> None:
    is_fsdp = case.startswith("trainer_fsdp")
    os.environ["LIGHTNING_CASE"] = case
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2 if is_fsdp else 1,
        strategy=fsdp_strategy(case) if is_fsdp else "auto",
        max_epochs=2,
        limit_train_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=not is_fsdp,
        callbacks=[]
        if is_fsdp
        else [ModelCheckpoint(folder / "checkpoints", save_top_k=-1, save_last=True)],
    )
    module = Module()
    trainer.fit(module, samples())
    if is_fsdp:
        trainer.save_checkpoint(folder / "step.ckpt")
        consolidate(folder, "step.ckpt")
    else:
        write_truth(folder, module, trainer.optimizers[0])


def run_fabric(case: str, folder: Path) -> None:
    kind = case.removeprefix("fabric").strip("_")
    strategy: object = "auto"
    if kind == "fsdp":
        strategy = FabricFSDPOnCPU(state_dict_type="sharded")
    elif kind:

        def parallelize(model: nn.Module, mesh: object) -> nn.Module:
            return fully_shard(model, mesh=mesh["data_parallel"])

        strategy = FabricModelParallel(
            parallelize_fn=parallelize,
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=kind == "model_parallel",
        )
    fabric = lightning.Fabric(accelerator="cpu", devices=2 if kind else 1, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters() if kind else grouped(model), lr=1e-2)
    )
    for step in range(2):
        torch.manual_seed(step * 10 + fabric.global_rank)
        data, target = torch.randn(4, 6), torch.arange(4) % 3
        fabric.backward(nn.functional.cross_entropy(model(data), target))
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "step": 2, "config": {"lr": 1e-2}}
    if kind != "fsdp":
        write_truth(folder, model.module, optimizer.optimizer)
    fabric.save(folder / "state.ckpt", state)
    if kind in ("fsdp", "model_parallel"):
        consolidate(folder, "state.ckpt")


def consolidate(folder: Path, name: str) -> None:
    """Write what Lightning's tool makes of the directory that it saved."""
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(_load_distributed_checkpoint(folder / name), folder / "consolidated.pt")
    dist.barrier()


def main(case: str, folder: str) -> None:
    torch.manual_seed(5)
    torch.distributed.fsdp.FullyShardedDataParallel = FSDPOnCPU
    Path(folder).mkdir(parents=True, exist_ok=True)
    run = run_trainer if case.startswith("trainer") else run_fabric
    run(case, Path(folder))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
