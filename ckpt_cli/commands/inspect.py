"""``ckpt inspect``: show what a checkpoint contains.

``--json`` prints one object (schema ``ckpt.inspect/1``; fields may be added, none change meaning)::

    {"schema": "ckpt.inspect/1", "path": str,
     "format": str, "title": str, "version": str | null, "iteration": int | null,
     "files": int, "unopened_files": int, "file_bytes": int, "beside": [str],
     "parallel": {"tp": int, …} | {}, "ranks": int | null, "model": {argument: value},
     "architecture": {"family": str | null, "parameters": int | null, "layers": int | null,
                      "hidden": int | null, "heads": int | null, "groups": int | null,
                      "ffn": int | null, "swiglu": bool | null, "experts": int | null,
                      "experts_per_token": int | null, "expert_ffn": int | null,
                      "vocabulary": int | null, "padded_vocabulary": int | null,
                      "tied": bool | null},
     "groups": [{"name": "model" | "moments" | "masters" | "other",
                 "tensors": int, "elements": int, "bytes": int, "dtypes": {dtype: bytes}}],
     "totals": {"tensors": int, "elements": int, "bytes": int, "objects": int},
     "optimizer": {"format": str, "title": str} | null,
     "can": [{"action": "convert" | "reshard", "possible": bool,
              "to": [format], "why": str | null}],
     "is_unsharded": bool, "notes": [str],
     "tensors": [{"key": str, "dtype": str, "shape": [int], "bytes": int, "group": str,
                  "places": [{"offset": [int], "shape": [int],
                              "file": str | null, "rank": {"tp": int, …},
                              "array": str | null, "at": [int], "array_shape": [int],
                              "byte_offset": int | null, "item_bytes": int | null,
                              "strides": [int] | null, "bytes": int,
                              "encoding": str | null, "stored_bytes": int | null}],
                  "values": [number | "nan" | "inf" | "-inf" | [re, im]]}],
     "objects": [{"key": str, "value": any}]}

``architecture`` describes the model from its training arguments or its ``config.json``;
``parameters`` counts each parameter once, without optimizer, padding and tied copies.
``places`` is present in tensors selected by KEY, ``values`` with ``--values``, ``value`` in objects
selected by KEY. A place whose ``file`` is null is filled with zeros (vocabulary padding).
``byte_offset`` is that of the array's first element or, if ``item_bytes`` is not null, of the
container item that holds the array. ``encoding`` names the codec of an array that is not stored as
plain numbers; ``stored_bytes`` is its length in the file, if the metadata contain it. ``beside``
lists the files that a conversion copies along (configurations, tokenizers).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.pages.inspect_json import inspect_json
from ckpt_cli.pages.inspect_page import detail_lines, header_lines, optimizer_lines
from ckpt_cli.screen.blocks import (
    Cell,
    bytes_text,
    first_lines,
    shape_text,
    table,
    tree_rows,
)
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.key_patterns import LIST_THEM, matching
from core.errors import UsageError
from core.inspect.optimizer_states import is_state, states_of
from core.inspect.summary import ROLES, Summary, bare_key, path_of, summarize
from core.inspect.tree import tree_of
from core.megatron.optimizer.form import role_of
from core.opening.open import FILL, Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from ckpt_cli.options.inspect import InspectOptions

TREE_LIMIT = 200
"""Default number of lines of a tree, and of the details of an entry, without a pager."""
DETAILED = 8
"""Maximum number of selected entries that are shown in detail; more are listed."""


def inspect(options: InspectOptions) -> int:
    """Run ``ckpt inspect`` and return the exit code.

    Raises:
        UsageError: the path does not exist, or a KEY matches nothing.
        CheckpointingException: the checkpoint cannot be read.
    """
    # A KEY may select something that only one rank has: read every rank file then.
    checkpoint = open_checkpoint(
        options.path,
        iteration=options.iteration,
        samples=not options.all and not options.keys,
        missing_chunks=options.missing_chunks or FILL,
    )
    try:
        summary = summarize(checkpoint)
        tensors, objects = _select_entries(summary.view, checkpoint.catalog, options.keys)
        if options.json:
            listed = _in_order(tensors, options.sort)[: options.limit or None]
            fields = inspect_json(
                checkpoint,
                summary,
                listed,
                objects,
                is_selected=bool(options.keys),
                n_values=options.values,
            )
            print(json.dumps(fields))
            return 0
        # A pager shows everything, whatever the length.
        pager = None if options.no_pager else pager_of(sys.stdout)
        limit = (0 if pager else TREE_LIMIT) if options.limit is None else options.limit
        screen = screen_of(sys.stdout)
        lines = _lines(checkpoint, summary, tensors, objects, options, screen, limit=limit)
        print_page(lines, pager)
    finally:
        checkpoint.store.close()
    return 0


def _select_entries(
    view: Catalog, stored: Catalog, patterns: Sequence[str] | None
) -> tuple[list[TensorMeta], list[str]]:
    """Return the tensors and the object keys that match the patterns; all of them without patterns.

    Args:
        view: the catalog that the page shows.
        stored: the catalog of the rank files; their own tensor names match, too.

    Raises:
        UsageError: a pattern matches nothing.
    """
    if not patterns:
        return list(view.tensors.values()), list(view.objects)
    tensors: dict[str, TensorMeta] = {}
    objects: dict[str, None] = {}
    for pattern in patterns:
        tensor_keys = matching(view.tensors, pattern)
        object_keys = matching(view.objects, pattern)
        # "iteration" selects that object of every rank file: "mp_rank_00:iteration", ….
        if not tensor_keys and not object_keys:
            object_keys = matching(view.objects, f"*:{pattern}")
        stored_keys = [] if tensor_keys or stored is view else matching(stored.tensors, pattern)
        if not tensor_keys and not object_keys and not stored_keys:
            raise UsageError(f"no tensor or object matches {pattern!r}", hint=LIST_THEM)
        tensors.update((key, view.tensors[key]) for key in tensor_keys)
        tensors.update((key, stored.tensors[key]) for key in stored_keys)
        objects.update(dict.fromkeys(object_keys))
    return list(tensors.values()), list(objects)


def _lines(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: list[TensorMeta],
    objects: list[str],
    options: InspectOptions,
    screen: Screen,
    *,
    limit: int,
) -> Iterator[str]:
    """Yield the page: details of a few selected entries, a list, or a header with a tree.

    Args:
        limit: maximum number of lines of a tree, and of the details of an entry; 0 for all.
    """
    # A few selected entries: all details of each.
    if options.keys and (len(tensors) + len(objects) <= DETAILED or options.values):
        yield from detail_lines(
            checkpoint, summary, tensors, objects, screen, n_values=options.values, limit=limit
        )
        return
    # More selected entries, or --flat: a list, which has no limit by default.
    if options.tree is False or (options.tree is None and options.keys):
        rows = [
            [
                Cell(escaped(meta.key)),
                Cell(meta.dtype, ("cyan",)),
                Cell(shape_text(meta.shape)),
                Cell(bytes_text(meta.n_bytes), ("dim",)),
            ]
            for meta in _in_order(tensors, options.sort)
        ]
        object_keys = sorted(objects) if options.sort else objects
        rows += [[Cell(escaped(key)), Cell("object", ("dim",))] for key in object_keys]
        # Keys of a list are there to be copied: they are never shortened.
        lines = list(table(screen, rows, align="<<<>", fits=True, keeps_names=True))
        yield from first_lines(screen, lines, options.limit or 0)
        return
    # A tree of the tensors, the model first; below a header, unless KEY selected only some of them.
    # The optimizer is one line, unless there is nothing else.
    view = summary.view
    states: list[TensorMeta] = []
    if not options.keys:
        yield from header_lines(screen, summary, checkpoint)
        yield ""
        if not options.optim:
            states = [meta for meta in tensors if is_state(bare_key(meta.key, view))]
        if len(states) == len(tensors):
            states = []
    hidden = {meta.key for meta in states}
    shown = [meta for meta in tensors if meta.key not in hidden]
    shown.sort(key=lambda meta: ROLES.index(role_of(bare_key(meta.key, view))))
    nodes = tree_of(shown, split=lambda key: path_of(key, view), folds_roots=view.is_rank_local)
    rows = list(tree_rows(nodes, sort=options.sort))
    yield from first_lines(screen, list(table(screen, rows, align="<<<>", fits=True)), limit)
    if states:
        yield from optimizer_lines(screen, states_of(states, bare=lambda key: bare_key(key, view)))


def _in_order(tensors: list[TensorMeta], sort: str | None) -> list[TensorMeta]:
    """Return the tensors sorted by ``size``, the largest first, by ``name``, or as stored."""
    if sort == "size":
        return sorted(tensors, key=lambda meta: -meta.n_bytes)
    return sorted(tensors, key=lambda meta: meta.key) if sort == "name" else tensors
