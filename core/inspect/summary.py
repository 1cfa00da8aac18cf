"""Summarize a checkpoint as ``ckpt inspect`` shows it, as plain values; reads metadata only.

A rank catalog (Megatron rank files) is shown unsharded where its layout is understood, otherwise
rank by rank with the reason; its optimizer entries, which have no global names, are listed under
their rank directories either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.facets import RankFacts, TorchDistFacts
from core.changes.select import without_optimizer
from core.convert.job import Job
from core.errors import CheckpointingException
from core.files.store import list_files_below
from core.formats.torch.format import load_object
from core.formats.torch.other_pickles import PickledContent
from core.inspect.capabilities import Capability, ModelTraits, capabilities_of
from core.inspect.tree import components
from core.megatron.model.topology import Topology
from core.megatron.optimizer.form import TITLES, optim_format_of, role_of
from core.opening.objects import loaded
from core.opening.source_files import config_of_source
from core.pickle.inert import Global, attributes
from core.pickle.reader import gc_paused
from core.quantize.schemes import quantized_weights

if TYPE_CHECKING:
    from core.opening.open import Checkpoint
    from core.pickle.uses import Use

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
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "swiglu",
    "normalization", "position_embedding_type", "max_position_embeddings", "seq_length", "num_experts",
    "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by",
    "params_dtype", "use_distributed_optimizer", "transformer_impl",
)  # fmt: skip
ROLES = ("model", "moments", "masters", "other")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Totals of the tensors with one purpose.

    Args:
        name: one of ``ROLES``.
        n_tensors, n_elements, n_bytes: every tensor counted once (in a rank view: once per rank).
        dtypes: dtype → bytes, the largest first.
    """

    name: str
    n_tensors: int
    n_elements: int
    n_bytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary of a checkpoint.

    Args:
        path: path of the checkpoint, after descending from a root.
        format, title, version: name of the format, its title for people, the format's own version.
        iteration: training iteration, or None.
        n_files, file_bytes: regular files of the checkpoint and their bytes on disk.
        parallel: sizes by name (``tp``, ``pp`` …), for checkpoints that record them; {} otherwise.
        n_ranks: how many ranks wrote files, where the file names show it; else None.
        model: facts from the training arguments.
        groups: totals of the tensors by purpose.
        optimizer: name in ``core.megatron.optimizer.form``, or None.
        capabilities: what can be done with the checkpoint; () if that was not tried.
        notes: what the user should know.
        view: the catalog whose tensors are shown.
        is_unsharded: the view is global although the files are rank-local.
        n_objects: entries that are not tensors.
        n_unopened: files that look like others and were not opened.
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
    groups: tuple[TensorGroup, ...]
    optimizer: str | None
    capabilities: tuple[Capability, ...]
    notes: tuple[str, ...]
    view: Catalog = field(repr=False)
    is_unsharded: bool = False
    n_objects: int = 0
    n_unopened: int = 0

    @property
    def total(self) -> TensorGroup:
        """Return the totals of all groups."""
        return TensorGroup(
            "total",
            sum(group.n_tensors for group in self.groups),
            sum(group.n_elements for group in self.groups),
            sum(group.n_bytes for group in self.groups),
            {},
        )

    @property
    def optimizer_title(self) -> str | None:
        """Return the optimizer's form in words, or None."""
        return None if self.optimizer is None else TITLES[self.optimizer]


@gc_paused()
def summarize(checkpoint: Checkpoint) -> Summary:
    """Return everything that ``ckpt inspect`` shows, except for single tensors."""
    # Bring the model into its global form where the layout is understood.
    catalog = checkpoint.catalog
    unsharded = _unsharded(checkpoint)
    view = catalog if unsharded.catalog is None else _merged(unsharded.catalog, catalog)
    n_files, file_bytes, n_writers = _files(checkpoint)
    ranks = catalog.facet(RankFacts)
    bare = dict.fromkeys(bare_key(key, catalog) for key in catalog.tensors)
    bare_objects = dict.fromkeys(bare_key(key, catalog) for key in catalog.objects)
    optimizer = optim_format_of(bare, bare_objects, has_flattened=_has_flattened(catalog))

    # Collect the notes.
    notes = [*checkpoint.notes]
    if catalog.is_rank_local and unsharded.catalog is None:
        notes.append("shown rank by rank: data that several ranks hold is counted several times")
    notes += catalog.notes
    n_unopened = 0 if ranks is None else ranks.n_unopened
    if n_unopened:
        notes.append(
            f"opened {n_files - n_unopened:,} of {n_files:,} files, one per pipeline stage and length; --all opens all"
        )
    notes += _warnings(checkpoint)

    # Find out what can be done.
    capabilities = capabilities_of(
        checkpoint,
        ModelTraits(
            layout_refusal=None
            if unsharded.catalog is not None
            else unsharded.why or "the layout is not known",
            is_hf=unsharded.is_hf,
            has_optimizer=optimizer is not None,
            has_scales=unsharded.has_scales,
        ),
    )
    if capabilities is None:
        notes.append(
            "too large to try what can be done with it; use convert --dry-run and reshard --dry-run to find out"
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
        n_ranks=n_writers if ranks is None else len(ranks.ranks),
        model=_model(catalog),
        groups=groups_of(view.tensors.values(), bare=lambda key: bare_key(key, view)),
        optimizer=optimizer,
        capabilities=capabilities or (),
        notes=tuple(dict.fromkeys(notes)),
        view=view,
        is_unsharded=unsharded.catalog is not None and catalog.is_rank_local,
        n_objects=len(catalog.objects),
        n_unopened=n_unopened,
    )


