"""Summarize a checkpoint for ``ckpt inspect``, as plain values; reads metadata only.

Megatron rank files are shown unsharded if their layout can be determined, otherwise rank by rank
with the reason. Their optimizer entries, which have no global names, are always listed under their
rank directories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.engine.catalog.attributes import collect_attributes
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import RankFacts, TorchDistFacts, TorchShardedFacts
from core.engine.catalog.optimizer_keys import LIGHTNING_VERSION, is_optimizer_key, split_state_key
from core.engine.catalog.tensor import Tensor
from core.engine.quantize.schemes import quantized_weights
from core.errors import CheckpointingException, StorageError
from core.files.store import list_files_below
from core.megatron.optimizer.form import NUMBERED, TITLES, optim_format_of, role_of
from core.opening.code_in_pickles import warn_of_pickles
from core.opening.iterations import list_other_iterations
from core.opening.objects import load_attributes, loaded
from core.opening.source_files import config_of_source
from core.pickle.inert import Global, attributes
from core.pickle.noted import gc_paused
from core.values import Brief, bytes_text, count_text, dataclass, list_facts, n_text, shown_briefly
from core.verbs.inspect.capability import (
    Capability,
    ModelTraits,
    list_dense_capabilities,
    list_plain_capabilities,
)
from core.verbs.inspect.model_description import ModelDescription, describe_model
from core.verbs.inspect.tree import components

if TYPE_CHECKING:
    from core.engine.catalog.attributes import AttributesByPath
    from core.opening.listing import Listing
    from core.opening.open import Checkpoint

SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
_ARG_OF_SIZE = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}
_MODEL_ARGS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "swiglu", "normalization", "position_embedding_type", "max_position_embeddings",
    "seq_length", "num_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "untie_embeddings_and_output_weights", "vocab_size",
    "padded_vocab_size", "make_vocab_size_divisible_by", "params_dtype",
    "use_distributed_optimizer", "transformer_impl",
)  # fmt: skip
ROLES = ("model", "moments", "masters", "other")
_MOST_NAMED = 100_000
"""Maximum number of optimizer entries of ranks that are named: more would take seconds."""
ROLE_TITLES = {"moments": "optimizer moments", "masters": "master weights"}
"""The roles whose name for users is another."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Totals of the tensors with one purpose.

    Args:
        name: one of ``ROLES``.
        n_tensors, n_elements, n_bytes: totals; a tensor counts once, in a rank view once per rank.
        dtypes: dtype → bytes, the largest first.
    """

    name: str
    n_tensors: int
    n_elements: int
    n_bytes: int
    dtypes: Mapping[str, int]


@shown_briefly
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary of a checkpoint.

    Args:
        path: path of the checkpoint, which may be below the path that the user gave.
        format, title, version: name of the format, its title for users, version of the format.
        iteration: training iteration; None if unknown.
        n_files, file_bytes: number and total size of the regular files of the checkpoint.
        parallel: recorded parallel sizes by name (``tp``, ``pp`` …).
        n_ranks: number of ranks that wrote files; None if the file names do not show it.
        model: training arguments that describe the model.
        description: the model's family, sizes and number of parameters.
        groups: totals of the tensors by purpose.
        optimizer: name in ``core.megatron.optimizer.form``; None without an optimizer.
        capabilities: possible and impossible conversions; () if the checkpoint is too large to try.
        notes: notes for the user.
        view: the catalog whose tensors are shown.
        is_unsharded: the view is global although the files are rank-local.
        n_objects: number of entries that are not tensors.
        n_unopened: number of files that were not opened because they resemble others.
        attributes: path of a container or key of a tensor → what the checkpoint says about it
            (``core.engine.catalog.attributes``), also in entries of a state dict.
        iterations: those of the training root from which the checkpoint was reached, if it has
            several; else None.
    """

    path: str
    format: str
    title: str
    version: str | None
    iteration: int | None
    n_files: int
    file_bytes: int
    parallel: Mapping[str, int]
    n_ranks: int | None
    model: Mapping[str, object]
    description: ModelDescription
    groups: tuple[TensorGroup, ...]
    optimizer: str | None
    capabilities: tuple[Capability, ...]
    notes: tuple[str, ...]
    view: Catalog = field(repr=False)
    is_unsharded: bool = False
    n_objects: int = 0
    n_unopened: int = 0
    attributes: AttributesByPath = field(default_factory=dict)
    iterations: Listing | None = None

    @property
    def total(self) -> TensorGroup:
        """The totals of all groups."""
        return TensorGroup(
            "total",
            sum(group.n_tensors for group in self.groups),
            sum(group.n_elements for group in self.groups),
            sum(group.n_bytes for group in self.groups),
            {},
        )

    @property
    def optimizer_title(self) -> str | None:
        """Description of the optimizer's form; None without an optimizer."""
        return None if self.optimizer is None else TITLES[self.optimizer]

    def brief(self) -> Brief:
        """Return what is shown of the summary."""
        model = self.description
        facts = [("format", self.title)]
        if self.iteration is not None:
            facts.append(("iteration", str(self.iteration)))
        if self.parallel:
            sizes = " · ".join(f"{name.upper()} {size}" for name, size in self.parallel.items())
            facts.append(("parallel", sizes))
        if model.n_parameters is not None:
            family = f" ({model.family})" if model.family else ""
            facts.append(("parameters", f"{count_text(model.n_parameters)}{family}"))
        for group in self.groups:
            size = f"{n_text(group.n_tensors, 'tensor')}, {bytes_text(group.n_bytes)}"
            dtypes = ", ".join(group.dtypes)
            facts.append((ROLE_TITLES.get(group.name, group.name), f"{size}, {dtypes}"))
        facts.append(("files", f"{n_text(self.n_files, 'file')}, {bytes_text(self.file_bytes)}"))
        possible = [
            f"{item.action} to {', '.join(item.targets)}" if item.targets else item.action
            for item in self.capabilities
            if item.is_possible
        ]
        facts += [*list_facts("can", possible), *list_facts("note", self.notes)]
        return Brief(f"{self.format} checkpoint {self.path}", facts)


