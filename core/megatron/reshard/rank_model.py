"""Merge the rank files of a Megatron checkpoint into one model, under global names.

``core.megatron.reshard.from_ranks`` builds global tensors from the result;
``core.megatron.reshard.rank_optimizer`` uses it to find the parameters' optimizer states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Coords, StoredArray
from core.engine.catalog.tensor import Tensor
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnknownTensorError,
    UnsupportedError,
    list_some,
    raising,
)
from core.megatron.extras.common_state import EXTRA_STATE
from core.megatron.extras.nested_dicts import FlatDict, flattened, without_outer_names
from core.megatron.model.facts import ModelFacts
from core.megatron.model.topology import Rank
from core.megatron.optimizer.rank_state import Param, RankFile, stored_array
from core.megatron.placement.chunk import ModelChunk, find_chunk
from core.megatron.placement.homes import FINAL_NORM
from core.megatron.rules.rules import Rule, Rules, Wrapper
from core.pickle.equality import are_same
from core.pickle.inert import Global, Inert, TensorLeaf, as_mapping
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from core.megatron.placement.qkv_order import OldRows


@dataclass(frozen=True, slots=True)
class RankPart:
    """The shard of a tensor that one rank holds.

    Args:
        folder: the rank's directory.
    """

    rank: Rank
    folder: str
    array: StoredArray


@dataclass(slots=True)
class RankTensor:
    """A global tensor under construction.

    Args:
        parts: the shards of all ranks, replicas included.
        old_rows: the order of a shard's rows, if it is not today's.
    """

    rule: Rule
    parts: list[RankPart] = field(default_factory=list)
    old_rows: OldRows | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows of a shard; 0 for a tensor without axes."""
        shape = self.parts[0].array.shape
        return shape[0] if shape else 0


@dataclass(slots=True)
class RankModel:
    """The model chunks of all ranks, merged by name.

    Args:
        tensors: global name → the shards of the tensor.
        extra_states: global name → the distinct values on the ranks; usually one.
        order: global name → sort key of the tensor or extra state, in the order of the files.
        versions: module → its entry in torch's ``_metadata``.
        nesting: name of a state dict within the chunk → True for an OrderedDict.
        module_order: module → sort key, in the order of the files.
        expert_names: the form of the experts' names (``core.megatron.rules.experts``), or None
            without experts.
        files: rank → the parameters of its file.
        outer, wrapper: beginnings of names that were removed (``without_outer_names``).
        unused: shards of an output layer that is not used.
    """

    tensors: dict[str, RankTensor] = field(default_factory=dict)
    extra_states: dict[str, list[object]] = field(default_factory=dict)
    order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)
    nesting: dict[str, bool] = field(default_factory=dict)
    module_order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expert_names: str | None = None
    files: dict[Rank, RankFile] = field(default_factory=dict)
    outer: str = ""
    wrapper: Wrapper | None = None
    unused: list[StoredArray] = field(default_factory=list)

    def metas(self) -> dict[str, Tensor]:
        """Return the name, element type and shape that one rank's share of each tensor has."""
        arrays = {name: tensor.parts[0].array for name, tensor in self.tensors.items()}
        return {name: Tensor(item.dtype, item.shape) for name, item in arrays.items()}


@dataclass(frozen=True, slots=True)
class _StageHead:
    """The first rank of a pipeline stage, whose names the other ranks repeat.

    Args:
        chunk: model chunk of that rank.
        names: the local names in it, in order.
        places: the result of ``ModelChunk.places`` for them.
    """

    chunk: ModelChunk
    names: list[str]
    places: dict[str, tuple[int, int]]


