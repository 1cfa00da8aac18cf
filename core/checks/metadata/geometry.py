"""CK20x: do the chunks of every tensor tile it, and has each its item in a file?

Chunks come from the metadata: DCP's ``.metadata``, the grids of zarr, the slices that DeepSpeed's ranks say they have.
Where ``.metadata`` cannot be read as it is, what of it makes sense is looked at, so that damage to one tensor does not
hide that to another.

Source: torch 2.13 ``torch/distributed/checkpoint/default_planner.py`` ``_validate_global_plan``, which checks less:
that chunks lie within their tensor, do not overlap, and have its size in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from core.arrays.box import Box, full_box
from core.arrays.coverage import first_hole, first_overlap, is_tiled
from core.catalog.catalog import Fragment, TensorMeta
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException, UnsafeError

_AGAIN = "use another checkpoint: this one was not written properly, or was edited"
GAP = Code("CK201", Severity.ERROR, "a part of a tensor is in no chunk", _AGAIN)
OVERLAP = Code("CK202", Severity.ERROR, "chunks of a tensor overlap", _AGAIN)
BOUNDS = Code("CK203", Severity.ERROR, "a chunk lies outside its tensor", _AGAIN)
TWICE = Code("CK204", Severity.WARNING, "a chunk is listed twice", "save the model again; readers take either copy")
NO_ITEM = Code("CK205", Severity.ERROR, "no file holds a chunk or an object", _AGAIN)
ENTRY = Code("CK206", Severity.ERROR, "an entry of the metadata makes no sense", _AGAIN)

CODES = (GAP, OVERLAP, BOUNDS, TWICE, NO_ITEM, ENTRY)

_BY_RULE = {"dcp.out_of_bounds": BOUNDS, "dcp.no_item": NO_ITEM, "dcp.entries": ENTRY, "dcp.items": ENTRY}
_LISTS_CHUNKS = ("dcp", "torch_dist")
"""Formats whose metadata lists chunks one by one, each once; in others, equal boxes are copies."""


def sensible(subject: Subject) -> Iterator[Finding]:
    """What had to be left out of the metadata."""
    for err in subject.salvaged.problems:
        code = _BY_RULE.get(err.rule or "")
        if code is not None and not isinstance(err, UnsafeError):  # a name that leads outside is said once, of the file
            yield code.finding(err.message, file=err.file, key=err.key, span=err.span)


def tiled(subject: Subject) -> Iterator[Finding]:
    """Gaps, overlaps and chunks that are listed twice, of every tensor."""
    catalog = subject.salvaged.catalog
    if catalog is None or subject.format is None or catalog.is_rank_local:
        return  # every tensor of a rank is one array
    known = {err.key for err in subject.salvaged.problems}
    lists_chunks = subject.format.name in _LISTS_CHUNKS
    for key, meta in catalog.tensors.items():
        if key in known:
            continue  # has a finding already: chunks that were left out would only look like gaps
        try:
            fragments = catalog.fragments(key)
        except CheckpointingException as err:  # the index of a zarr shard
            if not subject.is_explained(err.file):
                yield finding_of(err, default=ENTRY, key=key)
            continue
        if len(fragments) == 1 and fragments[0].box.shape == meta.shape:
            continue
        yield from _of_tensor(meta, fragments, lists_chunks=lists_chunks)


def _of_tensor(meta: TensorMeta, fragments: Sequence[Fragment], *, lists_chunks: bool) -> Iterator[Finding]:
    """The findings of one tensor."""
    region = full_box(meta.shape)
    counts = Counter(fragment.box for fragment in fragments if not fragment.box.is_empty)
    boxes = list(counts)
    for box in (box for box in boxes if not (box.rank == region.rank and region.contains(box))):
        yield BOUNDS.finding(
            f"a chunk of shape {box.shape} at {box.offset} does not lie in the tensor",
            file=_file_of(fragments, box),
            key=meta.key,
            expected=f"within {meta.shape}",
            found=f"{box.offset} to {box.end}",
        )
        counts.pop(box)
    inside = list(counts)
    for box, n in counts.items() if lists_chunks else ():
        if n > 1:
            yield TWICE.finding(
                f"the chunk of shape {box.shape} at {box.offset} is listed {n} times",
                file=_file_of(fragments, box),
                key=meta.key,
                expected="once",
                found=f"{n} times",
            )
    if is_tiled(region, inside):
        return
    pair = first_overlap(inside)
    if pair is not None:
        one, other = (inside[number] for number in pair)
        common = one.intersect(other)
        assert common is not None
        yield OVERLAP.finding(
            f"the chunks at {one.offset} and {other.offset} have {common.n_elements} elements in common",
            file=_file_of(fragments, other),
            key=meta.key,
            expected="each element in one chunk",
            found=f"shapes {one.shape} and {other.shape}",
        )
    hole = first_hole(region, inside)
    if hole is not None:
        n_held = sum(box.n_elements for box in inside)
        missing = f"{region.n_elements - n_held} elements are" if pair is None else "elements are"
        yield GAP.finding(
            f"{missing} in no chunk, the first of them at {hole.offset}",
            key=meta.key,
            expected=f"{region.n_elements} elements (shape {meta.shape})",
            found=f"{n_held} elements in {len(inside)} chunks",
        )


def _file_of(fragments: Sequence[Fragment], box: Box) -> str | None:
    for fragment in fragments:
        if fragment.box == box and fragment.array is not None:
            return fragment.array.extent.file
    return None


CHECKS = (Check(sensible), Check(tiled))