@gc_paused()
def global_view_of(checkpoint: Checkpoint) -> Catalog:
    """Return the catalog that ``Summary.view`` is, without the rest of the summary."""
    return _global_view(_unshard(checkpoint).catalog, checkpoint)


@gc_paused()
def summarize(checkpoint: Checkpoint, *, with_capabilities: bool = True) -> Summary:
    """Build the summary that ``ckpt inspect`` shows.

    Args:
        with_capabilities: find out which conversions are possible, which takes seconds for 10⁵
            tensors; otherwise ``capabilities`` is empty.

    Raises:
        CheckpointingException: an object or an entry of the metadata cannot be read.
    """
    # Convert the model to its global form if the layout can be determined.
    catalog = checkpoint.catalog
    unsharded = _unshard(checkpoint)
    view = _global_view(unsharded.catalog, checkpoint)
    # Count files and ranks, and recognise the optimizer by the keys without their ranks.
    n_files, file_bytes, n_writers = _count_files(checkpoint)
    ranks = catalog.facet(RankFacts)
    bare = dict.fromkeys(bare_key(key, catalog) for key in catalog.tensors)
    bare_objects = dict.fromkeys(bare_key(key, catalog) for key in catalog.objects)
    optimizer = optim_format_of(bare, bare_objects, has_flattened=_has_flattened_states(catalog))

    # Collect the notes.
    notes = [*checkpoint.notes]
    if catalog.is_rank_local and unsharded.catalog is None:
        notes.append("shown rank by rank, so data that several ranks have is counted several times")
    notes += catalog.notes
    n_unopened = 0 if ranks is None else ranks.n_unopened
    if n_unopened:
        notes.append(
            f"opened {n_files - n_unopened:,} of {n_files:,} files (one per pipeline stage and"
            " file size); --all opens them all"
        )
    notes += warn_of_pickles(checkpoint.store, catalog, checkpoint.uses)

    # Plan the conversions to find out which are possible; nothing converts a damaged checkpoint.
    capabilities: tuple[Capability, ...] | None = ()
    if checkpoint.problems:
        capabilities = (Capability("convert", False, why="the checkpoint is damaged"),)
    elif with_capabilities:
        traits = ModelTraits(
            layout_refusal=unsharded.why,
            is_hf=unsharded.is_hf,
            has_optimizer=optimizer is not None,
            has_scales=unsharded.has_scales,
            is_undescribed=unsharded.is_undescribed,
        )
        capabilities = list_plain_capabilities(checkpoint, traits)
        if capabilities is None and unsharded.catalog is not None:
            capabilities = list_dense_capabilities(checkpoint, traits, unsharded.catalog)
        if capabilities is None:
            from core.verbs.inspect.capabilities import capabilities_of

            capabilities = capabilities_of(checkpoint, traits)
    if capabilities is None:
        notes.append(
            "the checkpoint is too large to check which conversions are possible; to check one, "
            "run ckpt convert SRC DST --dry-run"
        )
    return Summary(
        path=str(checkpoint.path),
        format=checkpoint.format.name,
        title=checkpoint.format.title,
        version=catalog.version,
        iteration=checkpoint.iteration,
        n_files=n_files,
        file_bytes=file_bytes,
        parallel=parallel_sizes(catalog),
        n_ranks=_n_ranks(catalog, n_writers),
        model=_model_facts(catalog),
        description=describe_model(
            view,
            args=attributes(catalog.args) or {},
            config=unsharded.config,
            unsharded=unsharded.catalog,
        ),
        groups=total_by_role(view.tensors, bare=lambda key: bare_key(key, view)),
        optimizer=optimizer,
        capabilities=capabilities or (),
        notes=tuple(dict.fromkeys(notes)),
        view=view,
        is_unsharded=unsharded.catalog is not None and catalog.is_rank_local,
        n_objects=len(catalog.objects),
        n_unopened=n_unopened,
        attributes=_load_attributes(checkpoint),
        iterations=_list_iterations(checkpoint),
    )


