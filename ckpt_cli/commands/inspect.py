"""``ckpt inspect``: show what a checkpoint contains.

``--json`` prints one object (schema ``ckpt.inspect/1``; fields may be added, none change meaning)::

    {"schema": "ckpt.inspect/1", "path": str,
     "format": str, "title": str, "version": str | null, "iteration": int | null,
     "files": int, "unopened_files": int, "file_bytes": int, "beside": [str],
     "parallel": {"tp": int, …} | {}, "ranks": int | null, "model": {argument: value},
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

from ckpt_cli.pages.inspect_object import object_json
from ckpt_cli.pages.inspect_tensor import number_json, place_json, tensor_lines
from ckpt_cli.screen.blocks import (
    Cell,
    bytes_text,
    count_text,
    fact_list,
    facts,
    first_lines,
    n_text,
    shape_text,
    table,
    tree_rows,
)
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.key_patterns import LIST_THEM, matching
from core.errors import UsageError
from core.inspect.capabilities import Capability
from core.inspect.preview import first_values, places_of
from core.inspect.summary import ROLES, Summary, bare_key, path_of, summarize
from core.inspect.tree import tree_of
from core.megatron.optimizer.form import role_of
from core.opening.open import FILL, Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from ckpt_cli.options.transfer import InspectOptions

TREE_LIMIT = 200
"""Default number of lines of a tree, and of the details of an entry."""
DETAILED = 8
"""Maximum number of selected entries that are shown in detail; more are listed."""

_GROUP_TITLES = {
    "model": "model",
    "moments": "optimizer moments",
    "masters": "master weights",
    "other": "other",
}


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
            print(json.dumps(_as_json(checkpoint, summary, tensors, objects, options)))
            return 0
        screen = screen_of(sys.stdout)
        for line in _lines(checkpoint, summary, tensors, objects, options, screen):
            print(line)
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


def _catalog_of(summary: Summary, checkpoint: Checkpoint, key: str) -> Catalog:
    """Return the catalog that contains a selected tensor: the view, or that of the rank files."""
    return summary.view if key in summary.view.tensors else checkpoint.catalog


def _lines(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: list[TensorMeta],
    objects: list[str],
    options: InspectOptions,
    screen: Screen,
) -> Iterator[str]:
    """Yield the page: details of a few selected entries, a list, or a header with a tree."""
    # A few selected entries: all details of each.
    limit = TREE_LIMIT if options.limit is None else options.limit
    if options.keys and (len(tensors) + len(objects) <= DETAILED or options.values):
        yield from _detail_lines(
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
        yield from first_lines(screen, list(table(screen, rows, align="<<<>")), options.limit or 0)
        return
    # A tree of the tensors, the model first, then the optimizer; below a header, unless KEY
    # selected only some of them.
    if not options.keys:
        yield from _header(screen, summary, checkpoint)
        yield ""
    tensors.sort(key=lambda meta: ROLES.index(role_of(bare_key(meta.key, summary.view))))
    is_rank_local = summary.view.is_rank_local
    nodes = tree_of(
        tensors, split=lambda key: path_of(key, summary.view), folds_roots=is_rank_local
    )
    lines = list(table(screen, list(tree_rows(nodes, sort=options.sort)), align="<<<>"))
    yield from first_lines(screen, lines, limit)


def _detail_lines(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: list[TensorMeta],
    objects: list[str],
    screen: Screen,
    *,
    n_values: int,
    limit: int,
) -> Iterator[str]:
    """Yield the details of tensors (places, first values) and of objects (contents as JSON).

    Args:
        n_values: number of values to show of each tensor.
        limit: maximum number of lines of each entry; 0 for all.
    """
    # Tensors: an empty line between two of them.
    for number, meta in enumerate(tensors):
        if number:
            yield ""
        catalog = _catalog_of(summary, checkpoint, meta.key)
        values = first_values(checkpoint.store, catalog, meta.key, n_values) if n_values else None
        lines = list(tensor_lines(screen, meta, places_of(catalog, meta.key), values))
        yield from first_lines(screen, lines, limit)
    # Objects: the JSON text may contain characters that a terminal obeys.
    for key in objects:
        value = json.dumps(object_json(summary.view.objects[key], checkpoint), indent=2)
        yield screen.styled(escaped(key), "bold")
        yield from first_lines(screen, [escaped(line) for line in value.splitlines()], limit)


def _in_order(tensors: list[TensorMeta], sort: str | None) -> list[TensorMeta]:
    """Return the tensors sorted by ``size``, the largest first, by ``name``, or as stored."""
    if sort == "size":
        return sorted(tensors, key=lambda meta: -meta.n_bytes)
    return sorted(tensors, key=lambda meta: meta.key) if sort == "name" else tensors


def _header(screen: Screen, summary: Summary, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield everything above the tree: facts about the checkpoint and a table of its groups."""
    yield screen.styled(escaped(summary.path), "bold")
    yield from facts(screen, _header_facts(summary, checkpoint))
    # The groups (model, moments, …), with a total if there are several.
    yield ""
    rows: list[list[Cell | str]] = [
        [Cell(text, ("dim",)) for text in ("", "tensors", "elements", "bytes")]
    ]
    for group in summary.groups:
        figures = [f"{group.n_tensors:,}", count_text(group.n_elements), bytes_text(group.n_bytes)]
        rows.append([_GROUP_TITLES[group.name], *figures, Cell(", ".join(group.dtypes), ("cyan",))])
    if len(summary.groups) > 1:
        total = summary.total
        rows.append(
            [
                "total",
                f"{total.n_tensors:,}",
                count_text(total.n_elements),
                bytes_text(total.n_bytes),
            ]
        )
    yield from table(screen, rows, align="<>>><")


