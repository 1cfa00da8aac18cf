"""``ckpt diff``: compare two checkpoints tensor by tensor.

The exit code is 0 if they are the same, and 1 if they differ or could not be compared completely.

``--json`` prints one object (schema ``ckpt.diff/1``; fields may be added, none change meaning)::

    {"schema": "ckpt.diff/1", "same": bool, "method": "read" | "fingerprints" | "metadata",
     "by_fingerprint": int,
     "tolerance": {"rtol": float, "atol": float, "equal_nan": bool} | null,
     "a": {"path": str, "format": str, "iteration": int | null, "parallel": str | null},
     "b": … as a,
     "counts": {"equal": int, "close": int, "unread": int, "values": int, "dtype": int,
                "shape": int, "only_a": int, "only_b": int},
     "tensors": [{"key": str, "kind": str, "group": str,
                  "a": {"dtype": str, "shape": [int]} | null, "b": … as a,
                  "values": null | {"elements": int, "differing": int, "nan": int,
                                    "max_abs": number | null, "max_at": [int] | null,
                                    "relative": number | null, "cosine": number | null,
                                    "first": [int] | null,
                                    "first_a": number | null, "first_b": number | null},
                  "is_cast": bool | null}],
     "layers": [{"layer": str, "tensors": int, "differing": int, "max_abs": number | null,
                 "relative": number | null, "worst": str}],
     "entries": [{"path": str, "kind": "changed" | "only_a" | "only_b",
                  "a": str | null, "b": str | null}],
     "layout_entries": [… as entries; not counted as differences],
     "left_out": [str], "notes": [str],
     "entries_compared": int, "bytes_read": int, "seconds": float,
     "map": {"model": MAP, "optimizer": MAP}}

``tensors`` lists those that are not equal, the most important first, and ``layers`` the layers with
different values (of the optimizer, if no layer of the model has any), the most different first:
``relative`` is that of the ``worst`` tensor. A kind is one of the keys of
``counts``: ``close`` tensors are equal only within the tolerance, ``unread`` ones have equal names,
shapes and dtypes and were not read. ``nan`` counts the elements that are NaN on one side,
``relative`` is |A-B| / |A| in the Euclidean norm, ``is_cast`` is true if the narrower of two dtypes
holds the wider tensor's values, rounded. ``by_fingerprint`` counts tensors that were not read
because their fingerprints in both manifests are equal. ``left_out`` lists what could not be
compared. ``launch`` (``ckpt_cli.workers.current_team``) is present if several workers compared.
Numbers that JSON cannot express are "inf", "-inf" and "nan".

``map`` is present with ``--map``, with the parts that have tensors. MAP arranges them by the first
number of their keys and the rest of the keys::

    {"stack": str, "layers": [int], "modules": [str], "cells": [[CELL | null]],
     "outside": [CELL with "key": str]}
    CELL: {"kind": str, "tensors": int, "relative": number | null, "differing": int, "nan": int}

``cells`` has a row for each of ``layers`` with a CELL for each of ``modules``, null where the layer
lacks the module; ``outside`` lists the tensors whose keys have no number. ``stack`` names the list
of layers (``layers``, ``h``). A CELL has the most serious ``kind`` of its tensors (several where
experts are folded), the largest ``relative``, and sums of ``differing`` and ``nan``.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_cli.html_report.page import check_html_path, write_report
from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.options.shared.values import check_file
from ckpt_cli.pages.diff_page import diff_blocks, verdict_line
from ckpt_cli.pages.pictures.heat import maps_json
from ckpt_cli.screen.blocks import draw_text
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import print_note, screen_of
from ckpt_cli.workers.current_team import default_memory, launch_of, team, worker_threads
from ckpt_cli.workers.progress import show_progress
from core.engine.team.protocol import is_lead
from core.errors import NoEffect, refuse_without_effect
from core.opening.open import FILL
from core.values import changed_fields
from core.verbs.convert.job import DEFAULT_THREADS
from core.verbs.diff.layers import rank_layers
from core.verbs.diff.options import build_diff_job
from core.verbs.diff.result import KINDS
from core.verbs.diff.run import DiffJob, diff
from core.verbs.pictures.heat import heat_maps

if TYPE_CHECKING:
    from ckpt_cli.options.diff import DiffOptions
    from core.engine.catalog.tensor import Tensor
    from core.verbs.diff.result import Diff, TensorDiff
    from core.verbs.diff.sides import Side

_LIMIT = 10
"""Default number of lines of each list."""


def run_diff(options: DiffOptions) -> int:
    """Run ``ckpt diff`` and return the exit code.

    Raises:
        UsageError: options contradict each other, or an option or path is invalid.
        CheckpointingException: one of the checkpoints cannot be read.
    """
    job = _build_job(options)
    if options.report is not None:
        check_html_path(options.report)
    with show_progress(progress_form(options.progress, is_quiet=options.quiet)) as progress:
        result = diff(job, progress=progress, team=team())
    # All workers compared; the lead prints.
    if is_lead(team()):
        screen = screen_of(sys.stdout)
        for warning in result.warnings:
            print_note(warning)
        if options.report is not None:
            from ckpt_cli.html_report.diff_report import diff_html

            write_report(options.report, diff_html(result), is_quiet=options.quiet)
        if options.json:
            pictures = {"map": maps_json(heat_maps(result.tensors))} if options.map else {}
            print(json.dumps(_as_json(result) | pictures))
        elif options.quiet:
            print(*draw_text(screen, [verdict_line(result)]))
        else:
            limit = _LIMIT if options.limit is None else options.limit
            blocks = diff_blocks(result, limit=limit, is_flat=options.flat, has_map=options.map)
            print_page(
                draw_text(screen, blocks), None if options.no_pager else pager_of(sys.stdout)
            )
    return 0 if result.same else 1


def _build_job(options: DiffOptions) -> DiffJob:
    """Return the job that the options describe.

    Raises:
        UsageError: options contradict each other.
    """
    verdict = NoEffect(("map",), options.quiet, "--quiet prints only the verdict")
    refuse_without_effect(changed_fields(options), [verdict])
    check_file(options.rules, option="--rules")
    return build_diff_job(
        options.a,
        options.b,
        rtol=options.rtol,
        atol=options.atol,
        nan_differs=options.nan_differs,
        stat_only=options.stat_only,
        read=options.read,
        iteration_a=options.iteration,
        iteration_b=options.iteration_b,
        missing_chunks=options.missing_chunks or FILL,
        include=tuple(options.include or ()),
        exclude=tuple(options.exclude or ()),
        strip_prefix=tuple(options.strip_prefix or ()),
        with_optimizer=not options.no_optim,
        with_entries=not options.tensors_only,
        rules=options.rules,
        threads=options.threads or worker_threads() or DEFAULT_THREADS,
        memory_bytes=options.memory or default_memory(),
    )


def _as_json(result: Diff) -> dict[str, object]:
    """Return the object of ``--json``; its schema is in the module's docstring."""
    # Fingerprints are the method only if they made all reading unnecessary.
    method = "metadata"
    if result.is_read:
        method = "fingerprints" if result.n_by_fingerprint and not result.read_bytes else "read"
    return {
        "schema": "ckpt.diff/1",
        "same": result.same,
        "method": method,
        "by_fingerprint": result.n_by_fingerprint,
        "tolerance": None if result.rule is None else asdict(result.rule),
        "a": _side_json(result.a),
        "b": _side_json(result.b),
        "counts": {kind: len(result.of_kind(kind)) for kind in reversed(KINDS)},
        "tensors": [
            _tensor_json(tensor)
            for tensor in result.tensors
            if tensor.kind not in ("equal", "unread")
        ],
        "layers": [
            {
                "layer": layer.name,
                "tensors": layer.n_tensors,
                "differing": len(layer.differing),
                "max_abs": _number(layer.max_abs),
                "relative": _number(layer.relative),
                "worst": layer.worst.key,
            }
            for layer in rank_layers(result.tensors).layers
        ],
        "entries": [asdict(entry) for entry in result.entries],
        "layout_entries": [asdict(entry) for entry in result.of_layout],
        "left_out": list(result.left_out),
        "notes": [*result.warnings, *result.notes],
        "entries_compared": result.n_entries,
        "bytes_read": result.read_bytes,
        "seconds": round(result.seconds, 3),
    } | launch_of(result.figures)