def _list_iterations(checkpoint: Checkpoint) -> Listing | None:
    """Return the iterations beside a checkpoint, and its own; None unless there are several."""
    if not list_other_iterations(checkpoint.passed, checkpoint.path):
        return None
    from core.opening.listing import list_iterations

    # A directory beside the checkpoint that cannot be read is none of its problems.
    with suppress(StorageError):
        return list_iterations(checkpoint.passed)
    return None


def _load_attributes(checkpoint: Checkpoint) -> AttributesByPath:
    """Return the attributes of a checkpoint by path; ``ckpt validate`` reports damaged ones."""
    catalog = checkpoint.catalog
    with suppress(CheckpointingException):
        catalog = load_attributes(catalog, checkpoint.store)
    return collect_attributes(catalog)


def total_by_role(
    tensors: Mapping[str, Tensor], *, bare: Callable[[str], str] = str
) -> tuple[TensorGroup, ...]:
    """Return the totals of tensors by purpose, without empty groups.

    Args:
        bare: returns a key without its rank directory.
    """
    members: dict[str, list[Tensor]] = {name: [] for name in ROLES}
    for key, tensor in tensors.items():
        members[role_of(bare(key))].append(tensor)
    groups = []
    for name, metas in members.items():
        if not metas:
            continue
        dtypes: dict[str, int] = {}
        n_elements = 0
        for tensor in metas:
            n_elements += tensor.n_elements
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.n_bytes
        by_size = dict(sorted(dtypes.items(), key=lambda item: -item[1]))
        groups.append(TensorGroup(name, len(metas), n_elements, sum(dtypes.values()), by_size))
    return tuple(groups)


def path_of(key: str, view: Catalog) -> list[str]:
    """Return the names on a key's path in the tree; a rank directory is a separate name."""
    rank, name = _split_rank(key, view)
    return components(name) if rank is None else [rank, *components(name)]


def _split_rank(key: str, catalog: Catalog) -> tuple[str | None, str]:
    """Split a key into its rank directory (None if it has none) and the name behind it."""
    # The colon first: asking for facets takes longer, and is asked of 10⁵ keys several times.
    rank, colon, name = key.partition(":")
    if not colon or "." in rank:
        return None, key
    if catalog.is_rank_local or catalog.facet(_RankKeys) is not None:
        return rank, name
    return None, key


def bare_key(key: str, catalog: Catalog) -> str:
    """Return a key without its rank directory."""
    return _split_rank(key, catalog)[1]


