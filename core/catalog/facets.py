"""Facets: facts about a checkpoint that only some formats and layouts have.

A facet is a frozen dataclass of which a catalog carries at most one: ``catalog.facet(RankFacts)``
returns it or None, ``catalog.with_facet(RankFacts(...))`` sets it. Facets that only one format
reads lie beside that format (``core.formats.dcp.facets``, ``core.formats.deepspeed.facets``); those
here are read across packages. A catalog that is made from another one by ``replace`` keeps its
facets, so a facet that no longer holds must be removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.catalog.file_image import JoinedArray
    from core.catalog.stored import Coords, PlannedArray, StoredArray


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How the files of a target are to be written; a format honours those that its docstring names.

    Args:
        max_file_bytes: size above which a format begins another file; None takes the format's
            default.
        is_file: the destination is one file, not a directory.
        is_release: Megatron's tracker says ``release`` in place of an iteration.
        weights_only: pickles hold nothing that ``torch.load(weights_only=True)`` refuses; objects
            of other classes are set aside.
        separation_hint: DCP and torch_dist put items whose keys begin with this prefix into files
            of their own.
        shard_bytes: size of zarr 3's shards; None takes the format's default.
    """

    max_file_bytes: int | None = None
    is_file: bool = False
    is_release: bool = False
    weights_only: bool = True
    separation_hint: str | None = None
    shard_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facet of a rank catalog: keys are ``<rank directory>:<name>``, shapes are local.

    Args:
        ranks: coordinates → (rank directory, skeleton of the rank's ``model_optim_rng.pt``).
        arrays: the arrays in a source's files by name; None where only the fragments know them.
        planned: the arrays that a target's files are to hold, by name; None where only the
            fragments know them.
        optim_files: coordinates → ``distrib_optim.pt``: its skeleton in a source,
            ``core.megatron.optimizer.flat.content.OptimFile`` in a target. Ranks without one are
            absent.
        optimizer_kind: form of the optimizer in the files (``float16``, ``distributed``,
            ``layer-wise``), or None.
        is_single_rank: one rank's directory or file was opened, not the checkpoint; for looking at,
            not for converting.
        n_unopened: ranks whose files were not opened because they look like others'.
        transposed: keys of tensors whose axes are in the other order in files, and in this catalog
            (a target).
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
        vocab_size: rows of the true vocabulary, None where nothing records them.
        expert_names: how rank files name experts: ``sequential``
            (``experts.local_experts.3.linear_fc1.weight``), ``te_grouped``
            (``experts.linear_fc1.weight3``) or ``grouped`` (``experts.weight1``, of older
            Megatron).
            None: without experts, or as the arguments determine.
        is_down_proj_cut: multi-latent attention's down projections are cut over TP, as by the local
            implementation.
        rng_states: ``core.megatron.model.topology.Rank`` → its random states, where the source is
            rank files.
        order: names of tensors and extra states in the order of the files; None: as Megatron makes
            them.
        module_versions: module → what torch notes about it (``_metadata`` of state dicts).
        is_ordered: state dicts are OrderedDicts.
        nesting: name → whether its container is a dict (``core.megatron.extras.nested_dicts``).
        top_level: entries of the files in their order; None: as Megatron makes them.
    """

    vocab_size: int | None = None
    expert_names: str | None = None
    is_down_proj_cut: bool = False
    rng_states: Mapping[Any, object] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    module_versions: Mapping[str, object] = field(default_factory=dict)
    is_ordered: bool = True
    nesting: Mapping[str, bool] = field(default_factory=dict)
    top_level: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """The facet of a model under Hugging Face's names that was made from a Megatron one.

    Args:
        model_type: the family, as ``config.json`` names it.
    """

    model_type: str


@dataclass(frozen=True, slots=True)
class TorchDistFacts:
    """The facet of a torch_dist checkpoint: what it records beyond DCP.

    Args:
        dialect: one of ``core.formats.dcp.torch_dist.DIALECTS``; None writes the usual one.
        mcore_data: Megatron's facts by tensor key, from ``.metadata``; None where it has none.
    """

    dialect: str | None = None
    mcore_data: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class WeightFileFacts:
    """The facet of weight files (safetensors, Hugging Face's ``pytorch_model.bin``).

    Args:
        metadata: ``__metadata__`` of all safetensors files, without what the format itself
            explains.
        stem: beginning of the files' names when safetensors are written (``model``); None takes the
            usual one.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    stem: str | None = None


@dataclass(frozen=True, slots=True)
class TorchFileFacts:
    """The facet of a ``torch.save`` file.

    Args:
        is_set_aside: its objects of other classes were set aside when it was written
            (``weights_only``).
        shared: path of a container → earlier path of the same container.
    """

    is_set_aside: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)
