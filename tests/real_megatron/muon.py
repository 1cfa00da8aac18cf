"""The parts of emerging-optimizers that megatron-core 0.16.1 trains Muon with.

If the package is not installed (PyPI has it for Python 3.12 and later only), these stand in for it:
the same arguments, settings and state as in version 0.1.0, and its default coefficients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum as a moving average, and decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        **unused: Any,
    ) -> None:
        assert not use_nesterov and weight_decay_method == "decoupled"
        settings = {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay}
        super().__init__(params, settings)
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of all matrices."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum_beta"])
                update = self.orthogonalize(parameter, state["momentum_buffer"])
                parameter.sub_(group["lr"] * update)


def get_muon_scale_factor(rows: int, columns: int, mode: str) -> float:
    """The factor that makes updates of matrices of all shapes alike."""
    assert mode == "spectral"
    return float(max(rows, columns) ** 0.5)


def newton_schulz_tp(
    matrix: torch.Tensor,
    *,
    steps: int,
    tp_group: Any,
    partition_dim: int | None,
    **unused: Any,
) -> torch.Tensor:
    """Make a matrix nearly orthogonal; every TP rank does so for the whole matrix."""
    if partition_dim is None:
        return _newton_schulz(matrix, steps)
    shards = [torch.empty_like(matrix) for _ in range(tp_group.size())]
    torch.distributed.all_gather(shards, matrix.contiguous(), tp_group)
    orthogonal = _newton_schulz(torch.cat(shards, dim=partition_dim), steps)
    return orthogonal.chunk(tp_group.size(), dim=partition_dim)[tp_group.rank()]


def _newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    is_tall = matrix.size(0) > matrix.size(1)
    x = torch.nn.functional.normalize((matrix.T if is_tall else matrix).float(), dim=(0, 1))
    for a, b, c in _QUINTIC[:steps]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def use() -> None:
    """Lets megatron-core import the package, or what stands in for it here.

    gloo gathers tensors of one size only, so updates by layers are broadcast, as megatron-core can.
    """
    if find_spec("emerging_optimizers") is None:
        _stand_in()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params


def _stand_in() -> None:
    names = ("", ".orthogonalized_optimizers", ".orthogonalized_optimizers.muon_utils")
    modules = {
        f"emerging_optimizers{name}": ModuleType(f"emerging_optimizers{name}") for name in names
    }
    for module in modules.values():
        module.__dict__.update(
            OrthogonalizedOptimizer=OrthogonalizedOptimizer,
            get_muon_scale_factor=get_muon_scale_factor,
            newton_schulz_tp=newton_schulz_tp,
        )
    sys.modules.update(modules)