def _header_facts(summary: Summary, checkpoint: Checkpoint) -> list[tuple[str, Cell | str]]:
    """Return the facts above the tree, with their labels."""
    # How it is stored.
    version = f", version {escaped(summary.version)}" if summary.version else ""
    pairs: list[tuple[str, Cell | str]] = [
        ("format", f"{summary.format}: {summary.title}{version}")
    ]
    if summary.iteration is not None:
        pairs.append(("iteration", str(summary.iteration)))
    if summary.parallel or summary.n_ranks:
        pairs.append(("parallel", _parallel_text(summary)))
    # What it contains.
    if summary.model:
        pairs.append(("model", escaped(model_text(summary))))
    pairs.append(("optimizer", summary.optimizer_title or "none"))
    pairs.append(("files", f"{n_text(summary.n_files, 'file')}, {bytes_text(summary.file_bytes)}"))
    extras = sorted(checkpoint.catalog.carried)
    if extras:
        names = ", ".join(extras if len(extras) <= 4 else (*extras[:3], "…"))
        pairs.append(("", escaped(f"{n_text(len(extras), 'other file')}: {names}")))
    if summary.n_objects:
        pairs.append(("objects", f"{summary.n_objects:,}, listed by --flat"))
    # What can be done with it, and notes.
    for number, capability in enumerate(summary.capabilities):
        pairs.append(("" if number else "can", _capability_cell(capability)))
    return [*pairs, *fact_list("note", summary.notes, "yellow")]


def _parallel_text(summary: Summary) -> str:
    """Return the parallel sizes and the number of ranks: ``TP 2 · PP 1 · written by 2 ranks``."""
    # TP and PP are always shown, the other sizes only if they differ from their defaults.
    defaults = {"tp": 0, "pp": 0, "etp": summary.parallel.get("tp", 1)}
    texts = [
        f"{name.upper()} {size}"
        for name, size in summary.parallel.items()
        if size != defaults.get(name, 1)
    ]
    if summary.n_ranks:
        texts.append(f"written by {n_text(summary.n_ranks, 'rank')}")
    return " · ".join(texts)


def _capability_cell(capability: Capability) -> Cell:
    """Return an action with its target formats, and whether it is possible or why not."""
    action = (
        f"{capability.action} to {', '.join(capability.targets)}"
        if capability.targets
        else capability.action
    )
    if capability.is_possible:
        return Cell(f"✓ {action}{f' ({capability.why})' if capability.why else ''}", ("green",))
    return Cell(f"✗ {action}: {escaped(capability.why or 'not supported')}", ("dim",))


