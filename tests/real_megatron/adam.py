"""Adam as Apex and Transformer Engine make it: the step is a setting of the group, not a tensor of
each parameter.

Real runs train with theirs, which exist only for GPUs; megatron-core falls back to torch's on a
CPU, with which 0.16.1 cannot load the distributed optimizer's ``fully_reshardable`` (KeyError:
'step').
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """The same arguments, settings and states as ``apex.optimizers.FusedAdam``; decoupled weight
    decay.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        **unused: Any,
    ) -> None:
        assert adam_w_mode and not unused
        settings = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of every group that has parameters."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(parameter),
                        torch.zeros_like(parameter),
                    )
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(
                    parameter.grad, parameter.grad, value=1 - second
                )
                mean = state["exp_avg"] / (1 - first ** group["step"])
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt() + group["eps"]
                parameter.sub_(group["lr"] * (mean / root + group["weight_decay"] * parameter))


def use() -> None:
    """megatron-core takes it for Apex's, for the rest of the process."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