def groups_of(
    tensors: Iterable[TensorMeta], *, bare: Callable[[str], str] = str
) -> tuple[TensorGroup, ...]:
    """Return the totals of tensors by purpose; groups without tensors are left out.

    Args:
        bare: returns a key without its rank directory.
    """
    members: dict[str, list[TensorMeta]] = {name: [] for name in ROLES}
    for meta in tensors:
        members[role_of(bare(meta.key))].append(meta)
    groups = []
    for name, metas in members.items():
        if not metas:
            continue
        dtypes: dict[str, int] = {}
        n_elements = 0
        for meta in metas:
            n_elements += meta.n_elements
            dtypes[meta.dtype] = dtypes.get(meta.dtype, 0) + meta.n_bytes
        by_size = dict(sorted(dtypes.items(), key=lambda item: -item[1]))
        groups.append(TensorGroup(name, len(metas), n_elements, sum(dtypes.values()), by_size))
    return tuple(groups)


def path_of(key: str, view: Catalog) -> list[str]:
    """Return the names on the way to a key in the tree; a rank directory is a name of its own."""
    rank, name = _split_rank(key, view)
    return components(name) if rank is None else [rank, *components(name)]


def _split_rank(key: str, catalog: Catalog) -> tuple[str | None, str]:
    """Return the rank directory of a key, or None, and the rest of the key."""
    if catalog.is_rank_local or catalog.facet(_RankKeys) is not None:
        rank, colon, name = key.partition(":")
        if colon and "." not in rank:
            return rank, name
    return None, key


def bare_key(key: str, catalog: Catalog) -> str:
    """Return a key without the rank directory before it."""
    return _split_rank(key, catalog)[1]


@dataclass(frozen=True, slots=True)
class _Unsharded:
    """The global form of a checkpoint with a known layout, or why there is none.

    Args:
        catalog: the global form, or None.
        why: the reason if there is none.
        has_scales: weights have scales, which were applied.
        is_hf: the source has Hugging Face's names.
    """

    catalog: Catalog | None
    why: str | None
    has_scales: bool = False
    is_hf: bool = False


def _unsharded(checkpoint: Checkpoint) -> _Unsharded:
    """Return the global per-layer form of a checkpoint with Megatron's or Hugging Face's names."""
    from core.hf import is_hf
    from core.megatron.reshard.reshard import load_rules, unshard

    catalog, store = checkpoint.catalog, checkpoint.store
    try:
        config = config_of_source(checkpoint)
    except CheckpointingException as err:
        return _Unsharded(None, err.sentence)
    if is_hf(catalog, config):
        assert config is not None
        return _of_hf(catalog, config)
    try:
        if not catalog.is_rank_local and catalog.args is None:
            if "args" not in catalog.objects:
                return _Unsharded(
                    None,
                    "only models with Megatron's or Hugging Face's names have a parallel layout",
                )
            catalog = loaded(catalog, store, load_object)
        return _Unsharded(
            unshard(catalog, rules=load_rules(), optim="drop", keep_padded_vocab=True), None
        )
    except CheckpointingException as err:
        return _Unsharded(None, err.sentence)


def _of_hf(catalog: Catalog, config: Mapping[str, object]) -> _Unsharded:
    """Return the global form of a model with Hugging Face's names, its scales applied."""
    from core.convert.apply_changes import apply_changes
    from core.hf import to_megatron

    catalog = without_optimizer(
        catalog
    ).catalog  # neither Megatron's form nor Hugging Face's can hold it
    has_scales = bool(quantized_weights(catalog.tensors, config))
    try:
        if has_scales:
            catalog = apply_changes(
                catalog, Job(src=Path(), dequantize="bfloat16"), config=config
            ).catalog
        return _Unsharded(to_megatron(catalog, config), None, has_scales, is_hf=True)
    except CheckpointingException as err:
        return _Unsharded(None, err.sentence, has_scales, is_hf=True)


@dataclass(frozen=True, slots=True)
class _RankKeys:
    """The facet of a global view whose optimizer keys still begin with rank directories."""


