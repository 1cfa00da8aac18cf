"""Facets: facts about a checkpoint that only some formats and layouts have.

A facet is a frozen dataclass of which a catalog has at most one instance:
``catalog.facet(RankFacts)`` returns it or None, ``catalog.with_facet(RankFacts(...))`` sets it.
Facets that only one format reads are defined next to that format
(``core.formats.deepspeed.model_states``); the facets here are read across packages. A catalog that
is created from another one by ``replace`` keeps its facets, so a facet that no longer applies must
be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.file_image import JoinedArray
    from core.engine.catalog.stored import Coords, PlannedArray, StoredArray


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options for writing a target's files; each format honours those that its docstring names.

    Args:
        max_file_bytes: maximum size of a file before the next one is started; None for the format's
            default.
        is_file: the destination is one file, not a directory.
        is_release: Megatron's tracker file contains ``release`` instead of an iteration.
        weights_only: pickles contain nothing that ``torch.load(weights_only=True)`` refuses;
            objects of other classes are set aside.
        separation_hint: DCP and torch_dist store items whose keys begin with this prefix in
            separate files.
        files_per_rank: DCP and torch_dist divide the items of a rank among so many files of about
            equal size, half of them for those with ``separation_hint``.
        shard_bytes: size of zarr 3's shards; None for the format's default.
        recorded_ranks: torch_dist records what each of so many ranks writes; the first coordinate
            of every array and object is its rank. 0 to record nothing.
        is_step: the destination is a step directory of Orbax's CheckpointManager.
    """

    max_file_bytes: int | None = None
    is_file: bool = False
    is_release: bool = False
    weights_only: bool = True
    separation_hint: str | None = None
    files_per_rank: int = 1
    shard_bytes: int | None = None
    recorded_ranks: int = 0
    is_step: bool = False


