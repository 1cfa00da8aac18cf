"""The facts about a model and its layout on which resharding depends.

Sizes, the kinds of its layers, and where the layers live at any number of pipeline stages.
``core.megatron.model.args.facts_of`` reads them from the training arguments.

Source: as in ``core.megatron.model.args``; how layers are distributed, as in
    ``core.megatron.model.pipeline``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from core.arrays.sharding import padded_vocab_size
from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.hybrid import LayerPattern
from core.megatron.model.pipeline import LayerSplit, Pipeline, split_layers
from core.megatron.model.stages import Stages
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import GPT, ModelKind

PREDICTION_STACK = "mtp.layers."
"""Beginning of the names of layers of multi-token prediction, before their numbers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the training arguments about the model and its layout.

    Args:
        topology: parallel sizes of the run that saved.
        world_size: number of ranks of that run, or None.
        cp: context parallel size of that run.
        n_layers: layers of the main stack.
        n_heads, n_groups: attention heads, and groups of them that share keys and values.
        head_dim: channels of one head, or None.
        hidden_size: channels of the residual stream, or None.
        is_gated: the MLP has a gate.
        is_tied: input and output embeddings are one tensor.
        is_local: the parameters have the names of the local implementation, not Transformer
            Engine's.
        is_mla: multi-latent attention.
        vocab_size: true rows of the vocabulary, or None where the run did not say.
        divisible_by: padded vocabulary sizes are multiples of this times TP; None if the vocabulary
            is not padded.
        pipeline: how the run distributes its layers over the pipeline stages.
        n_experts: routed experts of a layer that has them, or None.
        moe_layers: global numbers of the layers that have them.
        is_stacked: torch_dist stacks the layers, because they are alike.
        expert_names: how rank files name experts (``core.megatron.rules.experts``), or None without
            experts.
        linear_layers: global numbers of the layers with linear attention.
        is_allotted: the arguments give shares of the kinds of layers, without saying which is
            which.
        is_prediction_renamed: rank files call the layer of a multi-token prediction
            ``mtp_model_layer``.
        pattern: the kinds of layers of a hybrid model, or None.
        n_predictions: layers of multi-token prediction.
        sizes: the arguments that are positive numbers; rules name some of them as sizes of
            parameters.
        kind: what kind of model it is.
        stacks: beginning of the names of layers → number of layers, for every stack that the model
            has.
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
    is_allotted: bool = False
    is_prediction_renamed: bool = False
    pattern: LayerPattern | None = None
    n_predictions: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    kind: ModelKind = GPT
    stacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def fuses_names(self) -> bool:
        """True if torch_dist has other names for norms than rank files.

        So it is in the local implementation, except for multi-latent attention.
        """
        return self.is_local and not self.is_mla

    def padded_rows(self, n_rows: int, *, tp: int) -> int:
        """Return the rows that a vocabulary of ``n_rows`` has at a TP size, padding included."""
        return (
            n_rows
            if self.divisible_by is None
            else padded_vocab_size(n_rows, divisible_by=self.divisible_by, tp=tp)
        )

    def pipeline_at(self, pp: int, vpp: int = 1) -> Pipeline:
        """Return the default distribution of layers over so many stages and chunks.

        The parts of the run's own distribution that still mean something at these sizes are kept;
        the rest is even.
        """
        own = self.topology
        return self.pipeline.at(has_pp=pp == own.pp and pp > 1, has_vpp=vpp == own.vpp)

    def stages(self, pp: int, vpp: int = 1, *, pipeline: Pipeline | None = None) -> Stages:
        """Return which of ``pp`` stages of ``vpp`` chunks holds which part of the model.

        Args:
            pipeline: how layers are distributed; None for ``pipeline_at``.

        Raises:
            UnsupportedError: the layers do not divide, or a model of two stacks is to have several
                stages.
            UsageError: ``pipeline`` does not fit them.
            CorruptError: the run's own way does not fit them.
        """
        if len(self.kind.stacks) > 1 and pp > 1:
            raise UnsupportedError(
                f"{self.kind.kind} models cannot be cut into {pp} pipeline stages: Megatron-LM refuses it",
                hint="use --pp-new 1",
            )

        # The pattern of a hybrid model wins over an even distribution.
        how = self.pipeline_at(pp, vpp) if pipeline is None else pipeline
        n_mtp = self.n_predictions
        try:
            if self.is_cut_by_pattern(pp, vpp) and how.is_even:
                split = _cut_layers(self.pattern.cuts if self.pattern else (), pp, vpp)
            else:
                split = split_layers(self.n_layers, pp=pp, vpp=vpp, pipeline=how, n_mtp=n_mtp)
        except UsageError as err:
            if how != self.pipeline or (pp, vpp) != (self.topology.pp, self.topology.vpp):
                raise
            hint = "the training arguments of this checkpoint contradict each other"
            raise CorruptError(err.message, hint=hint) from err

        # Only a layout string places multi-token prediction; else it is in the last chunk.
        mtp = next((divmod(n, pp) for n, part in enumerate(how.layout or ()) if "m" in part), None)
        main = self.kind.stacks[0]
        stages = Stages(pp, vpp, {main: split}, mtp)
        other_stacks = {
            stack: split_layers(n, pp=1, vpp=1)
            for stack, n in self.stacks.items()
            if stack in self.kind.stacks[1:]
        }
        predictions = (
            {PREDICTION_STACK: stages.in_one_chunk(n_mtp, stages.chunk_at("mtp"))} if n_mtp else {}
        )
        return replace(stages, splits={main: split, **other_stacks, **predictions})

    def is_cut_by_pattern(self, pp: int, vpp: int = 1) -> bool:
        """Return whether the pattern of a hybrid model gives the layers of so many chunks."""
        is_own = (pp, vpp) == (self.topology.pp, self.topology.vpp)
        return is_own and pp > 1 and self.pattern is not None and bool(self.pattern.cuts)

    def has_experts(self, stack: str, layer: int) -> bool:
        """Return whether a layer has experts.

        Predictions are like the last layer, or as the pattern says.
        """
        if stack != PREDICTION_STACK:
            return layer in self.moe_layers
        if self.pattern is not None:
            return "E" in self.pattern.prediction
        return self.n_layers - 1 in self.moe_layers

    def kind_of(self, stack: str, layer: int) -> object:
        """Return the kind of a layer, for comparison; None where the arguments do not say."""
        if stack == PREDICTION_STACK:
            return stack
        if self.pattern is not None:
            return self.pattern.layers[layer]
        return (
            None
            if self.is_allotted
            else (stack, layer in self.moe_layers, layer in self.linear_layers)
        )


def pipeline_notes(facts: ModelFacts, pipeline: Pipeline) -> list[str]:
    """Return the note that layers are no longer distributed in the run's own way; [] if they
    are.
    """
    if facts.pipeline.is_even or pipeline == facts.pipeline:
        return []
    now = "evenly" if pipeline.is_even else str(pipeline)
    return [f"layers were distributed over pipeline stages by {facts.pipeline}; now {now}"]


def _cut_layers(cuts: tuple[int, ...], pp: int, vpp: int) -> LayerSplit:
    """Return the layers of chunks in order, virtual stages outermost.

    Raises:
        CorruptError: the pattern does not have as many chunks.
    """
    if len(cuts) != pp * vpp:
        raise CorruptError(
            f"the pattern of layers has {len(cuts)} chunks, but there are {pp} stages of {vpp} chunks"
        )
    return LayerSplit(tuple(cuts[first : first + pp] for first in range(0, pp * vpp, pp)))