def merge_ranks(
    catalog: Catalog,
    ranks: Mapping[Coords, tuple[str, object]],
    facts: ModelFacts,
    rules: Rules,
    *,
    report: Report = raising,
) -> RankModel:
    """Merge the model chunks of all ranks under global names.

    Args:
        ranks: coordinates → (directory, content of its file).
        report: takes the problems (rules ``layout.ranks``, ``.chunks``, ``.names``, ``.layers``,
            ``.entries``) and skips what they affect; by default they are raised.

    Raises:
        MissingShardError, CorruptError, UnknownTensorError, UnsupportedError: a problem, if
            ``report`` raises.
    """
    topology = facts.topology
    stages = facts.stages(topology.pp, topology.vpp)
    files = {topology.rank_at(coords): file for coords, file in ranks.items()}

    # Megatron-core before 0.19 saved no file for a rank whose experts another rank also held, and
    # that rank's shards of the other tensors with it.
    missing = sorted(set(range(topology.tp)) - {rank.tp for rank in files})
    if missing:
        error = MissingShardError(
            f"no file contains the shards of TP ranks {list_some(missing)}, because megatron-core "
            f"before 0.19 did not save every rank of {topology}",
            hint="save the checkpoint again with a newer Megatron-LM, or as torch_dist",
        )
        report(error.breaking("layout.ranks"))

    model = RankModel()
    for vp_rank in range(topology.vpp):
        heads: dict[int, _StageHead] = {}
        for rank, (folder, root) in files.items():
            try:
                container = find_chunk(root, vp_rank, vpp=topology.vpp, rank=folder)
                flat = without_outer_names(flattened(container, rank=folder), rules)
            except CheckpointingException as err:
                report(err.breaking("layout.chunks"))
                continue
            model.nesting |= flat.nesting
            model.outer = model.outer or flat.outer
            model.wrapper = model.wrapper or flat.wrapper

            # Only the first rank of a stage is checked in full; the others repeat its names.
            chunk = ModelChunk(folder, rank, (vp_rank, rank.pp), stages, facts, rules)
            names = list(flat.entries)
            if rank.pp not in heads:
                heads[rank.pp] = _StageHead(chunk, names, chunk.places(names))
                _check_layers(names, chunk, report)
                _check_places(names, chunk, report)
            head = heads[rank.pp]
            chunk = replace(chunk, known=head.chunk.known)
            places = head.places
            if names != head.names:
                _check_names(names, head.names, report, rank=folder, other=head.chunk.folder)
                places = chunk.places(names)

            _add_chunk(model, catalog, chunk, root, flat, places=places, report=report)

    # Complete the model with what its files need not have, but other layouts' files do.
    if model.expert_names == "grouped":
        _add_expert_states(model, rules)
    if facts.kind.is_legacy and facts.is_tied:
        # The dict of the embedding's copy in the last stage is like that of the original. A single
        # pipeline stage has no such copy, but the destination may.
        embedding, copy = (
            name.rpartition(".")[0] for name in (facts.kind.embedding, facts.kind.head)
        )
        model.nesting.setdefault(copy, model.nesting.get(embedding, True))
        if embedding in model.versions and copy not in model.versions:
            model.versions[copy] = model.versions[embedding]
            model.module_order[copy] = max(model.module_order.values())
    return model


def with_v_shape(
    facts: ModelFacts, ranks: Mapping[Coords, tuple[str, object]], rules: Rules
) -> ModelFacts:
    """Return the facts with a V-shaped pipeline if the place of the model's end shows it.

    In a V-shaped pipeline of two chunks a stage, the final norm and the output layer are in the
    second chunk of the first stage, not of the last. Some forks have no argument for it.

    Args:
        ranks: coordinates → (directory, content of its file).
    """
    topology = facts.topology
    pipeline = facts.pipeline
    if pipeline.is_v_shaped or pipeline.layout or topology.pp == 1 or topology.vpp != 2:
        return facts
    stages: set[int] = set()
    for coords, (folder, root) in ranks.items():
        pp = topology.rank_at(coords).pp
        container = (as_mapping(root) or {}).get("model1")
        if pp not in stages and as_mapping(container) is not None:
            names = without_outer_names(flattened(container, rank=folder), rules).entries
            if any(
                rules.layer_of(name) is None and rules.stage_of(name) == "last" for name in names
            ):
                stages.add(pp)
    if stages != {0}:
        return facts
    return replace(facts, pipeline=replace(pipeline, is_v_shaped=True))


def _add_chunk(
    model: RankModel,
    catalog: Catalog,
    chunk: ModelChunk,
    root: object,
    flat: FlatDict,
    *,
    places: Mapping[str, tuple[int, int]],
    report: Report,
) -> None:
    """Add one model chunk of a rank's file to the model.

    Args:
        root: content of the rank's file.
        flat: state dict of the chunk.
        places: the result of ``ModelChunk.places`` for its names.
        report: takes the problems of single entries, which are skipped.
    """
    # Append the chunk's parameters to those of the rank's file; several chunks share a file.
    params = [
        Param(chunk, name, stored_array(catalog, leaf.key))
        for name, leaf in flat.entries.items()
        if isinstance(leaf, TensorLeaf)
    ]
    file = model.files.get(chunk.rank)
    previous = () if file is None else file.params
    model.files[chunk.rank] = RankFile(
        chunk.rank, chunk.folder, as_mapping(root) or {}, (*previous, *params)
    )

    for name, leaf in flat.entries.items():
        try:
            _add_entry(model, catalog, chunk, name, leaf, place=places[name])
        except CheckpointingException as err:
            report(err.breaking("layout.entries"))

    # A module's name, followed by a dot, is renumbered like a tensor's.
    module_places = chunk.places([module + "." for module in flat.versions])
    for module, version in flat.versions.items():
        place = module_places[module + "."]
        for number, global_name in chunk.global_names(module + "."):
            global_module = global_name[:-1]
            model.versions.setdefault(global_module, version)
            where = _position_in_order(model, chunk, global_name)
            model.module_order.setdefault(global_module, (where, place[0], number, place[1]))


