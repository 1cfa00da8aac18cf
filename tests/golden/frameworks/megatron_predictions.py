"""Write checkpoints of a model with multi-token prediction and tied embeddings.

    python tests/golden/frameworks/megatron_predictions.py FOLDER MEGATRON_LM

``MEGATRON_LM`` is a directory with ``megatron/core`` of Megatron-LM d98e8a64; torch runs on CPUs
with gloo. ``FOLDER`` is recorded in the files, so it should not be absolute. Each
``FOLDER/LAYOUT/FORM`` holds the checkpoint of three steps, whose tensors were replaced by known
values, the same at every layout (``tests/real_megatron/values.py``). Only the output layer that
Megatron does not use, in a last stage with predictions, has values of its own.
"""

from __future__ import annotations

import sys
import tempfile
import types
import typing
from argparse import Namespace
from pathlib import Path

import typing_extensions

from tests.real_megatron.megatron import Form
from tests.real_megatron.setting import ITERATION, Layout, Model, Optimizer, Run

MODEL = Model(
    mtp=1, is_tied=True, layers=4, hidden=16, heads=2, groups=1, ffn=16, vocab=24, divisible_by=8
)
LAYOUTS: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "one": (Layout(), ("rank_files", "torch_dist")),
    "pp2": (Layout(pp=2), ("rank_files",)),
    "tp2_pp2": (Layout(tp=2, pp=2), ("rank_files",)),
    "apart": (Layout(pp=3, string="Ett|ttm|L"), ("rank_files", "torch_dist")),
}


def install(megatron_lm: Path) -> None:
    """Let Megatron-LM run in this process."""
    sys.path.insert(0, str(megatron_lm))
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

    # The worker of the tests was written for megatron-core 0.16.1, which has this module.
    name = "megatron.core.transformer.moe.grouped_gemm_util"
    sys.modules[name] = types.ModuleType(name)
    from tests.real_megatron import cpu

    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer import multi_token_prediction

    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False

    # As pretrain_gpt.py does: the first stage, that of the predictions and the last one.
    parallel_state.default_embedding_ranks = lambda ranks: sorted({ranks[0], *ranks[-2:]})

    # Only so that the worker finds all parameters: Megatron fails to make a sharded state dict of
    # an output layer that it does not use.
    tie = LanguageModule.tie_embeddings_and_output_weights_state_dict

    def tie_used(self, state_dict, output_key, embedding_key, metadata):  # type: ignore[no-untyped-def]
        if self.post_process and not self.pre_process and getattr(self, "mtp_process", False):
            state_dict[output_key].allow_shape_mismatch = True
        else:
            tie(self, state_dict, output_key, embedding_key, metadata)

    LanguageModule.tie_embeddings_and_output_weights_state_dict = tie_used


def main() -> None:
    """Write the checkpoints of all layouts."""
    folder, megatron_lm = map(Path, sys.argv[1:])
    install(megatron_lm)
    from tests.real_megatron import checkpoints
    from tests.real_megatron.worker import answer

    # Newer training scripts have an option that older ones do not have.
    arguments = checkpoints.arguments
    checkpoints.arguments = lambda run: Namespace(
        **vars(arguments(run)), mtp_hybrid_override_pattern=None
    )

    for name, (layout, forms) in LAYOUTS.items():
        run = Run(model=MODEL, layout=layout, optimizer=Optimizer(adam="torch"))
        with tempfile.TemporaryDirectory() as out:
            problems = answer(
                {
                    "run": run.as_json(),
                    "out": out,
                    "load": None,
                    "steps": ITERATION,
                    "fill": True,
                    "save": [Form(form).at(folder / name / form) for form in forms],
                    "more": 0,
                }
            )
        assert not problems, "\n".join(problems.values())


if __name__ == "__main__":
    main()
