"""Run with megatron-core: what it makes of distributions of layers over pipeline stages.

stdin: a JSON list of configurations, of transformer's arguments. stdout: for each a list of
``[count, offset, n_mtp]``, one for every chunk with the virtual stages outermost, or the name of
the error.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402


def chunks(options: dict[str, Any]) -> list[list[int]]:
    import torch

    config = TransformerConfig(
        hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32, **options
    )
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.get_virtual_pipeline_model_parallel_world_size = lambda: vpp
    counts = []
    for v in range(vpp or 1):
        for p in range(pp):
            parallel_state.get_pipeline_model_parallel_rank = lambda p=p: p
            where: dict[str, Any] = {"vp_stage": None if vpp is None else v}
            count = get_num_layers_to_build(config, **where, pp_rank=p)
            offset = get_transformer_layer_offset(config, **where, pp_rank=p)
            layout = config.pipeline_model_parallel_layout
            n_mtp = 0
            if isinstance(layout, PipelineParallelLayerLayout):
                n_mtp = sum(part.name == "mtp" for part in layout.layout[p][v])
            counts.append([count, offset, n_mtp])
    return counts


def main() -> None:
    answers: list[object] = []
    for options in json.load(sys.stdin):
        try:
            answers.append(chunks(options))
        except (AssertionError, ValueError, ZeroDivisionError, RuntimeError) as err:
            answers.append(f"{type(err).__name__}: {err}")
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
