"""The cut of a tensor at a destination, which follows from rule, shape and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from core.arrays.box import Box, Shape
from core.arrays.sharding import (
    ShardPiece,
    check_divides,
    check_heads,
    divisors,
    join_numbers,
    replicated_pieces,
    shard_shape,
    split_axis,
)
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.optimizer_keys import param_of
from core.engine.catalog.stored import Coords, PlannedArray
from core.engine.catalog.tensor import Fragment, TargetFragment, Tensor
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import fields_of
from core.megatron.model.facts import ModelFacts
from core.megatron.model.parts import check_units, measure_parts, with_sizes
from core.megatron.model.topology import Rank, Topology
from core.megatron.model.vocabulary import padded_rows
from core.megatron.rules.experts import packed
from core.megatron.rules.rules import LLAVA_PROJECTION, Rule, Rules
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a global tensor over the ranks of a group.

    Args:
        shape: global shape in the destination, padding included.
        axis: the axis that is cut, or None for replication.
        parts: extents of the consecutive parts of that axis; every part is cut separately.
        n: number of shards.
        group: ``tp`` or ``etp``.
        is_transposed: files store the two axes of a shard in the other order.
    """

    shape: Shape
    axis: int | None
    parts: tuple[int, ...]
    n: int
    group: str
    is_transposed: bool = False
    shard_shape: Shape = field(init=False)
    """Shape of one shard."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shard_shape", shard_shape(self.shape, self.axis, self.n))

    @property
    def target_shape(self) -> Shape:
        """Shape of the complete tensor, with the axes in the order of files."""
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def array_shape(self) -> Shape:
        """Shape of a shard, with the axes in the order of files."""
        return self.shard_shape[::-1] if self.is_transposed else self.shard_shape

    def pieces(self, rank: Rank) -> list[ShardPiece]:
        """Return the regions of the tensor in a rank's shard."""
        if self.axis is None:
            return replicated_pieces(self.shape)
        return split_axis(
            self.shape, self.axis, parts=self.parts, rank=rank.within(self.group), n=self.n
        )

    def fragments(self, key: str, rank: Rank, array: PlannedArray) -> list[TargetFragment]:
        """Return the fragments of a tensor in the array of a rank's shard.

        Args:
            key: key of the tensor.
        """
        # A single shard is the tensor itself: its parts follow one another as in the tensor.
        pieces = replicated_pieces(self.shape) if self.n == 1 else self.pieces(rank)
        if self.is_transposed:
            swapped = [
                (Box(piece.box.offset[::-1], piece.box.shape[::-1]), piece.at[::-1])
                for piece in pieces
            ]
            return [Fragment(box, array, at) for box, at in swapped]
        return [Fragment(piece.box, array, piece.at) for piece in pieces]


def cuts_of(
    catalog: Catalog, topology: Topology, facts: ModelFacts, rules: Rules, *, n_rows: int | None
) -> dict[str, Cut]:
    """Return the cut of every tensor of the global per-layer form.

    An optimizer's states are cut like their parameters.

    Args:
        key, tensor: the tensor.
        n_rows: number of rows of the true vocabulary, or None if unknown.

    Raises:
        UnknownTensorError: no rule fits a name.
        UnsupportedError, CorruptError: as for ``cut_of``.
    """
    facts = with_sizes(
        facts,
        {key: tensor.shape for key, tensor in catalog.tensors.items() if param_of(key) == key},
        rules,
    )
    model = catalog.facet(MegatronModel) or MegatronModel()

    # Tensors of one rule and shape share a cut; ids are safe, as rules live as long as their table.
    cuts = {}
    cut_of_kind: dict[tuple[int, Shape], Cut] = {}
    for key, tensor in catalog.tensors.items():
        rule = rules.rule_of(param_of(key), shapes=(tensor.shape,))
        kind = (id(rule), tensor.shape)
        cut = cut_of_kind.get(kind)
        if cut is None:
            if rule.may_be_cut and model.is_down_proj_cut:
                rule = rule.as_cut()
            cut = cut_of_kind[kind] = cut_of(
                key, tensor, rule, facts, topology=topology, n_rows=n_rows
            )
        cuts[key] = cut
    return cuts


def cut_of(
    key: str,
    tensor: Tensor,
    rule: Rule,
    facts: ModelFacts,
    *,
    topology: Topology,
    n_rows: int | None,
) -> Cut:
    """Return the cut of a tensor.

    Args:
        n_rows: number of rows of the true vocabulary, or None if unknown.

    Raises:
        UnsupportedError: a size does not divide, or the padded vocabulary size of the destination
            is unknown.
        CorruptError: the tensor lacks the axis, or its parts do not add up to it.
    """
    rule = rule.for_shape(tensor.shape)
    axis, n = rule.cut_axis, topology.size_of(rule.group)
    if axis is None:
        return Cut(tensor.shape, None, (), n, rule.group)
    if axis >= len(tensor.shape):
        raise CorruptError(
            f"the tensor has shape {tensor.shape}, but its rule splits it along axis {axis}",
            key=key,
        )

    # Heads, units and parts must divide; the vocabulary is padded to divide.
    if rule.unit == "heads":
        check_heads(n_heads=facts.n_heads, n_groups=facts.n_groups_of(key), tp=n, key=key)
    shape = tensor.shape
    if rule.kind == "vocab":
        rows = padded_rows(key, tensor, facts, tp=n, n_rows=n_rows)
        shape = (*shape[:axis], rows, *shape[axis + 1 :])
    check_units(rule, n, facts, key=key)
    parts = measure_parts(rule, shape[axis], facts, key=key)
    check_divides(parts, n, key=key, axis=axis, group=rule.group.upper())
    return Cut(shape, axis, tuple(parts), n, rule.group)