@dataclass(frozen=True, slots=True)
class _Unsharded:
    """The result of unsharding a checkpoint.

    Args:
        catalog: the global form; None if there is none.
        why: the reason why there is no parallel layout to change; None if there is one.
        has_scales: weights have scales, which were applied.
        is_hf: the source has Hugging Face's names.
        config: parsed ``config.json`` of the source; None if there is none.
        is_undescribed: the source has neither training arguments nor a ``config.json``.
    """

    catalog: Catalog | None
    why: str | None
    has_scales: bool = False
    is_hf: bool = False
    config: Mapping[str, object] | None = None
    is_undescribed: bool = False


def _unshard(checkpoint: Checkpoint) -> _Unsharded:
    """Convert a checkpoint with Megatron's or Hugging Face's names to global per-layer form."""
    catalog, store = checkpoint.catalog, checkpoint.store
    try:
        config = config_of_source(checkpoint)
    except CheckpointingException as err:
        return _Unsharded(None, err.sentence)
    if config is not None:
        from core.hf.names import is_hf

        if is_hf(catalog, config):
            return replace(_unshard_hf(catalog, config), config=config)
    # Megatron's layout follows from the training arguments, which torch_dist stores in an object.
    try:
        if not catalog.is_rank_local and catalog.args is None:
            if "args" not in catalog.objects:
                options = None
                # Weights alone are not wrapped.
                if LIGHTNING_VERSION in catalog.objects or any(
                    map(is_optimizer_key, catalog.tensors)
                ):
                    from core.engine.catalog.wrapped_model import model_options

                    options = model_options(catalog, takes_submodule=True)
                naming = "pass one with --config FILE"
                if options is not None:
                    naming = f"for the model alone: {options} --config FILE"
                return _Unsharded(
                    None,
                    f"neither Megatron training arguments nor a config.json ({naming})",
                    config=config,
                    is_undescribed=config is None,
                )
            catalog = loaded(catalog, store)
        from core.megatron.reshard.unshard import unshard
        from core.megatron.rules.tables import load_rules

        return _Unsharded(
            unshard(catalog, rules=load_rules(), optim="drop", keep_padded_vocab=True), None
        )
    except CheckpointingException as err:
        refusal = err.sentence
    # Float8 weights of Transformer Engine have a layout once they are dequantized.
    from core.megatron.extras.float8_weights import dequantize_rank_weights
    from core.megatron.reshard.unshard import unshard
    from core.megatron.rules.tables import load_rules

    try:
        dequantized = dequantize_rank_weights(catalog, "bfloat16")
        if dequantized.n:
            unshard(dequantized.catalog, rules=load_rules(), optim="drop", keep_padded_vocab=True)
            return _Unsharded(None, None, has_scales=True)
    except CheckpointingException:
        pass
    return _Unsharded(None, refusal)


def _unshard_hf(catalog: Catalog, config: Mapping[str, object]) -> _Unsharded:
    """Convert a model with Hugging Face's names to Megatron's global form, with scales applied."""
    from core.engine.changes.select import without_optimizer
    from core.hf.to_megatron import to_megatron

    # Neither Megatron's global form nor Hugging Face's can hold the optimizer.
    catalog = without_optimizer(catalog).catalog
    has_scales = bool(quantized_weights(catalog.tensors, config))
    try:
        if has_scales:
            from core.verbs.convert.apply_changes import apply_changes
            from core.verbs.convert.job import Job

            catalog = apply_changes(
                catalog, Job(src=Path(), dequantize="bfloat16"), config=config
            ).catalog
        return _Unsharded(to_megatron(catalog, config), None, has_scales, is_hf=True)
    except CheckpointingException as err:
        return _Unsharded(None, err.sentence, has_scales, is_hf=True)


@dataclass(frozen=True, slots=True)
class _RankKeys:
    """The facet of a global view some of whose keys still begin with rank directories."""


