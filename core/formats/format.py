"""The description of a checkpoint format: three functions and facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol

from core.arrays.dtypes import DTYPES, DType
from core.errors import Report, UnsupportedError
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from pathlib import Path

    from core.engine.catalog.catalog import Catalog, TargetCatalog
    from core.engine.catalog.file_image import FileImage
    from core.files.store import ReadStore


class CutExperts(Protocol):
    """A function that changes source and target for an expert parallel size."""

    def __call__(
        self, source: Catalog, target: TargetCatalog, *, ep: int
    ) -> tuple[Catalog, TargetCatalog]: ...


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint format.

    Args:
        name: canonical name, as passed to ``--to``.
        title: a few words for people.
        sniff: returns whether a store looks like this format; reads a few small parts at most.
        read: returns the catalog of a store; reads metadata only.
        sample: like ``read``, but opens only one of several files that look alike; None if that is
            no faster for the format.
        read_weights: like ``read``, without the optimizer, from files that hold the weights beside
            it; None if no other files do.
        has_masters_in_optimizer: ``read`` takes the weights from the optimizer's files, where they
            are more precise than those of ``read_weights``.
        lay_out: returns descriptions of the files to write for a target catalog; pure. None if the
            format is read-only.
        aliases: other names that can be passed to ``--to``.
        partition: how a target catalog's tensors are split into arrays: ``whole`` (one array per
            tensor), ``as_stored`` (the source's arrays), ``grid`` (the source's arrays where they
            are equal boxes of a regular grid, else one array) or ``ranks`` (by a layout and a
            topology). Only ``core.opening.target`` reads it; ask the properties below.
        is_single_file: whether the destination may be one file.
        suffixes: allowed suffixes of a destination that is one file; () allows any.
        has_common_state: whether it is a dialect of Megatron-core's distributed checkpoint: global
            tensors under Megatron's stacked names, a common state, a training root.
        keeps_objects: whether non-tensor entries can be stored.
        has_objects_beside: whether non-tensor entries are stored in a side file, together with the
            tensors inside them. If not, those tensors become separate entries.
        keeps_nesting: whether nested containers are stored as they are, with tensors and other
            values inside them.
        has_text_keys: whether the keys of all dicts around entries are text, whatever they were
            when the checkpoint was saved.
        keeps_attributes: whether attributes of tensors and containers have a place in the files
            (``core.engine.catalog.attributes``). If not, they become entries, where objects can be
            stored.
        records_ties: whether tied tensors (``Catalog.ties``) are written once, and their other
            names only recorded.
        has_live_objects: whether torch's own loader turns the format's objects into instances of
            their classes, so that they are written as such if the destination keeps nesting, and
            streams of ``torch.save`` are stored as they are.
        splits_files: whether ``lay_out`` keeps its files below ``WriteOptions.max_file_bytes``.
        has_named_optimizer: whether the optimizer of a model with Hugging Face's names can be
            stored, its states under the names of their parameters.
        adapt: converts a catalog of global tensors to the format's own names, before its tensors
            are split; None if the format has no names of its own.
        cut_experts: changes source and target for an expert parallel size, in a format that
            otherwise has no parallel layout; None if no size has an effect.
        notes_of: returns notes to the user on the result of ``lay_out``; None if the format never
            has such notes.
        check: raises the errors of ``lay_out`` without its work; None if nothing is faster than
            ``lay_out`` itself.
        salvage: like ``read``, for a damaged checkpoint: reports what is damaged and omits it; None
            if the format can only be read completely.
        has_files_of_ranks: whether ranks have files of their own that do not all record the rank,
            so that a copy of another rank's file may go unnoticed.
        has_hf_config: whether transformers loads the weights into the model that a ``config.json``
            beside them describes, so that checks compare the two.
        has_files_above: whether trainers keep files of the checkpoint in the directory above it.
        megatron_name: the format's name in Megatron's ``--ckpt-format``; None if it has none.
        carries_files: whether files next to the weights (``Catalog.files``) can be stored.
        side_folders: names of direct subdirectories that are carried unchanged into other formats
            with that subdirectory (Megatron's ``tokenizer``), as are states of data loaders.
        own_folders: returns the direct subdirectories that hold files of the checkpoint. A
            checkpoint in any other subdirectory is a separate one, unless ``list_indexed`` names a
            file in it. None if every subdirectory belongs to the checkpoint.
        list_indexed: returns the names of the files that an index of the checkpoint lists, as far
            as it can be read; they belong to the checkpoint wherever they lie. None if the format
            has no index, or looks for files by their names alone.
        load_call: returns the call of the format's own library that loads what was written, given
            the destination, the catalog and the files (``core.formats.load_calls``); None if there
            is none, or none for these files.
        written_as: name of a format of the same software to propose as the destination; for
            read-only formats.
        reading_once: returns a context in which metadata that several readers need is parsed once.
    """

    name: str
    title: str
    sniff: Callable[[ReadStore], bool]
    read: Callable[[ReadStore], Catalog]
    lay_out: Callable[[TargetCatalog], Sequence[FileImage]] | None
    aliases: tuple[str, ...] = ()
    partition: str = "whole"
    is_single_file: bool = False
    suffixes: tuple[str, ...] = ()
    has_common_state: bool = False
    keeps_objects: bool = True
    has_objects_beside: bool = False
    keeps_nesting: bool = False
    has_text_keys: bool = False
    keeps_attributes: bool = False
    records_ties: bool = False
    has_live_objects: bool = False
    carries_files: bool = False
    has_files_of_ranks: bool = False
    has_hf_config: bool = False
    has_files_above: bool = False
    megatron_name: str | None = None
    splits_files: bool = False
    has_named_optimizer: bool = False
    adapt: Callable[[Catalog], Catalog] | None = None
    cut_experts: CutExperts | None = None
    sample: Callable[[ReadStore], Catalog] | None = None
    read_weights: Callable[[ReadStore], Catalog] | None = None
    has_masters_in_optimizer: bool = False
    notes_of: Callable[[TargetCatalog], Sequence[str]] | None = None
    check: Callable[[TargetCatalog], None] | None = None
    salvage: Callable[[ReadStore, Report], Catalog] | None = None
    side_folders: tuple[str, ...] = ()
    own_folders: Callable[[ReadStore], Sequence[str]] | None = None
    list_indexed: Callable[[ReadStore], Collection[str]] | None = None
    load_call: Callable[[Path, TargetCatalog, Sequence[FileImage]], str | None] | None = None
    written_as: str | None = None
    reading_once: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        """Raise ValueError unless the partition is known."""
        if self.partition not in ("whole", "as_stored", "grid", "ranks"):
            raise ValueError(f"format {self.name} has the unknown partition {self.partition!r}")

    @property
    def is_rank_local(self) -> bool:
        """True if the tensors in the files are those of ranks, as a parallel layout cuts them."""
        return self.partition == "ranks"

    @property
    def has_layout(self) -> bool:
        """True if checkpoints are Megatron models, whose tensors a layout cuts or stacks."""
        return self.is_rank_local or self.has_common_state

    @property
    def lists_chunks(self) -> bool:
        """True if metadata list each chunk of a tensor once; every writer has files of its own."""
        return self.partition == "as_stored"

    @property
    def has_grids(self) -> bool:
        """True if the chunks of a tensor form a regular grid; writers may share a chunk."""
        return self.partition == "grid"

    @property
    def keeps_unknown_classes(self) -> bool:
        """True if objects of unknown classes can be stored, as inert pickles or set aside.

        The other formats store plain values only.
        """
        return self.has_layout or self.keeps_nesting

    def writes_file(self, dst: Path) -> bool:
        """Return True if a destination is one file rather than a directory."""
        if not self.is_single_file:
            return False
        return dst.suffix in self.suffixes if self.suffixes else dst.suffix != ""

    def writes_only_tensors(self, dst: Path) -> bool:
        """Return True if a destination is one file, which has no place for anything else."""
        return self.writes_file(dst) and not self.keeps_nesting


