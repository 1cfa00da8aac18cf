"""The model-parallel ranks of a DeepSpeed checkpoint.

Files of rank m are those with ``mp_rank_m``. Ranks are numbered by pipeline stage, then by
tensor-parallel rank::

    pp 2, tp 2     mp_rank_00   stage 0, tensor-parallel rank 0
                   mp_rank_01   stage 0, tensor-parallel rank 1
                   mp_rank_02   stage 1, tensor-parallel rank 0
                   mp_rank_03   stage 1, tensor-parallel rank 1

``checkpoint_parallel_dimensions`` records both sizes. Versions before it have a pipeline if there
are files of layers, whose names have the tensor-parallel rank.

Source: DeepSpeed 0.19.8 ``checkpoint/reshape_meg_2d.py``, ``runtime/engine.py``,
``runtime/pipe/module.py`` (``ckpt_layer_path``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from core.errors import CorruptError
from core.formats.deepspeed.files import missing_model_parallel_rank
from core.formats.deepspeed.state_file import mapping_or_empty
from core.values import dataclass

if TYPE_CHECKING:
    from core.formats.deepspeed.model_states import ModelStates


@dataclass(frozen=True, slots=True)
class StageGrid:
    """Sizes of pipeline and tensor parallelism.

    Args:
        pp: number of pipeline stages.
        tp: number of tensor-parallel ranks.
    """

    pp: int
    tp: int


def recorded_size(model: ModelStates) -> int:
    """Return the number of model-parallel ranks that a model file records; 1 without a record."""
    degrees = mapping_or_empty(model.state.root.get("checkpoint_parallel_dimensions"))
    tp, pp = degrees.get("tp_degree"), degrees.get("pp_degree")
    product = tp * pp if type(tp) is int and type(pp) is int else 1
    size = model.state.root.get("mp_world_size")
    return max(product, size if type(size) is int else 1)


def grid_of(model: ModelStates, n_ranks: int, layers: Mapping[int, Mapping[int, str]]) -> StageGrid:
    """Return the sizes of a checkpoint's parallelism.

    Args:
        model: the model file of rank 0.
        n_ranks: number of model-parallel ranks that have files.
        layers: number of a layer → tensor-parallel rank → its file.

    Raises:
        MissingShardError: a rank has no files.
        CorruptError: the recorded sizes and the files contradict each other.
    """
    if recorded_size(model) > n_ranks:
        raise missing_model_parallel_rank(n_ranks)
    degrees = mapping_or_empty(model.state.root.get("checkpoint_parallel_dimensions"))
    tp, pp = degrees.get("tp_degree"), degrees.get("pp_degree")
    if type(tp) is not int or type(pp) is not int:
        tp = len(next(iter(layers.values()))) if layers else n_ranks
        pp = n_ranks // tp
    if pp < 1 or tp < 1 or pp * tp != n_ranks:
        raise CorruptError(
            f"there are files of {n_ranks} model-parallel ranks, but {pp} pipeline stages with "
            f"{tp} tensor-parallel ranks are recorded",
            file=model.state.file,
            hint="remove files that an older run with more ranks left behind",
        )
    for layer, files in layers.items():
        if set(files) != set(range(tp)):
            raise CorruptError(
                f"layer {layer} has files of tensor-parallel ranks {sorted(files)}, but there are "
                f"{tp} ranks",
                file=next(iter(files.values())),
                hint="remove files that an older run with more ranks left behind"
                if max(files) >= tp
                else "copy the checkpoint again, with all its files",
            )
    return StageGrid(pp, tp)
