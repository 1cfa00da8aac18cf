"""Lets Megatron-Bridge save a Qwen2.5-VL with its optimizer after a step, on CPUs with gloo.

    torchrun --nproc-per-node TP megatron_tower_optimizers.py FOLDER NAME MEGATRON_LM

``MEGATRON_LM`` is a directory with ``megatron/core`` of Megatron-LM d98e8a64 and
``megatron/bridge`` of Megatron-Bridge 067f987d. ``FOLDER/hf`` is the model of
``tests/hf/composites.py`` in bf16; ``FOLDER`` is recorded in the files, so it should not be
absolute. ``NAME`` is one of ``RUNS``; gradients are random numbers. Stubs stand in for CUDA's entry
points and for packages that are not installed; layers are those of the local specification.
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from megatron_bridge import UNFUSED, _Stubs  # beside this script

RUNS = {
    "frozen": {"tp": 1, "is_distributed": True, "is_frozen": True},
    "tp2": {"tp": 2, "is_distributed": True, "is_frozen": False},
    "ddp_frozen": {"tp": 1, "is_distributed": False, "is_frozen": True},
}


def install(megatron_lm: str) -> None:
    """Let Megatron-LM and Megatron-Bridge run in this process."""
    sys.path.insert(0, megatron_lm)
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    # The stand-ins for CUDA were written for megatron-core 0.16.1, which has this module.
    name = "megatron.core.transformer.moe.grouped_gemm_util"
    sys.modules[name] = types.ModuleType(name)
    from tests.real_megatron import cpu

    cpu.install()
    use_adam_of_apex()
    for name in ("set_device", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    sys.meta_path.append(_Stubs())
    dist.init_process_group("gloo")


def use_adam_of_apex() -> None:
    """Let Megatron train with it; it cannot load fully_reshardable states of torch's Adam."""
    from tests.real_megatron import adam

    class Adam(adam.FusedAdam):
        """Ignores the arguments that only newer versions of Megatron give."""

        def __init__(
            self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: object
        ) -> None:
            super().__init__(params, lr, betas, eps, weight_decay)

    adam.FusedAdam = Adam  # type: ignore[misc]
    adam.use()


def model_of(hf_dir: Path, *, tp: int, is_frozen: bool) -> tuple[Any, Any]:
    """Return Bridge's configuration of the model, and the model in bf16."""
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    provider = AutoBridge.from_hf_pretrained(str(hf_dir)).to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = tp
    provider.transformer_layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    provider.use_cpu_initialization = True
    for name in UNFUSED:
        if hasattr(provider, name):
            setattr(provider, name, False)
    provider.params_dtype, provider.bf16 = torch.bfloat16, True
    provider.freeze_vision_model = is_frozen
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return provider, model if isinstance(model, Float16Module) else Float16Module(provider, model)


def main(folder: str, name: str, megatron_lm: str) -> None:
    """Write the checkpoint of a run."""
    install(megatron_lm)
    from megatron.bridge.training.checkpointing import save_checkpoint
    from megatron.bridge.training.config import CheckpointConfig, ConfigContainer, LoggerConfig
    from megatron.bridge.training.state import GlobalState
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    run = RUNS[name]
    parallel_state.initialize_model_parallel(run["tp"])
    provider, model = model_of(Path(folder) / "hf", tp=run["tp"], is_frozen=run["is_frozen"])
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=run["is_distributed"], grad_reduce_in_fp32=True
    )
    model = DistributedDataParallel(provider, ddp, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=run["is_distributed"],
    )
    optimizer = get_megatron_optimizer(settings, [model])

    # Parameters that all ranks have get the same gradients on all of them.
    model.zero_grad_buffer()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            if not getattr(parameter, "tensor_model_parallel", False):
                dist.broadcast(parameter.main_grad, 0)
    model.finish_grad_sync()
    optimizer.step()

    state = GlobalState()
    state.cfg = ConfigContainer(
        model=provider,
        train=None,
        optimizer=settings,
        ddp=ddp,
        scheduler=None,
        dataset=None,
        logger=LoggerConfig(),
        tokenizer=None,
        dist=None,
        checkpoint=CheckpointConfig(
            save=str(Path(folder) / name),
            save_rng=False,
            ckpt_format="torch_dist",
            dist_ckpt_optim_fully_reshardable=True,
        ),
    )
    state.train_state.step = 1
    save_checkpoint(
        state=state,
        model=[model],
        optimizer=optimizer,
        opt_param_scheduler=None,
        num_floating_point_operations_so_far=0,
        callback_manager=None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
