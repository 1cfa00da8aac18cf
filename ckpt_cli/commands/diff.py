"""``ckpt diff``: whether two checkpoints hold the same, and what matters most if not.

Exits with 0 if they do, with 1 if they do not, or if something of them could not be compared.

``--json`` prints one object (schema ``ckpt.diff/1``; fields may be added, none change meaning)::

    {"schema": "ckpt.diff/1", "same": bool, "method": "read" | "fingerprints" | "metadata", "by_fingerprint": int,
     "tolerance": {"rtol": float, "atol": float, "equal_nan": bool} | null,
     "a": {"path": str, "format": str, "iteration": int | null, "parallel": str | null}, "b": …,
     "counts": {"equal": int, "close": int, "unread": int, "values": int, "dtype": int, "shape": int, "only_a": int,
                "only_b": int},
     "tensors": [{"key": str, "kind": str, "group": str, "a": {"dtype": str, "shape": [int]} | null, "b": …,
                  "values": null | {"elements": int, "differing": int, "nan": int, "max_abs": number | null,
                                    "max_at": [int] | null, "relative": number | null, "cosine": number | null,
                                    "first": [int] | null, "first_a": number | null, "first_b": number | null},
                  "is_cast": bool | null}],
     "entries": [{"path": str, "kind": "changed" | "only_a" | "only_b", "a": str | null, "b": str | null}],
     "layout_entries": [… as entries, which do not count],
     "left_out": [str], "notes": [str], "entries_compared": int, "bytes_read": int, "seconds": float}

``tensors`` lists those that are not equal, what matters most first. A kind is one of those in ``counts``: ``close`` are
equal within the tolerance only, ``unread`` have equal names, shapes and types and were not read. ``nan`` counts the
elements that are NaN on one side, ``relative`` is |A-B| / |A| in the Euclidean norm, ``is_cast`` says whether the
narrower of two dtypes holds the wider one's values, rounded. ``by_fingerprint`` counts tensors that were not read,
because the fingerprints in both manifests are equal. ``launch`` (``ckpt_cli.workers.current_team``) is there where
several workers compared. Numbers that JSON has not are "inf", "-inf" and "nan".
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_cli.options.values import check_rules, size_in_bytes
from ckpt_cli.pages.diff_page import page_of, verdict_line
from ckpt_cli.screen.terminal import screen_of
from ckpt_cli.workers.current_team import launch_of, team, worker_threads
from ckpt_cli.workers.progress import progress_bar
from core.diff.result import KINDS
from core.diff.run import DiffJob, diff
from core.errors import UsageError
from core.numbers.difference import Tolerance
from core.team.protocol import is_lead

if TYPE_CHECKING:
    from ckpt_cli.options.diff import DiffOptions
    from core.catalog.catalog import TensorMeta
    from core.diff.result import Diff, TensorDiff
    from core.diff.sides import Side

_LIMIT = 10


def run_diff(options: DiffOptions) -> int:
    """Runs the command; returns the exit code."""
    job = _job(options)
    with progress_bar(is_wanted=not (options.quiet or options.json)) as progress:
        found = diff(job, progress=progress, team=team())
    if is_lead(team()):
        _report(found, options)
    return 0 if found.is_same else 1


def _report(found: Diff, options: DiffOptions) -> None:
    if options.json:
        print(json.dumps(_as_json(found)))
    else:
        screen = screen_of(sys.stdout)
        if options.quiet:
            print(verdict_line(screen, found))
        else:
            limit = _LIMIT if options.limit is None else options.limit
            for line in page_of(screen, found, limit=limit, is_flat=options.flat):
                print(line)


def _job(options: DiffOptions) -> DiffJob:
    """What is asked for.

    Raises:
        UsageError: options contradict each other.
    """
    has_tolerance = options.rtol is not None or options.atol is not None
    if options.nan_differs and not has_tolerance:
        raise UsageError("--nan-differs is for comparing by value", hint="give --rtol or --atol with it")
    if options.stat_only and (has_tolerance or options.read):
        raise UsageError("--stat-only reads no values", hint="leave --rtol, --atol and --read out")
    check_rules(options.rules)
    rule = Tolerance(options.rtol or 0.0, options.atol or 0.0, not options.nan_differs) if has_tolerance else None
    defaults = DiffJob(a=options.a, b=options.b)
    return DiffJob(
        a=options.a,
        b=options.b,
        iteration_a=options.iteration,
        iteration_b=options.iteration_b,
        missing_chunks=options.missing_chunks or defaults.missing_chunks,
        rule=rule,
        reads=not options.stat_only,
        believes=not options.read,
        include=tuple(options.include or ()),
        exclude=tuple(options.exclude or ()),
        strip_prefix=tuple(options.strip_prefix or ()),
        with_optimizer=not options.no_optim,
        with_entries=not options.tensors_only,
        rules=options.rules,
        threads=options.threads or worker_threads() or defaults.threads,
        memory_bytes=defaults.memory_bytes if options.memory is None else size_in_bytes(options.memory),
    )


def _as_json(found: Diff) -> dict[str, object]:
    """The object of ``--json``; the module's docstring is its schema."""
    return {
        "schema": "ckpt.diff/1",
        "same": found.is_same,
        "method": _method(found),
        "by_fingerprint": found.n_by_fingerprint,
        "tolerance": None if found.rule is None else asdict(found.rule),
        "a": _side_json(found.a),
        "b": _side_json(found.b),
        "counts": {kind: len(found.of_kind(kind)) for kind in reversed(KINDS)},
        "tensors": [_tensor_json(one) for one in found.tensors if one.kind not in ("equal", "unread")],
        "entries": [asdict(entry) for entry in found.entries],
        "layout_entries": [asdict(entry) for entry in found.of_layout],
        "left_out": list(found.left_out),
        "notes": list(found.notes),
        "entries_compared": found.n_entries,
        "bytes_read": found.read_bytes,
        "seconds": round(found.seconds, 3),
    } | launch_of(found.figures)


def _method(found: Diff) -> str:
    """How it was found out; ``fingerprints`` if no tensor had to be read."""
    if not found.is_read:
        return "metadata"
    return "fingerprints" if found.n_by_fingerprint and not found.read_bytes else "read"


def _side_json(side: Side) -> dict[str, object]:
    return {
        "path": str(side.source.path),
        "format": side.source.format.name,
        "iteration": side.source.iteration,
        "parallel": None if side.topology is None else str(side.topology),
    }


def _tensor_json(one: TensorDiff) -> dict[str, object]:
    values = one.values
    made: dict[str, object] = {
        "key": one.key,
        "kind": one.kind,
        "group": one.role,
        "a": _meta_json(one.a),
        "b": _meta_json(one.b),
        "values": None,
        "is_cast": one.is_cast,
    }
    if values is not None:
        first_a, first_b = one.first or (None, None)
        made["values"] = {
            "elements": values.n_elements,
            "differing": values.n_differing,
            "nan": values.n_nan,
            "max_abs": _number(values.max_abs),
            "max_at": None if values.max_at is None else list(one.index_of(values.max_at)),
            "relative": _number(values.relative),
            "cosine": _number(values.cosine),
            "first": None if values.first is None else list(one.index_of(values.first)),
            "first_a": _number(first_a),
            "first_b": _number(first_b),
        }
    return made


def _meta_json(meta: TensorMeta | None) -> dict[str, object] | None:
    return None if meta is None else {"dtype": meta.dtype, "shape": list(meta.shape)}


def _number(value: float | None) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
