"""CK20x: check that the chunks of every tensor tile it, and that each chunk is stored in a file.

CK210 reports parameters without elements, which are complete in the eyes of every format.

Chunks come from the metadata: DCP's ``.metadata``, the grids of zarr, the slices that DeepSpeed's
ranks record. If ``.metadata`` cannot be read completely, its valid part is checked, so that damage
to one tensor does not hide damage to another.

Source: torch 2.13 ``torch/distributed/checkpoint/default_planner.py`` ``_validate_global_plan``,
which checks less: that chunks do not exceed their tensor, do not overlap, and add up to its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from core.arrays.box import Box, full_box
from core.engine.catalog.tensor import Fragment, Tensor
from core.errors import CheckpointingException, UnsafeError
from core.values import n_text
from core.verbs.checks.finding import Finding, get_code
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import Check, Subject

GAP = get_code("CK201")
OVERLAP = get_code("CK202")
BOUNDS = get_code("CK203")
TWICE = get_code("CK204")
NO_ITEM = get_code("CK205")
ENTRY = get_code("CK206")
EMPTIED = get_code("CK210")


_BY_RULE = {
    "dcp.out_of_bounds": BOUNDS,
    "dcp.no_item": NO_ITEM,
    "dcp.entries": ENTRY,
    "dcp.items": ENTRY,
}


def report_invalid_entries(subject: Subject) -> Iterator[Finding]:
    """Report the entries that had to be dropped from the metadata (CK203, CK205, CK206)."""
    for err in subject.salvaged.problems:
        code = _BY_RULE.get(err.rule or "")
        # File names that lead outside are reported by file (CK110).
        if code is not None and not isinstance(err, UnsafeError):
            yield code.finding(err.message, file=err.file, key=err.key, span=err.span)


def check_emptied(subject: Subject) -> Iterator[Finding]:
    """Report tensors of shape [0] in the places of parameters (CK210)."""
    from core.engine.catalog.emptied import find_emptied_parameters

    catalog, entry = subject.salvaged.catalog, subject.store.entry
    if catalog is None or catalog.is_rank_local:
        return
    emptied = list(find_emptied_parameters(catalog))
    if emptied and entry is not None:
        from core.formats.deepspeed.files import is_rank_file

        if is_rank_file(entry):
            return  # the files of ZeRO-3's ranks have them, beside their parts
    for key in emptied:
        yield EMPTIED.finding(
            "the parameter is empty, because it was saved while ZeRO-3 had partitioned it across "
            "ranks",
            key=key,
            expected="a parameter with elements",
            found="shape (0,)",
        )


def check_tiling(subject: Subject) -> Iterator[Finding]:
    """Check that the chunks of every tensor cover it exactly once (CK201–CK204)."""
    catalog = subject.salvaged.catalog
    if catalog is None or subject.format is None or catalog.is_rank_local:
        return  # each tensor of a rank file is a single array
    # The omitted chunks of a tensor that has been reported would look like gaps.
    reported = {err.key for err in subject.salvaged.problems}
    for key, tensor in catalog.tensors.items():
        if key in reported:
            continue
        try:
            fragments = catalog.fragments(key)
        except CheckpointingException as err:  # the index of a zarr shard
            if not subject.is_covered_by_finding(err.file):
                yield finding_of(err, default=ENTRY, key=key)
            continue
        # The usual case, one chunk of the full shape, needs no geometry.
        if len(fragments) == 1 and fragments[0].box.shape == tensor.shape:
            continue
        yield from _check_chunks(key, tensor, fragments, lists_chunks=subject.format.lists_chunks)


def _check_chunks(
    key: str, tensor: Tensor, fragments: Sequence[Fragment], *, lists_chunks: bool
) -> Iterator[Finding]:
    """Check the chunks of one tensor.

    Args:
        lists_chunks: the metadata lists each chunk once, so that equal boxes are an error; in
            other formats they are replicas.
    """
    from core.arrays.coverage import is_tiled

    region = full_box(tensor.shape)
    counts = Counter(fragment.box for fragment in fragments if not fragment.box.is_empty)
    # Report chunks outside the tensor, and ignore them from here on.
    outside = [box for box in counts if box.rank != region.rank or not region.contains(box)]
    for box in outside:
        yield BOUNDS.finding(
            f"a chunk of shape {box.shape} at {box.offset} extends beyond the tensor",
            file=_file_of(fragments, box),
            key=key,
            expected=f"a chunk within {tensor.shape}",
            found=f"{box.offset} to {box.end}",
        )
        counts.pop(box)
    for box, n in counts.items() if lists_chunks else ():
        if n > 1:
            yield TWICE.finding(
                f"the chunk of shape {box.shape} at {box.offset} is listed {n} times",
                file=_file_of(fragments, box),
                key=key,
                expected="once",
                found=f"{n} times",
            )
    # Proving that there is no gap or overlap is cheaper than locating one, so it comes first.
    boxes = list(counts)
    if not is_tiled(region, boxes):
        yield from _locate_gap_and_overlap(key, tensor, fragments, boxes)


def _locate_gap_and_overlap(
    key: str, tensor: Tensor, fragments: Sequence[Fragment], boxes: Sequence[Box]
) -> Iterator[Finding]:
    """Report the first overlap and the first gap of chunks that do not tile their tensor."""
    from core.arrays.coverage import first_hole, first_overlap

    region = full_box(tensor.shape)
    pair = first_overlap(boxes)
    if pair is not None:
        first, second = (boxes[number] for number in pair)
        common = first.intersect(second)
        assert common is not None
        yield OVERLAP.finding(
            f"the chunks at {first.offset} and {second.offset} share "
            f"{n_text(common.n_elements, 'element')}",
            file=_file_of(fragments, second),
            key=key,
            expected="each element in exactly one chunk",
            found=f"shapes {first.shape} and {second.shape}",
        )
    hole = first_hole(region, boxes)
    if hole is not None:
        # If chunks overlap, the size of the gap does not follow from their sum.
        n_covered = sum(box.n_elements for box in boxes)
        missing = (
            n_text(region.n_elements - n_covered, "element is", "elements are")
            if pair is None
            else "elements are"
        )
        yield GAP.finding(
            f"{missing} not covered by any chunk, the first at {hole.offset}",
            key=key,
            expected=f"{region.n_elements} elements (shape {tensor.shape})",
            found=f"{n_covered} elements in {len(boxes)} chunks",
        )


def _file_of(fragments: Sequence[Fragment], box: Box) -> str | None:
    """Return the file that holds a chunk; None if no file does."""
    for fragment in fragments:
        if fragment.box == box and fragment.array is not None:
            return fragment.array.extent.file
    return None


CHECKS = (Check(report_invalid_entries), Check(check_tiling), Check(check_emptied))