def _side_json(side: Side) -> dict[str, object]:
    return {
        "path": str(side.source.path),
        "format": side.source.format.name,
        "iteration": side.source.iteration,
        "parallel": None if side.topology is None else str(side.topology),
    }


def _tensor_json(tensor: TensorDiff) -> dict[str, object]:
    values = tensor.values
    entry: dict[str, object] = {
        "key": tensor.key,
        "kind": tensor.kind,
        "group": tensor.role,
        "a": _meta_json(tensor.a),
        "b": _meta_json(tensor.b),
        "values": None,
        "is_cast": tensor.is_cast,
    }
    if values is not None:
        # max_at and first are flat indices; the report contains N-D ones.
        first_a, first_b = tensor.first or (None, None)
        entry["values"] = {
            "elements": values.n_elements,
            "differing": values.n_differing,
            "nan": values.n_nan,
            "max_abs": _number(values.max_abs),
            "max_at": None if values.max_at is None else list(tensor.index_of(values.max_at)),
            "relative": _number(values.relative),
            "cosine": _number(values.cosine),
            "first": None if values.first is None else list(tensor.index_of(values.first)),
            "first_a": _number(first_a),
            "first_b": _number(first_b),
        }
    return entry


def _meta_json(tensor: Tensor | None) -> dict[str, object] | None:
    return None if tensor is None else {"dtype": tensor.dtype, "shape": list(tensor.shape)}


def _number(value: float | None) -> object:
    """Return a number as a JSON value; NaN and infinities, which JSON lacks, as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