def imported_on_call(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of this package that is imported by the first call.

    A checkpoint is read without the code that writes its format.

    Args:
        module: name of the module below ``core.formats``.
        name: name of the function.
    """

    def call(*args: object, **options: object) -> Any:
        return getattr(import_module(f"core.formats.{module}"), name)(*args, **options)

    return call


MEGATRON_FOLDERS = ("tokenizer", "dataloader_state")
"""The directories that Megatron-LM and Megatron-Bridge write into that of an iteration."""
NEMO_FOLDERS = frozenset({"weights", "model_weights"})
"""The directories in which NeMo 2 and NeMo 1 save the weights."""
LOADER_STATE = re.compile(r"(dataloader_state/(.*/)?)?train_dataloader_dprank(?P<rank>\d+)\.pt")
"""The files in which data-parallel ranks keep the states of their data loaders, as Megatron-LM and
Megatron-Bridge call them; Bridge writes them into the directory of the iteration, too.
"""


def no_folders(store: ReadStore) -> tuple[str, ...]:
    """Return (), for formats whose files are all in the checkpoint directory itself."""
    return ()


_CAST_TO = "float32"
"""The element type that hints propose."""


def check_dtypes(dtypes: Mapping[str, str], holds: Callable[[DType], bool], *, owner: str) -> None:
    """Raise if the element type of a tensor cannot be stored.

    The hint names exactly the tensors that are refused, so that following it once is enough.

    Args:
        dtypes: key → canonical dtype of all tensors.
        holds: returns whether tensors of an element type can be stored.
        owner: what lacks the other types, for the message: ``zarr``.

    Raises:
        UnsupportedError: names the first tensor, and the number of the others.
    """
    lacking = {name for name in set(dtypes.values()) if not holds(DTYPES[name])}
    if not lacking:
        return
    from core.arrays.cast import is_supported

    refused = [key for key, dtype in dtypes.items() if dtype in lacking]
    castable = [key for key in refused if is_supported(dtypes[key], _CAST_TO)]
    fixed = [key for key in refused if not is_supported(dtypes[key], _CAST_TO)]
    first = refused[0]
    n_more = len(refused) - 1
    others = f" or the dtypes of {n_text(n_more, 'other tensor')}" if n_more else ""
    steps = []
    if castable:
        steps.append(f"cast with {_write_options('--dtype', castable, f'={_CAST_TO}')}")
    # Skipping everything would leave an empty result.
    if fixed and len(fixed) < len(dtypes):
        steps.append(f"skip with {_write_options('--exclude', fixed, '')}")
    elif fixed:
        steps = ["write a different format with --to"]
    hint = " and ".join(steps)
    if not fixed and len(refused) < len(dtypes):
        hint += f", or skip with {_write_options('--exclude', refused, '')}"
    raise UnsupportedError(
        f"{owner} does not support dtype {dtypes[first]}{others}", key=first, hint=hint
    )


def _write_options(name: str, keys: Sequence[str], suffix: str) -> str:
    """Return options whose patterns select exactly these keys, the first of many patterns."""
    from core.engine.catalog.key_patterns import MAX_LISTED, fold_keys

    patterns = [label for label, _ in fold_keys(dict.fromkeys(keys))]
    options = [f"{name} {quote(pattern + suffix)}" for pattern in patterns[:MAX_LISTED]]
    more = f" and {len(patterns) - MAX_LISTED:,} more" if len(patterns) > MAX_LISTED else ""
    return " ".join(options) + more
