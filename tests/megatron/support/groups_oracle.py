"""How megatron-core itself sorts parameters into groups: a script of its own process, which needs
megatron-core.

Prints JSON: for each case, the groups as (settings, names) in order. Names and shapes come as JSON
from standard input.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch

CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "decoupled": {"decoupled_lr": 0.5, "decoupled_min_lr": 0.1},
    "qk_norms": {"apply_wd_to_qk_layernorm": True},
}
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


class Chunk:
    """A model chunk that has only parameters."""

    def __init__(self, params: list[tuple[str, list[int], bool]]) -> None:
        self.ddp_config = SimpleNamespace(use_custom_fsdp=False, use_megatron_fsdp=False)
        self.params = {}
        for name, shape, is_expert in params:
            param = torch.nn.Parameter(torch.zeros(shape))
            param.allreduce = not is_expert  # type: ignore[attr-defined]
            if name in _ENDS:
                param.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
            self.params[name] = param

    def named_parameters(self) -> Any:
        return [("module." + name, param) for name, param in self.params.items()]


def groups_of(chunk: Chunk, options: dict[str, object]) -> list[dict[str, Any]]:
    """The groups that megatron-core makes."""
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups

    config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4)
    for name, value in options.items():
        setattr(config, name, value)
    if "config_overrides" in inspect.signature(_get_param_groups).parameters:
        return list(_get_param_groups([chunk], config, None))
    more: dict[str, Any] = {
        name: options.get(name) for name in ("decoupled_lr", "decoupled_min_lr")
    }
    if "default_skip_embedding_weight_decay" in inspect.signature(_get_param_groups).parameters:
        more["default_skip_embedding_weight_decay"] = False
    return list(_get_param_groups([chunk], None, None, 1.0, lr=1e-3, min_lr=1e-4, **more))


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        chunk = Chunk(json.load(sys.stdin))
        name_of = {id(param): name for name, param in chunk.params.items()}
        answers: dict[str, Any] = {}
        for case, options in CASES.items():
            answers[case] = []
            for group in groups_of(chunk, options):
                settings = {name: value for name, value in group.items() if name != "params"}
                answers[case].append((settings, [name_of[id(param)] for param in group["params"]]))
        sys.stdout.write(json.dumps(answers))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
