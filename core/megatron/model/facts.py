"""The facts about a model and its layout on which resharding depends.

These are sizes, the kinds of layers, and the stages of the layers at any number of pipeline stages.
``core.megatron.model.args.parse_facts`` reads them from the training arguments.

Source: as in ``core.megatron.model.args``; for the distribution of layers, as in
``core.megatron.model.pipeline``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from core.arrays.sharding import padded_vocab_size
from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.blocks import LayerBlocks, layer_number
from core.megatron.model.hybrid import LayerPattern
from core.megatron.model.pipeline import LayerSplit, Pipeline, Stages, split_layers
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import GPT, ModelKind
from core.values import dataclass

PREDICTION_STACK = "mtp.layers."
"""Beginning of the names of layers of multi-token prediction, before their numbers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the training arguments about the model and its layout.

    Args:
        topology: parallel sizes of the run that saved.
        world_size: number of ranks of that run, or None.
        cp: context parallel size of that run.
        n_layers: number of layers in the main stack.
        n_heads, n_groups: number of attention heads, and of groups that share keys and values; of
            heterogeneous layers, the smallest number of groups (``n_groups_of`` gives a layer's).
        head_dim: number of channels of one head, or None.
        hidden_size: number of channels of the residual stream, or None.
        is_gated: the MLP has a gate.
        is_tied: input and output embeddings are one tensor.
        is_local: the parameters have the names of the local implementation, not Transformer
            Engine's.
        is_mla: the model has multi-latent attention.
        vocab_size: number of true rows of the vocabulary; None if the arguments have none.
        divisible_by: padded vocabulary sizes are multiples of this times TP; None if the vocabulary
            is not padded.
        pipeline: the run's distribution of layers over pipeline stages.
        n_experts: number of routed experts per MoE layer, or None.
        moe_layers: global numbers of the layers with experts.
        is_stacked: torch_dist stacks the layers, because they are alike.
        expert_names: naming of experts in rank files (``core.megatron.rules.experts``), or None
            without experts.
        linear_layers: global numbers of the layers with linear attention.
        unindexed_layers: global numbers of the layers of sparse attention without an indexer.
        is_allotted: the arguments give the share of each kind of layers, but not the kind of each
            layer.
        is_prediction_renamed: rank files call the layer of a multi-token prediction
            ``mtp_model_layer``.
        pattern: the kinds of layers of a hybrid model, or None.
        blocks: what each layer of a heterogeneous model consists of, or None.
        n_predictions: number of multi-token prediction layers.
        sizes: the arguments that are positive integers; rules name some of them as sizes of
            parameters.
        kind: kind of model: GPT, BERT, T5 …
        noop_layers: numbers of layers that MindSpeed skips; they have no parameters.
        stacks: prefix of the layers' names → number of layers, for every stack of the model.
        n_tower_layers: number of layers that torch_dist stacks in the tower of Megatron-LM's LLaVA;
            0 if there is none, or its layers are not stacked.
    """

    topology: Topology
    world_size: int | None
    cp: int
    n_layers: int
    n_heads: int
    n_groups: int
    head_dim: int | None
    hidden_size: int | None
    is_gated: bool
    is_tied: bool
    is_local: bool
    is_mla: bool
    vocab_size: int | None
    divisible_by: int | None
    pipeline: Pipeline
    n_experts: int | None = None
    moe_layers: frozenset[int] = frozenset()
    is_stacked: bool = True
    expert_names: str | None = None
    linear_layers: frozenset[int] = frozenset()
    unindexed_layers: frozenset[int] = frozenset()
    is_allotted: bool = False
    is_prediction_renamed: bool = False
    pattern: LayerPattern | None = None
    blocks: tuple[LayerBlocks, ...] | None = None
    noop_layers: frozenset[int] = frozenset()
    n_predictions: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    kind: ModelKind = GPT
    stacks: Mapping[str, int] = field(default_factory=dict)
    n_tower_layers: int = 0

    @property
    def fuses_names(self) -> bool:
        """True if torch_dist has other names for norms than rank files.

        The local implementation has, except for multi-latent attention.
        """
        return self.is_local and not self.is_mla

    def n_groups_of(self, name: str) -> int:
        """Return the number of query groups of the layer with a tensor.

        Args:
            name: global name of the tensor.
        """
        number = layer_number(name)
        if self.blocks is None or number is None or number >= len(self.blocks):
            return self.n_groups
        return self.blocks[number].n_groups or self.n_groups

    def blocks_of(self, stack: str, layer: int) -> LayerBlocks | None:
        """Return what a layer of a heterogeneous model consists of; None for other layers."""
        if self.blocks is None or stack != self.kind.stacks[0] or layer >= len(self.blocks):
            return None
        return self.blocks[layer]

    def empty_layers(self, stack: str) -> frozenset[int]:
        """Return the numbers of the layers without parameters."""
        if stack != self.kind.stacks[0]:
            return frozenset()
        empty = ("none", "none")
        blocks = enumerate(self.blocks or ())
        return self.noop_layers | {number for number, block in blocks if block.kind == empty}

    def padded_rows(self, n_rows: int, *, tp: int) -> int:
        """Return the number of rows of a vocabulary of ``n_rows`` after padding for a TP size."""
        if self.divisible_by is None:
            return n_rows
        return padded_vocab_size(n_rows, divisible_by=self.divisible_by, tp=tp)

    def pipeline_at(self, pp: int, vpp: int = 1) -> Pipeline:
        """Return the default distribution of layers over ``pp`` stages of ``vpp`` chunks.

        Parts of the run's own distribution that apply at these sizes are kept; otherwise it is
        even.
        """
        own = self.topology
        return self.pipeline.at(has_pp=pp == own.pp and pp > 1, has_vpp=vpp == own.vpp)

    def stages(self, pp: int, vpp: int = 1, *, pipeline: Pipeline | None = None) -> Stages:
        """Return the stage and chunk of each part of the model at ``pp`` stages of ``vpp`` chunks.

        Args:
            pipeline: distribution of the layers; None for ``pipeline_at``.

        Raises:
            UnsupportedError: the layers do not divide, or a model of two stacks would have several
                stages.
            UsageError: ``pipeline`` does not fit the layers or the sizes.
            CorruptError: the run's own distribution does not fit its layers.
        """
        if len(self.kind.stacks) > 1 and pp > 1:
            raise UnsupportedError(
                f"{self.kind.kind} models cannot be split into {pp} pipeline stages, because "
                "megatron-core 0.14 and later do not support pipelines for encoder-decoder models",
                hint="use --pp-new 1",
            )
        pipeline = self.pipeline_at(pp, vpp) if pipeline is None else pipeline
        split = self._split_main_stack(pp, vpp, pipeline)

        # Only a layout string places multi-token prediction; by default, it is in the last chunk.
        main = self.kind.stacks[0]
        parts = enumerate(pipeline.layout or ())
        mtp = next((divmod(number, pp) for number, part in parts if "m" in part), None)
        stages = Stages(pp, vpp, {main: split}, mtp)
        splits = {main: split}

        # A second stack exists only without pipeline stages.
        for stack in self.kind.stacks[1:]:
            if stack in self.stacks:
                splits[stack] = split_layers(self.stacks[stack], pp=1, vpp=1)
        if self.n_predictions:
            splits[PREDICTION_STACK] = stages.in_one_chunk(
                self.n_predictions, stages.chunk_at("mtp")
            )
        return replace(stages, splits=splits)

    def _split_main_stack(self, pp: int, vpp: int, pipeline: Pipeline) -> LayerSplit:
        """Distribute the layers of the main stack.

        Raises:
            UnsupportedError, UsageError, CorruptError: as for ``stages``.
        """
        # The cuts in a hybrid model's pattern win over an even distribution.
        if self.pattern is not None and self.is_cut_by_pattern(pp, vpp) and pipeline.is_even:
            cuts = self.pattern.cuts
            if len(cuts) != pp * vpp:
                raise CorruptError(
                    f"the layer pattern has {len(cuts)} chunks, but PP {pp} × VPP {vpp} requires "
                    f"{pp * vpp} model chunks"
                )
            return LayerSplit(tuple(cuts[first : first + pp] for first in range(0, pp * vpp, pp)))

        # What the user did not choose is the checkpoint's fault.
        try:
            return split_layers(
                self.n_layers, pp=pp, vpp=vpp, pipeline=pipeline, n_mtp=self.n_predictions
            )
        except UsageError as err:
            if pipeline != self.pipeline or (pp, vpp) != (self.topology.pp, self.topology.vpp):
                raise
            hint = "the training arguments of this checkpoint contradict each other"
            raise CorruptError(err.message, hint=hint) from err

    def has_unused_head(self, topology: Topology) -> bool:
        """Return whether the last stage of rank files has an output layer that is not used.

        A stage with multi-token prediction has a copy of the embedding. If embeddings are tied,
        megatron-core 0.17 and later use that copy as the output layer, but build another one.
        """
        if not (self.is_tied and self.n_predictions and topology.pp > 1):
            return False
        stages = self.stages(topology.pp, topology.vpp, pipeline=topology.pipeline)
        return stages.chunk_at("mtp") == stages.chunk_at("last")

    def is_cut_by_pattern(self, pp: int, vpp: int = 1) -> bool:
        """Return whether a hybrid model's pattern gives the layers of these stages and chunks."""
        is_own = (pp, vpp) == (self.topology.pp, self.topology.vpp)
        return is_own and pp > 1 and self.pattern is not None and bool(self.pattern.cuts)

    def has_experts(self, stack: str, layer: int) -> bool:
        """Return whether a layer has experts.

        Multi-token predictions are like the last layer, unless a pattern describes them.
        """
        if stack != PREDICTION_STACK:
            return layer in self.moe_layers
        if self.pattern is not None:
            return "E" in self.pattern.prediction
        return self.n_layers - 1 in self.moe_layers

    def kind_of(self, stack: str, layer: int) -> object:
        """Return the kind of a layer, for comparison; None if the arguments do not specify it."""
        if stack == PREDICTION_STACK:
            return stack
        if self.pattern is not None:
            return self.pattern.layers[layer]
        blocks = self.blocks_of(stack, layer)
        if blocks is not None:
            return blocks.kind
        if self.is_allotted:
            return None
        is_unindexed = layer in self.unindexed_layers
        return (stack, layer in self.moe_layers, layer in self.linear_layers, is_unindexed)


def pipeline_notes(facts: ModelFacts, pipeline: Pipeline) -> list[str]:
    """Return the note that the distribution of layers changes; [] if it does not."""
    if facts.pipeline.is_even or pipeline == facts.pipeline:
        return []
    now = "evenly" if pipeline.is_even else f"by '{pipeline}'"
    before = f"by '{facts.pipeline}' in the source"
    return [f"layers are divided among pipeline stages {before} and {now} in the destination"]