def _merged(unsharded: Catalog, ranks: Catalog) -> Catalog:
    """Return the global view of the model, followed by the entries that stay rank-local."""
    if not ranks.is_rank_local:
        return ranks
    local = {
        key: meta
        for key, meta in ranks.tensors.items()
        if role_of(bare_key(key, ranks)) in ("moments", "masters")
    }

    def fragments_of(key: str) -> Sequence[Fragment]:
        return ranks.fragments(key) if key in local else unsharded.fragments(key)

    return replace(
        unsharded,
        tensors={**unsharded.tensors, **local},
        fragments_of=fragments_of,
        objects=ranks.objects,
    ).with_facet(_RankKeys())


def _files(checkpoint: Checkpoint) -> tuple[int, int, int | None]:
    """Return number and bytes of the files, and how many ranks wrote ``.distcp`` or None."""
    separate = tuple(f"{path}/" for path in checkpoint.below)
    sizes = {
        name: size
        for name, size in list_files_below(checkpoint.store).items()
        if not f"{name}/".startswith(separate)
    }
    matches = (re.fullmatch(r"(?:.*/)?__(\d+)_\d+\.distcp", name) for name in sizes)
    writers = {match[1] for match in matches if match}
    return len(sizes), sum(sizes.values()), len(writers) or None


def parallel_sizes(catalog: Catalog | None) -> dict[str, int]:
    """Return the parallel sizes that the layout or the training arguments record, by name."""
    if catalog is None:
        return {}
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


def _model(catalog: Catalog) -> dict[str, object]:
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


def _has_flattened(catalog: Catalog) -> bool:
    """Return whether torch_dist's facts show flattened optimizer states."""
    facts = catalog.facet(TorchDistFacts)
    data = {} if facts is None or facts.mcore_data is None else facts.mcore_data
    return any(
        isinstance(item, Mapping) and "nd_reformulated_orig_global_shape" in item
        for item in data.values()
    )


def _warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings about code that the pickles name and that other software would run."""
    from core.formats.torch.nested_names import uses_in, with_nested
    from core.pickle.names import is_foreign, judge

    values = [
        item.value for item in checkpoint.catalog.objects.values()
    ]  # walked as one: ranks share most of theirs
    uses = with_nested(checkpoint.uses) | uses_in(values) | _used_by_streams(checkpoint)
    looked = _other_files(checkpoint)
    uses = uses.union(*(item.uses for item in looked.values()))
    dangerous = {str(use.name) for use in uses if judge(use) == "dangerous"}
    foreign = {str(use.name) for use in uses if is_foreign(use)}
    warnings = []
    if dangerous:
        warnings.append(
            f"WARNING: it refers to {_some(dangerous)}, which other software would run on loading it; ckpt runs nothing"
        )
    if foreign:
        warnings.append(
            f"WARNING: it needs {_some(foreign)}, code of unknown modules that torch.load would run; ckpt runs nothing"
        )
    unread = {file for file, item in looked.items() if item.unread}
    if unread:
        warnings.append(
            f"not examined: {_some(unread)}, which may hold a pickle; load it only if you trust it"
        )
    return warnings


def _other_files(checkpoint: Checkpoint) -> dict[str, PickledContent]:
    """Return the files beside the checkpoint's own whose names say that they are pickles."""
    from core.formats.torch.other_pickles import has_pickled_name, look_into

    if checkpoint.store.entry is not None:
        return {}
    sizes = checkpoint.store.sizes()
    names = [
        name
        for name, size in sizes.items()
        if 0 < size <= _MAX_STREAM_BYTES and has_pickled_name(name)
    ]
    looked = {
        name: look_into(checkpoint.store, name, sizes[name]) for name in names[:_MOST_STREAMS]
    }
    return {name: item for name, item in looked.items() if item.uses or item.unread}


def _some(names: set[str]) -> str:
    """Return the first of many names as text, and how many more there are."""
    first = [name[:200] for name in sorted(names)[:_MOST_NAMES]]
    n_more = len(names) - len(first)
    return ", ".join(first) + (f" and {n_more} more" if n_more else "")


_MOST_NAMES = 20


_MOST_STREAMS = 512
"""Maximum number of objects with a stream of their own that are read for their names."""


def _used_by_streams(checkpoint: Checkpoint) -> set[Use]:
    """Return what the first objects that have streams of their own do with names."""
    from core.formats.torch.nested_names import uses_of_stream

    catalog = checkpoint.catalog
    raw = [item for item in catalog.objects.values() if item.raw_key is not None][:_MOST_STREAMS]
    uses: set[Use] = set()
    for item in raw:
        stream = catalog.fragments(item.raw_key or "")[0].array
        if (
            stream is not None
            and stream.extent.encoding is None
            and stream.n_bytes <= _MAX_STREAM_BYTES
        ):
            with suppress(CheckpointingException):
                uses |= uses_of_stream(
                    checkpoint.store, stream.extent.file, stream.extent.offset, stream.n_bytes
                )
    return uses


_MAX_STREAM_BYTES = 64 << 20