@dataclass(frozen=True, slots=True)
class WeightCopies:
    """The facet of a checkpoint that has fp32 master weights as its weights, and rounded copies.

    The copies are no tensors of the catalog. Whether they are the rounded master weights is not
    checked when the catalog is read (``core.megatron.optimizer.proof.find_different_copies``).

    Args:
        pairs: returns (key of the weight, master weights, copy) for every stored piece; the two
            arrays have the same elements in the same order.
    """

    pairs: Callable[[], Sequence[tuple[str, StoredArray, StoredArray]]]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facet of a rank catalog: keys are ``<rank directory>:<name>``, shapes are local.

    Args:
        ranks: coordinates → (rank directory, skeleton of the rank's ``model_optim_rng.pt``).
        arrays: the arrays in a source's files by name; None if only the fragments refer to them.
        planned: the arrays to write into a target's files, by name; None if only the fragments
            refer to them.
        optim_files: coordinates → ``distrib_optim.pt``: its skeleton in a source,
            ``core.megatron.optimizer.flat.content.OptimFile`` in a target; of a layer-wise
            optimizer, data parallel rank → skeleton. Ranks without such a file are absent.
        optimizer_kind: form of the optimizer in the files (``float16``, ``distributed``,
            ``layer-wise``, or ``optim.pt``, which is not read), or None.
        is_single_rank: one rank's directory or file was opened, not the complete checkpoint; it can
            be inspected, but not converted.
        n_unopened: number of ranks whose files were not opened because they look like those of
            other ranks.
        transposed: keys of tensors whose axes are in reverse order in the files, and in this
            catalog (a target).
    """

    ranks: Mapping[Coords, tuple[str, object]] = field(default_factory=dict)
    arrays: Mapping[str, StoredArray] | None = None
    planned: Mapping[str, PlannedArray | JoinedArray] | None = None
    optim_files: Mapping[Coords, object] = field(default_factory=dict)
    optimizer_kind: str | None = None
    is_single_rank: bool = False
    n_unopened: int = 0
    transposed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """The facet of a Megatron model in global form (``core.megatron.reshard.from_ranks``).

    Args:
        vocab_size: rows of the vocabulary without padding, or None if they are not recorded.
        expert_names: naming scheme of experts in rank files: ``sequential``
            (``experts.local_experts.3.linear_fc1.weight``), ``te_grouped``
            (``experts.linear_fc1.weight3``) or ``grouped`` (``experts.weight1``, in older
            Megatron); None without experts, or if the arguments determine it.
        wrapper: beginning of the names that the text model's tensors have in the complete model, if
            there are towers beside it (``Rules.wrappers``); else None.
        is_down_proj_cut: multi-latent attention's down projections are cut over TP, as in
            Megatron's local implementation.
        rng_states: ``core.megatron.model.topology.Rank`` → its random states, if the source is
            rank files.
        order: names of tensors and extra states in the order of the files; None for Megatron's own
            order.
        module_versions: module → its entry in the ``_metadata`` of torch's state dicts.
        is_ordered: state dicts are OrderedDicts.
        nesting: name → True if its container is a dict (``core.megatron.extras.nested_dicts``).
        top_level: entries of the files in their order; None for Megatron's own order.
    """

    vocab_size: int | None = None
    expert_names: str | None = None
    wrapper: str | None = None
    is_down_proj_cut: bool = False
    rng_states: Mapping[Any, object] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    module_versions: Mapping[str, object] = field(default_factory=dict)
    is_ordered: bool = True
    nesting: Mapping[str, bool] = field(default_factory=dict)
    top_level: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True)
class FsdpDtensorFacts:
    """The facet of a DCP to write that Megatron-FSDP loads (``fsdp_dtensor``).

    Args:
        shapes: key of each tensor → its shape, with the padding rows of the vocabulary.
    """

    shapes: Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """The facet of a model under Hugging Face's names that was converted from a Megatron model.

    Args:
        model_type: the model family, as named in ``config.json``.
    """

    model_type: str


@dataclass(frozen=True, slots=True)
class DcpFacts:
    """A facet of catalogs that were read from DCP or torch_dist.

    Args:
        item_files: files that ``.metadata`` lists.
        orphans: keys of items that no entry refers to.
        meta_entries: top-level names in Lightning's ``meta.pt``; DCP output writes these entries to
            such a file again.
        unread: files next to the checkpoint's own that were not read; a note gives the reason.
    """

    item_files: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    meta_entries: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TorchDistFacts:
    """The facet of a torch_dist checkpoint: the facts that it records in addition to those of DCP.

    Args:
        dialect: one of ``core.formats.dcp.torch_dist.DIALECTS``; None for the default one.
        mcore_data: Megatron's facts by tensor key, from ``.metadata``; None if it has none.
    """

    dialect: str | None = None
    mcore_data: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class WeightFileFacts:
    """The facet of weight files (safetensors, Hugging Face's ``pytorch_model.bin``).

    Args:
        stem: beginning of the file names when safetensors are written (``model``); None for the
            default one.
        further_models: stems of further models' files (``model_1``), with which the keys of their
            tensors begin.
    """

    stem: str | None = None
    further_models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightDeltas:
    """The facet of weight updates: differences to an older version, not weights.

    Args:
        version, base_version: version that the update leads to, and the one that it is applied to.
        encoding: how a tensor's bytes differ from those of the older version (``xor``).
        compression: how the differences are compressed (``zstd``).
    """

    version: str
    base_version: str
    encoding: str
    compression: str

    @property
    def title(self) -> str:
        """A description for messages."""
        return (
            f"weight deltas ({self.encoding}, {self.compression}) from version "
            f"{self.base_version} to {self.version}, not full weights"
        )


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """The facet of a pipeline of several models, whose keys begin with the model's name.

    Args:
        models: name of the model, which is that of its directory → facts about its weight files.
    """

    models: Mapping[str, WeightFileFacts]


@dataclass(frozen=True, slots=True)
class TorchFileFacts:
    """The facet of a ``torch.save`` file.

    Args:
        is_set_aside: objects of other classes were set aside when the file was written
            (``weights_only``).
        shared: path of a container → earlier path of the same container.
    """

    is_set_aside: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The facet of weights with training state in files next to them.

    Args:
        files: entry in the root of the state dict (``optimizer``, ``scheduler`` …) → its file.
        unread: files next to the weights that were not read; a note gives the reason.
        dropped: files whose entries a conversion did not carry, and listed.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TorchShardedFacts:
    """The facet of the ranks' torch files.

    Args:
        ranks: the ranks of the job, according to the files.
        missing: name of a missing file → its rank.
    """

    ranks: tuple[int, ...]
    missing: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ZarrFacts:
    """A facet of catalogs whose zarr arrays may lack chunks.

    Args:
        unstored: key of a tensor that may lack chunks → True if only the indexes of its shards can
            show it, False if a chunk file is missing.
    """

    unstored: Mapping[str, bool] = field(default_factory=dict)
