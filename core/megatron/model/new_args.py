"""The training arguments of rank files with new sizes.

The sizes change, and arguments that follow from them (``tensor_model_parallel_size``,
``world_size``, ``padded_vocab_size`` …). All other arguments are kept, and arguments are added only
if the new layout would be unknown without them.

Source: Megatron-LM d98e8a64 ``training/arguments.py``; arguments of the checkpoints in
tests/golden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm

from core.megatron.model.args import fields_of, replaced, topology_of
from core.megatron.model.hybrid import NAMES as PATTERNS
from core.megatron.model.hybrid import recut
from core.megatron.model.pipeline import Pipeline
from core.megatron.model.pipeline_args import changes_for
from core.megatron.model.topology import Topology


def update_args(
    args: object,
    *,
    topology: Topology,
    pipeline: Pipeline,
    counts: Sequence[int],
    padded_vocab_size: int | None,
    unset: Iterable[str] = (),
) -> object:
    """Return a copy of the arguments for rank files with new sizes.

    The module's docstring describes the arguments that change.

    Args:
        args: training arguments of the source.
        topology: sizes to write.
        pipeline: distribution of the layers.
        counts: number of layers in every model chunk, virtual stages outermost.
        padded_vocab_size: rows of the embedding, or None to keep that argument.
        unset: arguments that become False if they are set.
    """
    fields = fields_of(args)
    own = topology_of(args)

    # Arguments that change in all rank files.
    changes: dict[str, object] = {"ckpt_format": "torch", "use_dist_ckpt": False}
    if padded_vocab_size is not None:
        changes["padded_vocab_size"] = padded_vocab_size
    changes |= {name: False for name in unset if fields.get(name)}
    changes |= {
        name: recut(text, counts)
        for name in PATTERNS
        if isinstance(text := fields.get(name), str) and text
    }

    # The distribution of layers.
    added = changes_for(fields, pipeline)
    has_sizes = _sizes(topology) != _sizes(own)
    if has_sizes or added:
        n_chunks = topology.vpp if topology.vpp > 1 else None
        # Megatron accepts the number of chunks from one source only, and a layout contains it.
        changes |= {
            "virtual_pipeline_model_parallel_size": n_chunks,
            "num_virtual_stages_per_pipeline_rank": n_chunks if pipeline.layout is None else None,
            "num_layers_per_virtual_pipeline_stage": None,
        }

    # The parallel sizes, and the sizes of the run that follow from them.
    if has_sizes:
        n_stage, dp = _stage_and_dp(fields, own, topology)
        world_size = n_stage * topology.pp
        # Add a size if its absence means another one.
        sizes = {
            "pipeline_model_parallel_size": (topology.pp, 1),
            "virtual_pipeline_model_parallel_size": (topology.vpp, 1),
            "expert_model_parallel_size": (topology.ep, 1),
            "expert_tensor_parallel_size": (topology.expert_tp, topology.tp),
        }
        added |= {
            name: size
            for name, (size, usual) in sizes.items()
            if fields.get(name) is None and size != usual
        }
        changes |= {
            "tensor_model_parallel_size": topology.tp,
            "tensor_parallel_num_weight_shards": topology.tp,
            "pipeline_model_parallel_size": topology.pp,
            "transformer_pipeline_model_parallel_size": topology.pp - pipeline.has_embedding_stage,
            "expert_model_parallel_size": topology.ep,
            "data_parallel_size": dp,
            "world_size": world_size,
            "inprocess_active_world_size": world_size,
        }

        # Megatron's defaults depend on whether there are model chunks.
        if (topology.vpp > 1) != (own.vpp > 1):
            changes |= {
                "overlap_p2p_comm": topology.vpp > 1,
                "align_param_gather": topology.vpp > 1,
            }
        if fields.get("expert_tensor_parallel_size") is not None:
            changes |= {
                "expert_tensor_parallel_size": topology.expert_tp,
                "expert_tensor_parallel_num_weight_shards": topology.expert_tp,
            }
        if topology.tp == 1:
            changes["sequence_parallel"] = False
    return replaced(args, changes, added=added)


def dp_at(args: object, topology: Topology) -> int | None:
    """Return the data parallel size in the arguments of rank files with new sizes.

    None if the source's arguments have none.
    """
    fields = fields_of(args)
    own = topology_of(args)
    dp = fields.get("data_parallel_size")
    if _sizes(topology) != _sizes(own) and dp is not None:
        return _stage_and_dp(fields, own, topology)[1]
    return dp if isinstance(dp, int) else None


def _sizes(topology: Topology) -> tuple[int, ...]:
    return topology.tp, topology.pp, topology.vpp, topology.ep, topology.expert_tp


def _stage_and_dp(
    fields: Mapping[str, object], own: Topology, topology: Topology
) -> tuple[int, int]:
    """Return (number of ranks in a pipeline stage, data parallel size) with new sizes.

    The number of copies of the experts (or of the complete stage, in models without experts) is
    kept, or increased if TP and EP could not co-vary otherwise.
    """
    dp, cp = (value if isinstance(value := fields.get(name), int) else 1 for name in _COPIES)
    n_copies = max(1, own.tp * cp * dp // (own.expert_tp * own.ep))
    n_dense, n_expert = topology.tp * cp, topology.expert_tp * topology.ep
    n_stage = n_expert * n_copies
    if n_stage % n_dense:
        n_stage = lcm(n_stage, n_dense)
    return n_stage, n_stage // n_dense


_COPIES = ("data_parallel_size", "context_parallel_size")