def _add_entry(
    model: RankModel,
    catalog: Catalog,
    chunk: ModelChunk,
    name: str,
    leaf: object,
    *,
    place: tuple[int, int],
) -> None:
    """Add one entry of a rank's state dict to the model.

    Args:
        place: position of the entry, as returned by ``ModelChunk.places``.

    Raises:
        CorruptError: experts are named in two ways, or are not as many as the arguments require.
        MissingShardError: a copy of tied embeddings has no original.
        UnknownTensorError: no rule matches the name.
        UnsupportedError: the rule marks the entry as not supported yet, or the entry is neither a
            tensor nor an extra state.
    """
    # Check that one model names all its experts in one way; rank files are written in that way.
    expert = chunk.rules.expert_of(name)
    if expert is not None and expert.names != model.expert_names:
        if model.expert_names is not None:
            raise CorruptError(
                f"the experts are stored in two forms, {model.expert_names} and {expert.names}",
                key=name,
                rank=chunk.folder,
            )
        model.expert_names = expert.names
    if not isinstance(leaf, TensorLeaf):
        _add_state(model, chunk, name, leaf, place=place)
        return

    # A copy of tied embeddings, in the last stage, is another replica of the original; nothing
    # comes from an output layer that is not used.
    for number, global_name, array in chunk.arrays(name, stored_array(catalog, leaf.key)):
        tensor = model.tensors.get(global_name)
        rule = tensor.rule if tensor else _rule_of(global_name, catalog, leaf.key, chunk)
        if rule.tied is not None and chunk.facts.is_tied:
            if chunk.facts.has_unused_head(chunk.facts.topology):
                model.unused.append(array)
                continue
            tensor = model.tensors.get(rule.tied)
            if tensor is None:
                raise MissingShardError(
                    f"this tensor is missing, although its copy {name} exists",
                    key=rule.tied,
                    rank=chunk.folder,
                )
        if tensor is None:
            tensor = model.tensors[global_name] = RankTensor(rule)
            where = _position_in_order(model, chunk, global_name)
            model.order[global_name] = (where, place[0], number, place[1])
        tensor.parts.append(RankPart(chunk.rank, chunk.folder, array))


def _add_state(
    model: RankModel, chunk: ModelChunk, name: str, leaf: object, *, place: tuple[int, int]
) -> None:
    """Add an entry that is not a tensor to the model's extra states.

    Raises:
        UnsupportedError: the entry is not an extra state.
    """
    rule = chunk.rules.rule_of(name)
    if rule.kind != "opaque":
        class_name = _class_of(leaf)
        raise UnsupportedError(
            f"this entry is a {class_name}, not a plain tensor",
            key=name,
            rank=chunk.folder,
            hint="convert FP8 tensors to plain tensors with --dequantize bf16"
            if class_name.endswith(".Float8Tensor")
            else "save the model again without quantized or other special parameters",
        )

    # Keep every distinct value: ranks may disagree, which is decided when the model is complete.
    is_packed = chunk.rules.is_packed_state(name)
    for number, global_name in (
        [(0, chunk.layer_name(name))] if is_packed else chunk.global_names(name)
    ):
        values = model.extra_states.setdefault(global_name, [leaf])
        if not are_same(values[0], leaf):
            values.append(leaf)
        where = _position_in_order(model, chunk, global_name)
        model.order.setdefault(global_name, (where, place[0], number, place[1]))


def _position_in_order(model: RankModel, chunk: ModelChunk, name: str) -> int:
    """Return the position of a chunk by which its entry is ordered.

    A tower is in the first stage, but comes after all layers of the GPT model.
    """
    if model.wrapper is not None and name.startswith(model.wrapper.towers):
        return chunk.stages.vpp * chunk.stages.pp
    return chunk.position


def _class_of(leaf: object) -> str:
    """Return the name of the class of a pickled object."""
    if not isinstance(leaf, Inert):
        return type(leaf).__name__
    # A tensor subclass is pickled as a call: of a method of its class, or of a function with the
    # class as an argument. Element types are arguments, too.
    name = str(leaf.fn)
    if isinstance(leaf.fn, Global) and "." in leaf.fn.name:
        return name.rpartition(".")[0]
    classes = [
        str(part) for part in leaf.args if isinstance(part, Global) and part.module != "torch"
    ]
    return classes[-1] if classes else name


