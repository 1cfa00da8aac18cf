"""What a format is: two functions and a few facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import Report

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog, TargetCatalog
    from core.catalog.file_image import FileImage
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class Format:
    """A checkpoint format.

    Args:
        name: canonical name, as ``--to`` takes it.
        title: a few words for people.
        sniff: whether a store looks like this format; reads at most a few small pieces.
        read: the catalog of a store; metadata only.
        sample: as ``read``, but of files that look alike only one is opened; None where that is no use.
        lay_out: file images of a target catalog whose arrays are to be placed; pure. None if the format is read-only.
        aliases: other names that ``--to`` takes.
        partition: how a target catalog's tensors are cut into arrays: ``whole`` (one array a tensor), ``as_stored``
            (the source's pieces), ``grid`` (the source's pieces where they are equal boxes of a regular grid, else one
            array) or ``ranks`` (by a layout and a topology).
        is_single_file: whether the destination may be one file.
        suffixes: of a destination that is one file; () if any will do.
        is_mcore: whether it is a dialect of Megatron-core's distributed checkpoint: global tensors under Megatron's
            stacked names, a common state, a training root.
        keeps_objects: whether non-tensor entries can be stored.
        has_objects_beside: whether non-tensor entries are stored beside the tensors, with the tensors inside them;
            where they are not, those become tensors of their own.
        nests: whether nested containers are stored as they are, with tensors and other values inside them.
        records_ties: whether tensors that ``Catalog.aliases`` calls equal are written once, the other names only
            recorded.
        has_live_objects: whether torch's own loader makes its objects instances of their classes, so that they are
            written as such where the destination nests.
        splits_files: whether ``lay_out`` keeps its files below ``WriteOptions.max_file_bytes``.
        adapt: what a catalog of global tensors becomes before it is cut, where the format has names of its own.
        notes_of: what the user should know of what ``lay_out`` makes of a target catalog; None if there is nothing.
        check: raises what ``lay_out`` would, without making images; None if there is no shorter way than that.
        salvage: as ``read``, for what is damaged: tells what is wrong, and leaves it out; None where there is nothing
            between all and nothing.
        carries_files: whether files beside the weights (``Catalog.carried``, ``Catalog.documents``) can be stored.
        own_folders: returns the directories right below that the checkpoint's files lie in, so that a checkpoint in
            any other is one of its own; None where every directory belongs to the checkpoint.
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
    is_mcore: bool = False
    keeps_objects: bool = True
    has_objects_beside: bool = False
    nests: bool = False
    records_ties: bool = False
    has_live_objects: bool = False
    carries_files: bool = False
    splits_files: bool = False
    adapt: Callable[[Catalog], Catalog] | None = None
    sample: Callable[[ReadStore], Catalog] | None = None
    notes_of: Callable[[TargetCatalog], Sequence[str]] | None = None
    check: Callable[[TargetCatalog], None] | None = None
    salvage: Callable[[ReadStore, Report], Catalog] | None = None
    own_folders: Callable[[ReadStore], Sequence[str]] | None = None


def no_folders(store: ReadStore) -> tuple[str, ...]:
    """Return no names: all files of a checkpoint lie in its directory itself (``Format.own_folders``)."""
    return ()