def _global_view(unsharded: Catalog | None, checkpoint: Checkpoint) -> Catalog:
    """Return the catalog to show: the global model, then the optimizer.

    Numbered states have the names of their parameters where these are proven, as in a conversion;
    other entries of the optimizer are those of the ranks.

    Args:
        unsharded: the global form of the model; None if there is none.
    """
    ranks = checkpoint.catalog
    if unsharded is None or not ranks.is_rank_local:
        return ranks
    local = {
        key: tensor
        for key, tensor in ranks.tensors.items()
        if role_of(bare_key(key, ranks)) in ("moments", "masters")
    }
    states = _named_states(checkpoint, local)
    return replace(
        unsharded,
        tensors={**unsharded.tensors, **(states or local)},
        objects=ranks.objects,
    ).with_facet(_RankKeys())


def _named_states(checkpoint: Checkpoint, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states of a numbered optimizer by the names of their parameters.

    Args:
        local: the entries of the optimizer in the files of the ranks.

    Returns:
        State key → tensor; {} if the numbers are not proven to belong to parameters, not all files
        were opened, or the optimizer is stored in another form.
    """
    catalog = checkpoint.catalog
    ranks = catalog.facet(RankFacts)
    form = optim_format_of(dict.fromkeys(bare_key(key, catalog) for key in local), {})
    if form != NUMBERED or checkpoint.problems or (ranks is not None and ranks.n_unopened):
        return {}
    if len(local) > _MOST_NAMED:
        return {}
    from core.megatron.reshard.unshard import unshard
    from core.megatron.rules.tables import load_rules

    try:
        carried = unshard(
            catalog, rules=load_rules(), keep_padded_vocab=True, store=checkpoint.store
        )
    except CheckpointingException:
        return {}
    return {
        key: tensor for key, tensor in carried.tensors.items() if split_state_key(key) is not None
    }


def _n_ranks(catalog: Catalog, n_writers: int | None) -> int | None:
    """Return the number of ranks that wrote the checkpoint, or None.

    Args:
        n_writers: number of ranks with files of DCP.
    """
    ranks, sharded = catalog.facet(RankFacts), catalog.facet(TorchShardedFacts)
    if sharded is not None:
        return len(sharded.ranks)
    return n_writers if ranks is None else len(ranks.ranks)


def _count_files(checkpoint: Checkpoint) -> tuple[int, int, int | None]:
    """Count the files, their bytes, and the ranks with ``.distcp`` files (None without any)."""
    # Nested checkpoints are not part of this one.
    nested = tuple(f"{path}/" for path in checkpoint.below)
    sizes = {
        name: size
        for name, size in list_files_below(checkpoint.store).items()
        if not f"{name}/".startswith(nested)
    }
    matches = (re.fullmatch(r"(?:.*/)?__(\d+)_\d+\.distcp", name) for name in sizes)
    writers = {match[1] for match in matches if match}
    return len(sizes), sum(sizes.values()), len(writers) or None


def parallel_sizes(catalog: Catalog) -> dict[str, int]:
    """Return the parallel sizes by name, from the layout or else from the training arguments."""
    topology: object = None
    if catalog.facets:
        from core.megatron.model.topology import Topology

        topology = catalog.facet(Topology)
    args = attributes(catalog.args) or {}
    sizes = {}
    for name in SIZES:
        size = getattr(topology, name, None)
        if not isinstance(size, int):
            size = args.get(_ARG_OF_SIZE[name])
        if isinstance(size, int) and not isinstance(size, bool):
            sizes[name] = size
    return sizes


def _model_facts(catalog: Catalog) -> dict[str, object]:
    """Return the training arguments that describe the model; enums and dtypes by name."""
    args = attributes(catalog.args) or {}
    facts = {name: args[name] for name in _MODEL_ARGS if args.get(name) is not None}
    return {
        name: value
        if isinstance(value, (bool, int, float, str))
        else str(value).removeprefix("torch.")
        for name, value in facts.items()
        if isinstance(value, (bool, int, float, str, Global))
    }


def _has_flattened_states(catalog: Catalog) -> bool:
    """Return whether torch_dist's metadata records flattened optimizer states."""
    facts = catalog.facet(TorchDistFacts)
    data = {} if facts is None or facts.mcore_data is None else facts.mcore_data
    return any(
        isinstance(item, Mapping) and "nd_reformulated_orig_global_shape" in item
        for item in data.values()
    )