def param_array(
    name: str,
    keys: Sequence[str],
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    rules: Rules,
    *,
    coords: Coords,
) -> PlannedArray | JoinedArray:
    """Plan the array of a rank's parameter, or of one of its states.

    Args:
        name: name of the array.
        keys: key of its tensor, or of the tensors of all the rank's experts, in order (GroupedMLP).
        tensors: metadata of the tensors.
        cuts: cuts of the tensors.
        rules: the rule table of the destination.
        coords: coordinates of the rank.
    """
    if not cuts[keys[0]].is_transposed:
        (key,) = keys
        return PlannedArray(name, tensors[key].dtype, cuts[key].array_shape, coords=coords)
    parts = [
        PlannedArray(f"{name}[{number}]", tensors[key].dtype, cuts[key].array_shape, coords=coords)
        for number, key in enumerate(keys)
    ]
    expert = rules.expert_of(param_of(keys[0]))
    assert expert is not None, "only experts are transposed"
    return packed(name, parts, expert.rest)


def check_towers(catalog: Catalog, format: str) -> None:
    """Raise if a model with towers is to be written in a format that its trainer does not load.

    Megatron-Bridge, which builds most such models, saves and loads torch_dist and fsdp_dtensor.
    Source: Megatron-Bridge 067f987d ``training/checkpointing.py`` (``load_checkpoint``).

    Raises:
        UnsupportedError: there are towers, and it is another one.
    """
    model = catalog.facet(MegatronModel)
    if model is None or model.wrapper is None:
        return
    # Megatron-LM builds LLaVA itself.
    is_llava = any(key.startswith(LLAVA_PROJECTION) for key in catalog.tensors)
    if format != "torch_dist" and not is_llava:
        raise UnsupportedError(
            "the model has towers in addition to its text model, so only Megatron-Bridge can build "
            f"it, but Megatron-Bridge does not load {format} checkpoints",
            hint="use --to torch_dist, or convert only the text model of a Hugging Face model with "
            "--text-model",
        )
    # Optimizers of rank files count parameters; with norms, RADIO's order is not that of CLIP.
    has_norms, is_radio = (
        any(key.startswith(f"vision_model.{start}") for key in catalog.tensors)
        for start in ("ln_", "embedder.")
    )
    is_numbered = format == "megatron" and catalog.optimizer is not None
    if is_radio and has_norms and is_numbered and model.top_level is None:
        raise UnsupportedError(
            "ckpt does not support the optimizer of a RADIO tower with norms in rank files",
            hint="drop it with --no-optim, or use --to torch_dist",
        )


def without_unused_wrapper(catalog: Catalog, rules: Rules) -> Catalog:
    """Return a catalog whose text model has names of its own if no tower is left beside it."""
    model = catalog.facet(MegatronModel)
    wrapper = rules.wrapper_in(None if model is None else model.wrapper)
    if model is None or wrapper is None:
        return catalog
    if any(param_of(key).startswith(wrapper.towers) for key in catalog.tensors):
        return catalog
    return catalog.with_facet(replace(model, wrapper=None))


def check_head_gates(args: object, format: str) -> None:
    """Raise if a model with a gate for each attention head is not in torch_dist.

    Each rank holds its rows of queries, keys and values and after them its gates in one tensor,
    whose parts only torch_dist names (``._qkv``, ``._gate``). Megatron-Bridge, which builds such
    models, saves no rank files. Source: Megatron-LM dev d48bd6be ``transformer/attention.py``
    (``apply_head_wise_attn_gate_sharded_factory``); Megatron-Bridge 067f987d
    ``training/checkpointing.py``.

    Raises:
        UnsupportedError: there are such gates, and it is another format.
    """
    if format != "torch_dist" and fields_of(args).get("head_wise_attn_gate"):
        raise UnsupportedError(
            "each attention head has a gate in linear_qkv (argument head_wise_attn_gate is set), "
            f"and only torch_dist distinguishes the gate rows from the other rows, so {format} "
            "checkpoints of this model are not supported",
            hint="use torch_dist (--to torch_dist)",
        )


def check_parallel_sizes(topology: Topology, facts: ModelFacts) -> None:
    """Raise for sizes that Megatron, or the model's experts, do not allow.

    Raises:
        UnsupportedError: there are several model chunks, but one pipeline stage; or the model has
            no experts, or their number does not divide.
    """
    if topology.vpp > 1 and topology.pp == 1:
        layout = None if topology.pipeline is None else topology.pipeline.layout
        hint = "use --vpp-new 1, or a larger --pp-new"
        if layout is not None:
            n = len(layout)
            hint = (
                f"use --pp-new {n} or a divisor of {n}, because the pipeline layout has {n} parts"
            )
        raise UnsupportedError(
            f"several model chunks per stage (VPP {topology.vpp}) need more than one pipeline "
            "stage",
            hint=hint,
        )
    if facts.n_experts is None:
        if topology.ep > 1 or topology.expert_tp != topology.tp:
            raise UnsupportedError(
                f"the model has no experts to distribute over expert parallel ranks ({topology})",
                hint="omit --ep-new and --etp-new",
            )
    elif facts.n_experts % topology.ep:
        raise UnsupportedError(
            f"{facts.n_experts} experts are not divisible by EP {topology.ep}",
            hint=f"EP sizes that work: {join_numbers(divisors(facts.n_experts))}",
        )