def model_text(summary: Summary) -> str:
    """Return the model's sizes on one line.

    For example ``4 layers · hidden 64 · 8 heads in 4 groups · vocabulary 300``.
    """
    # Sizes: the text before and after each. Groups of one head each are ordinary attention.
    args = summary.model
    groups = args.get("num_query_groups")
    is_grouped = groups is not None and groups != args.get("num_attention_heads")
    sizes = (
        ("num_layers", "", " layers"),
        ("hidden_size", "hidden ", ""),
        ("num_attention_heads", "", f" heads in {groups} groups" if is_grouped else " heads"),
        ("ffn_hidden_size", "SwiGLU " if args.get("swiglu") is True else "MLP ", ""),
        ("num_experts", "", " experts"),
    )
    texts = [f"{before}{args[name]}{after}" for name, before, after in sizes if name in args]
    # The vocabulary, with its padded size if that differs, and tied embeddings.
    padded = args.get("padded_vocab_size")
    vocab = args.get("vocab_size", padded)
    if vocab is not None:
        is_padded = padded is not None and padded != vocab
        texts.append(f"vocabulary {vocab}{f' padded to {padded}' if is_padded else ''}")
    if args.get("untie_embeddings_and_output_weights") is False:
        texts.append("tied embeddings")
    return " · ".join(texts)


def _as_json(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: list[TensorMeta],
    objects: list[str],
    options: InspectOptions,
) -> dict[str, object]:
    """Return the object of ``--json``; its schema is in the module's docstring."""
    tensors = _in_order(tensors, options.sort)[: options.limit or None]
    return {
        "schema": "ckpt.inspect/1",
        "path": summary.path,
        "format": summary.format,
        "title": summary.title,
        "version": summary.version,
        "iteration": summary.iteration,
        "files": summary.n_files,
        "unopened_files": summary.n_unopened,
        "file_bytes": summary.file_bytes,
        "beside": sorted(checkpoint.catalog.carried),
        "parallel": dict(summary.parallel),
        "ranks": summary.n_ranks,
        "model": dict(summary.model),
        "groups": [
            {
                "name": group.name,
                "tensors": group.n_tensors,
                "elements": group.n_elements,
                "bytes": group.n_bytes,
                "dtypes": dict(group.dtypes),
            }
            for group in summary.groups
        ],
        "totals": {
            "tensors": summary.total.n_tensors,
            "elements": summary.total.n_elements,
            "bytes": summary.total.n_bytes,
            "objects": summary.n_objects,
        },
        "optimizer": summary.optimizer
        and {"format": summary.optimizer, "title": summary.optimizer_title},
        "can": [
            {"action": v.action, "possible": v.is_possible, "to": list(v.targets), "why": v.why}
            for v in summary.capabilities
        ],
        "is_unsharded": summary.is_unsharded,
        "notes": list(summary.notes),
        "tensors": [_tensor_json(checkpoint, summary, meta, options) for meta in tensors],
        "objects": [
            {"key": key, "value": object_json(summary.view.objects[key], checkpoint)}
            if options.keys
            else {"key": key}
            for key in objects
        ],
    }


def _tensor_json(
    checkpoint: Checkpoint, summary: Summary, meta: TensorMeta, options: InspectOptions
) -> dict[str, object]:
    """Return a tensor, with its places and values only if it was selected by KEY."""
    catalog = _catalog_of(summary, checkpoint, meta.key)
    entry: dict[str, object] = {
        "key": meta.key,
        "dtype": meta.dtype,
        "shape": list(meta.shape),
        "bytes": meta.n_bytes,
        "group": role_of(bare_key(meta.key, catalog)),
    }
    if options.keys:
        entry["places"] = [place_json(place) for place in places_of(catalog, meta.key)]
        if options.values:
            values = first_values(checkpoint.store, catalog, meta.key, options.values)
            entry["values"] = [number_json(value) for value in values]
    return entry