def _add_expert_states(model: RankModel, rules: Rules) -> None:
    """Add empty extra states for legacy grouped experts if the other modules have them.

    GroupedMLP saves none, but the experts' modules in other layouts do.
    """
    if not any(values[0] is None for values in model.extra_states.values()):
        return
    for name in model.tensors:
        expert = rules.expert_of(name)
        if expert is not None:
            state = f"{name.rpartition('.')[0]}.{EXTRA_STATE}"
            model.extra_states[state] = [None]
            model.order[state] = (*model.order[name], 1)


def _rule_of(name: str, catalog: Catalog, key: str, chunk: ModelChunk) -> Rule:
    """Return the rule of a tensor.

    Args:
        key: key of the stored tensor, ``<rank dir>:<path in the file>``.

    Raises:
        UnknownTensorError: no rule matches; the hint proposes one, from the shapes on all ranks.
        UnsupportedError: the rule marks the tensor as not supported yet.
    """
    rules, facts = chunk.rules, chunk.facts
    try:
        return rules.rule_of(name)
    except UnknownTensorError:
        # Only now collect the shapes: going through all ranks for every name would be slow.
        path = key.partition(":")[2]
        shapes = [
            tensor.shape
            for other, tensor in catalog.tensors.items()
            if other.partition(":")[2] == path
        ]
        return rules.rule_of(
            name, shapes=shapes, hidden_size=facts.hidden_size, tp=facts.topology.tp
        )


def _check_layers(names: Sequence[str], chunk: ModelChunk, report: Report) -> None:
    """Report layers that a chunk lacks, and layers beyond the number of its stage."""
    stages, rules = chunk.stages, chunk.rules
    layers_of: dict[str, set[int]] = {stack: set() for stack in rules.stacks}
    for name in names:
        layer = rules.layer_of(name)
        if layer is not None:
            layers_of[layer.stack].add(layer.number)
    for stack, layers in layers_of.items():
        count, offset = stages.count(stack, *chunk.where), stages.offset(stack, *chunk.where)
        n_layers = n_text(count, "layer")
        empty = {number - offset for number in chunk.facts.empty_layers(stack)}
        missing = sorted(set(range(count)) - layers - empty)
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            problem = (
                f"this stage should have {n_layers}, but {_name_layers(missing)} {verb} missing"
            )
            report(MissingShardError(problem, rank=chunk.folder, rule="layout.layers"))
        extra = sorted(layers - set(range(count)))
        if extra:
            problem = f"this stage should have {n_layers}, but also has {_name_layers(extra)}"
            report(CorruptError(problem, rank=chunk.folder, rule="layout.layers"))


def _name_layers(numbers: Sequence[int]) -> str:
    return f"layer{'' if len(numbers) == 1 else 's'} {list_some(numbers)}"


def _check_places(names: Sequence[str], chunk: ModelChunk, report: Report) -> None:
    """Report the first tensor that belongs to another chunk than the one that has it.

    The embedding is in the first chunk, the final norm and the output layer are in the last.
    """
    stages, has_predictions = chunk.stages, chunk.facts.n_predictions > 0
    for name in names:
        place = None if chunk.rules.layer_of(name) else chunk.rules.stage_of(name)
        if place is None:
            continue
        # The norm follows the last layer; multi-token prediction has copies.
        places = {stages.chunk_at(place)}
        if name.startswith(FINAL_NORM):
            places.add(stages.chunk_at("last_layer"))
        if has_predictions:
            places.add(stages.chunk_at("mtp"))
        if chunk.where not in places:
            expected = describe_chunk(*stages.chunk_at(place), vpp=stages.vpp)
            actual = describe_chunk(*chunk.where, vpp=stages.vpp)
            error = CorruptError(
                f"the tensor is in {actual}, but according to the arguments, it belongs to "
                f"{expected}, because it is in the {place} part of the model",
                key=name,
                rank=chunk.folder,
                hint="the directories of the pipeline stages may have been swapped; if so, rename "
                f"them so that the file with this tensor belongs to {expected}",
                rule="layout.places",
            )
            report(error)
            return


def describe_chunk(vp: int, pp: int, *, vpp: int) -> str:
    """Return a model chunk in words."""
    return f"pipeline stage {pp}" if vpp == 1 else f"chunk {vp} of pipeline stage {pp}"


def _check_names(
    names: Sequence[str], other_names: Sequence[str], report: Report, *, rank: str, other: str
) -> None:
    """Report names that only one of two ranks of a stage has.

    Names are local, so expert parallel ranks have the same ones.

    Args:
        rank, other: the ranks' directories.
    """
    missing, extra = sorted(set(other_names) - set(names)), sorted(set(names) - set(other_names))
    for absent, holder, lacking in ((missing, other, rank), (extra, rank, other)):
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            report(
                MissingShardError(
                    f"{list_some(absent)} {verb} in {holder}, but not here",
                    rank=lacking,
                    hint="copy the checkpoint again; rank directories may have been swapped",
                    rule="layout.names",
                )
            )
