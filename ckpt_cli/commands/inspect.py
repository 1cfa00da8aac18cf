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
     "iterations": [{"path": str, "format": str | null, "title": str | null, "iteration": int,
                     "files": int | null, "bytes": int | null, "modified": str}],
     "is_unsharded": bool, "notes": [str], "dropped": [str],
     "attributes": {path: {name: any}},
     "problems": [{"code": str, "message": str, "file": str, "key": str, "rank": str, "hint": str,
                   "span": [int, int]}],
     "tensors": [{"key": str, "dtype": str, "shape": [int], "bytes": int, "group": str,
                  "attributes": {name: any},
                  "places": [{"offset": [int], "shape": [int],
                              "file": str | null, "rank": {"tp": int, …},
                              "array": str | null, "at": [int], "array_shape": [int],
                              "byte_offset": int | null, "item_bytes": int | null,
                              "strides": [int] | null, "bytes": int,
                              "encoding": str | null, "stored_bytes": int | null}],
                  "map": {"dtype": str, "shape": [int], "cut_axes": [int],
                          "boxes": [{"offset": [int], "shape": [int], "ranks": [str],
                                     "files": [str], "bytes": int}]},
                  "values": [number | "nan" | "inf" | "-inf" | [re, im]],
                  "stats": {"min": number | null, "max": number | null, "mean": number | null,
                            "std": number | null, "nan": int, "inf": int, "zeros": int,
                            "histogram": {"negative": {exponent: int},
                                          "positive": {exponent: int}}} | null}],
     "objects": [{"key": str, "value": any}],
     "sizes": {"model": NODE, "optimizer": NODE},
     "rank_grid": {"tp": int, "pp": int, "vpp": int, "ep": int,
                   "cells": [{"tp": int, "pp": int, "ep": int, "layers": str, "experts": str,
                              "others": [str], "model_bytes": int, "optimizer_bytes": int,
                              "files": [str], "missing": bool}]}}

``sizes`` is present with ``--sizes``; NODE is ``{"name": str, "bytes": int, "tensors": int,
"children": [NODE]}``, with repeated modules folded into one (``layers.[0-31]``). ``rank_grid`` is
present with ``--ranks``; ``layers`` and ``experts`` are global numbers such as ``0-3, 8-11``.
``architecture`` describes the model from its training arguments or its ``config.json``;
``parameters`` counts each parameter once, without optimizer, padding and tied copies.
``places`` is present in tensors selected by KEY, ``map`` with ``--map``: its boxes are ordered by
offset, and several ``ranks`` or ``files`` of a box hold copies. ``values`` is present with
``--values``, ``value`` in objects selected by KEY, where a value inside an object has its path as
key (``args.hidden_size``).
``stats`` is present in tensors measured by ``--stats``; it is null if the dtype has no numbers
(float4). ``min``, ``max``, ``mean`` and ``std`` (divided by n, not n - 1) are those of the finite
elements, of their magnitudes if these are complex; null without such elements. ``histogram``
counts the finite elements other than 0 by sign and exponent e, 2**e <= abs(x) < 2**(e + 1), without
empty bins. A place whose
``file`` is null is filled with zeros (vocabulary padding). ``byte_offset`` is that of the array's
first element or, if ``item_bytes`` is not null, of the container item that holds the array.
``encoding`` names the codec of an array that is not stored as plain numbers; ``stored_bytes`` is
its length in the file, if the metadata contain it. ``beside`` lists the files that a conversion
copies along (configurations, tokenizers), ``dropped`` the entries that no conversion carries over,
each with the reason. ``attributes`` are what the checkpoint says about its containers (metadata of
a file or an index, of a group; "" is the root) and, where there are any, about a tensor.
``iterations`` lists the newest ten of the training root that PATH is, if it has several; its fields
are those of a directory with checkpoints, below.

A damaged checkpoint is shown as far as it can be read; ``problems``, whose fields other than
``code`` and ``message`` are present where they are known, says what is missing, and the exit code
is that of the first problem (3; 6 if the system refused to read). If nothing can be read there is
only an ``error`` object.

A directory that is not a checkpoint but contains some is a success; it prints them, the newest
first::

    {"schema": "ckpt.inspect-list/1", "path": str,
     "checkpoints": [{"path": str, "format": str | null, "title": str | null,
                      "iteration": int | null, "files": int | null, "bytes": int | null,
                      "modified": str}],
     "rest": str | null}

``iteration`` is that in the directory's name, ``modified`` the time (ISO 8601, UTC) of the newest
file; ``files`` and ``bytes`` are null where there are too many files to count. ``rest`` says where
the search stopped, null if it looked everywhere. With KEY or ``--iteration`` such a directory is an
error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.pages.damage import damage_blocks, damage_json
from ckpt_cli.pages.inspect_page import detail_lines, header_blocks, map_blocks, optimizer_facts
from ckpt_cli.screen.blocks import (
    Cell,
    bytes_text,
    draw_text,
    first_lines,
    more_lines,
    shape_text,
    table,
    title_cell,
    tree_rows,
)
from ckpt_cli.screen.failure import failure_of
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from ckpt_cli.workers.current_team import default_memory
from ckpt_cli.workers.progress import show_progress
from core.engine.catalog.key_patterns import LIST_THEM
from core.engine.catalog.tensor import Tensor
from core.engine.plan.memory import limit_objects
from core.errors import NoEffect, UnsupportedError, UsageError, refuse_without_effect
from core.megatron.optimizer.form import role_of
from core.opening.damaged import open_readable_part
from core.opening.iterations import CHECKPOINTS_BELOW
from core.opening.open import FILL, Checkpoint
from core.progress import Phase, begin_phase, report_bytes
from core.values import changed_fields
from core.verbs.inspect.optimizer_states import is_state, states_of
from core.verbs.inspect.select import model_tensors, require_key, select_entries, with_selected
from core.verbs.inspect.summary import ROLES, Summary, bare_key, path_of, summarize
from core.verbs.inspect.tree import build_tree

if TYPE_CHECKING:
    from ckpt_cli.options.inspect import InspectOptions
    from core.engine.numbers.statistics import ValueStatistics
    from core.verbs.inspect.select import SelectedEntries
    from core.verbs.pictures.ranks import RankGrid

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
    _check_pictures(options)
    unread = NoEffect(("threads",), not options.stats, "no tensor data is read", "add --stats")
    refuse_without_effect(changed_fields(options), [unread])
    if options.report is not None:
        from ckpt_cli.html_report.page import announce_report, check_html_path

        check_html_path(options.report)
    with limit_objects(options.memory or default_memory()):
        # A KEY may select something that only one rank has: read every rank file then. So does a
        # report, which shows every shard.
        try:
            with show_progress(progress_form(options.progress, is_quiet=False)) as progress:
                begin_phase(progress, Phase.OPENING)
                checkpoint = open_readable_part(
                    options.path,
                    iteration=options.iteration,
                    samples=not (options.all or options.keys or options.stats or options.report),
                    missing_chunks=options.missing_chunks or FILL,
                )
        except UnsupportedError as err:
            if (
                err.rule != CHECKPOINTS_BELOW
                or options.keys
                or options.iteration is not None
                or options.report
            ):
                raise
            _print_listing(options)
            return 0
        try:
            _print_checkpoint(checkpoint, options)
        finally:
            checkpoint.store.close()
    exit_code = 0
    if checkpoint.problems:
        # The page is the output; whoever reads errors only sees why the exit code is not 0.
        sys.stdout.flush()
        failure = failure_of(checkpoint.problems[0])
        print(failure.text(screen_of(sys.stderr), is_one_line=True), file=sys.stderr)
        exit_code = failure.exit_code
    if options.report is not None:
        announce_report(options.report)
    return exit_code


def _print_checkpoint(checkpoint: Checkpoint, options: InspectOptions) -> None:
    """Print the page, or the JSON object, of a checkpoint that may be damaged.

    Raises:
        UsageError: a KEY matches nothing, or an option does not apply.
        CheckpointingException: values cannot be read.
    """
    screen = screen_of(sys.stdout)
    # Pictures in the terminal do not show the possible conversions, which take time to find out.
    is_picture = options.sizes or options.ranks or options.map
    with show_progress(progress_form(options.progress, is_quiet=False)) as progress:
        begin_phase(progress, Phase.PLANNING)
        summary = summarize(
            checkpoint,
            with_capabilities=not is_picture or options.json or options.report is not None,
        )
    if options.values and not options.keys:
        raise require_key(summary, f"--values {options.values}")
    if options.map and not options.keys:
        raise require_key(summary, "--map")
    grid = _grid_of(checkpoint, summary) if options.ranks else None
    # Select the entries, and measure the values if requested.
    try:
        selection = select_entries(checkpoint, summary, options.keys)
    except UsageError:
        # Damage may be why a KEY matches nothing.
        if not options.json:
            print_page(draw_text(screen, damage_blocks(checkpoint.problems)), None)
        raise
    summary = with_selected(summary, selection)
    tensors = selection.tensors
    if options.map and not tensors:
        raise UsageError("--map needs tensors, but KEY selects only objects", hint=LIST_THEM)
    layers = _measure(checkpoint, summary, tensors, options)
    statistics: dict[str, ValueStatistics | None] = {}
    if layers:
        from core.verbs.inspect.stats import merged_layers

        statistics = merged_layers(layers)
    if options.report is not None:
        from ckpt_cli.html_report.inspect_report import inspect_html
        from ckpt_cli.html_report.page import write_report

        html = inspect_html(checkpoint, summary, tensors, statistics, layers)
        write_report(options.report, html, is_quiet=True)
    if options.json:
        from ckpt_cli.pages.inspect_json import inspect_json
        from ckpt_cli.pages.pictures.ranks import grid_json
        from ckpt_cli.pages.pictures.sizes import sizes_json
        from core.verbs.pictures.sizes import sizes_of

        fields = inspect_json(
            checkpoint,
            summary,
            dict(_in_order(tensors, options.sort)[: options.limit or None]),
            list(selection.objects),
            is_selected=bool(options.keys),
            n_values=options.values,
            statistics=statistics,
            has_maps=options.map,
        )
        fields["problems"] = damage_json(checkpoint.problems)
        if options.sizes:
            fields["sizes"] = sizes_json(*sizes_of(summary.view))
        if grid is not None:
            fields["rank_grid"] = grid_json(grid)
        print(json.dumps(fields))
        return
    # A pager shows everything, whatever the length.
    pager = None if options.no_pager else pager_of(sys.stdout)
    limit = (0 if pager else TREE_LIMIT) if options.limit is None else options.limit
    if options.sizes or options.ranks:
        notes = _note_lines(screen, checkpoint, selection.notes)
        lines = _picture_lines(screen, summary, grid, options, limit=limit)
        print_page(chain(notes, lines), pager)
        return
    if options.map:
        notes = _note_lines(screen, checkpoint, selection.notes)
        is_complete = options.limit == 0
        blocks = map_blocks(summary, checkpoint, list(tensors), is_complete=is_complete)
        drawn = list(draw_text(screen, blocks))
        print_page(chain(notes, first_lines(screen, drawn, options.limit or 0)), pager)
        return
    lines = _page(checkpoint, summary, selection, statistics, layers, options, limit=limit)
    print_page(lines, pager)


def _page(
    checkpoint: Checkpoint,
    summary: Summary,
    selection: SelectedEntries,
    statistics: Mapping[str, ValueStatistics | None],
    layers: Mapping[str, tuple[ValueStatistics, ...] | None],
    options: InspectOptions,
    *,
    limit: int,
) -> Iterator[str]:
    """Yield the page: damage and notes, then the statistics or the entries.

    Args:
        statistics, layers: those that were measured, by key.
        limit: as for ``_lines``.
    """
    screen = screen_of(sys.stdout)
    notes = [*selection.notes]
    if statistics and summary.view.is_rank_local:
        notes.append("measured per rank, so data that several ranks hold is counted more than once")
    yield from _note_lines(screen, checkpoint, notes)
    tensors = selection.tensors
    if statistics:
        from ckpt_cli.pages.inspect_stats import stats_lines

        measured = {key: tensor for key, tensor in tensors.items() if key in statistics}
        is_flat = options.tree is False
        lines = stats_lines(
            screen,
            measured,
            statistics,
            layers=layers,
            is_flat=is_flat,
            has_members=bool(options.keys),
            sort=options.sort,
        )
        yield from first_lines(screen, list(lines), options.limit or 0)
        if not options.values:
            return
        yield ""
    is_list = selection.is_searched and not options.values
    objects = list(selection.objects)
    yield from _lines(
        checkpoint, summary, tensors, objects, options, screen, is_list=is_list, limit=limit
    )


def _check_pictures(options: InspectOptions) -> None:
    """Raise if a picture is combined with an option that shows something else.

    Raises:
        UsageError: two options cannot be combined.
    """
    conflicts = {
        "--values": bool(options.values),
        "--stats": options.stats,
        "--tree and --flat": options.tree is not None,
        "--optim": options.optim,
    }
    if options.map:
        flag = subject = "--map"
        conflicts |= {"--sizes": options.sizes, "--ranks": options.ranks}
    elif options.sizes or options.ranks:
        flag = "--sizes" if options.sizes else "--ranks"
        subject = f"{flag} shows the complete checkpoint and"
        conflicts |= {"KEY": bool(options.keys)}
    else:
        return
    other = next((name for name, is_given in conflicts.items() if is_given), None)
    if other is not None:
        raise UsageError(
            f"{subject} cannot be combined with {other}",
            hint=f"run ckpt inspect twice: once with {flag} alone, and once without it",
        )


def _grid_of(checkpoint: Checkpoint, summary: Summary) -> RankGrid:
    """Return the ranks of a checkpoint.

    Raises:
        UsageError: the checkpoint is not laid out by ranks.
    """
    from core.verbs.pictures.ranks import rank_grid

    grid = rank_grid(checkpoint)
    if grid is None:
        raise UsageError(
            "--ranks needs a checkpoint with a Megatron rank layout, but this "
            f"{summary.format} checkpoint has none",
            hint="use --sizes, which works with any checkpoint",
        )
    return grid


def _picture_lines(
    screen: Screen,
    summary: Summary,
    grid: RankGrid | None,
    options: InspectOptions,
    *,
    limit: int,
) -> Iterator[str]:
    """Yield the path and below it the pictures of the checkpoint.

    Args:
        grid: its ranks, if they are drawn.
        limit: maximum number of lines of each; 0 for all.
    """
    from ckpt_cli.pages.pictures.ranks import rank_lines
    from ckpt_cli.pages.pictures.sizes import size_lines
    from core.verbs.pictures.sizes import sizes_of

    yield screen.styled(escaped(summary.path), "bold")
    if options.sizes:
        yield ""
        lines = list(size_lines(screen, *sizes_of(summary.view), sort=options.sort))
        yield from first_lines(screen, lines, limit)
        if summary.view.is_rank_local:
            note = (
                "note: listed per rank, so data that several ranks hold is counted more than once"
            )
            yield screen.styled(note, "yellow")
    if grid is not None:
        yield ""
        lines = list(rank_lines(screen, grid, folds=options.limit != 0))
        yield from first_lines(screen, lines, limit)


def _note_lines(screen: Screen, checkpoint: Checkpoint, notes: Iterable[str]) -> Iterator[str]:
    """Yield the damage of the checkpoint, and notes."""
    yield from draw_text(screen, damage_blocks(checkpoint.problems))
    for note in notes:
        yield screen.styled(escaped(f"note: {note}"), "yellow")


def _print_listing(options: InspectOptions) -> None:
    """Print the checkpoints in a directory that is not one itself.

    Raises:
        UnsupportedError: there are none.
    """
    from ckpt_cli.pages.inspect_listing import listing_json, listing_lines
    from core.opening.listing import list_checkpoints

    listing = list_checkpoints(options.path)
    if not listing.checkpoints:
        # A root whose tracker names a missing iteration, for example.
        raise UnsupportedError(
            "not a checkpoint, and no checkpoint was found below it"
            + (f"; {listing.rest}" if listing.rest else ""),
            file=str(options.path),
            hint="pass a directory that contains a checkpoint's files",
        )
    if options.json:
        print(json.dumps(listing_json(options.path, listing)))
        return
    limit = TREE_LIMIT if options.limit is None else options.limit
    lines = listing_lines(screen_of(sys.stdout), options.path, listing, limit=limit)
    print_page(lines, None if options.no_pager else pager_of(sys.stdout))


def _measure(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: Mapping[str, Tensor],
    options: InspectOptions,
) -> dict[str, tuple[ValueStatistics, ...] | None]:
    """Return the descriptions that ``--stats`` requests, by key: of KEY's tensors or of the model.

    A tensor in which layers are stacked has one for each layer.

    Raises:
        UsageError: KEY selects no tensor, or an option does not apply.
        CheckpointingException: a tensor cannot be read.
    """
    if not options.stats:
        return {}
    chosen = tensors if options.keys or options.optim else model_tensors(summary)
    if not chosen:
        raise UsageError(
            "--stats needs tensors, but "
            + (
                "KEY selects only objects"
                if options.keys
                else "the checkpoint has no model tensors"
            ),
            hint=LIST_THEM,
        )
    from core.verbs.inspect.stats import measure_layers

    with show_progress(progress_form(options.progress, is_quiet=False)) as progress:
        return measure_layers(
            checkpoint,
            summary.view,
            chosen,
            threads=options.threads,
            memory_bytes=options.memory or default_memory(),
            progress=report_bytes(progress, Phase.MEASURING),
        )


def _lines(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: Mapping[str, Tensor],
    objects: list[str],
    options: InspectOptions,
    screen: Screen,
    *,
    is_list: bool,
    limit: int,
) -> Iterator[str]:
    """Yield the page: details of a few selected entries, a list, or a header with a tree.

    Args:
        is_list: list the selected entries, even if they are few.
        limit: maximum number of lines of a tree, and of the details of an entry; 0 for all.
    """
    # A few selected entries: all details of each.
    is_few = len(tensors) + len(objects) <= DETAILED and not is_list
    if options.keys and (is_few or options.values):
        yield from detail_lines(
            checkpoint, summary, tensors, objects, screen, n_values=options.values, limit=limit
        )
        return
    # More selected entries, or --flat: a list, which has no limit by default.
    if options.tree is False or (options.tree is None and options.keys):
        from ckpt_cli.pages.inspect_object import object_json, value_cell

        rows = [
            [
                Cell(escaped(key)),
                Cell(tensor.dtype, ("cyan",)),
                Cell(shape_text(tensor.shape)),
                Cell(bytes_text(tensor.n_bytes), ("dim",)),
            ]
            for key, tensor in _in_order(tensors, options.sort)
        ]
        object_keys = sorted(objects) if options.sort else objects
        # Objects that only KEY selects are shown by their values, if nothing has to be read.
        items = summary.view.objects
        values = {
            key: object_json(items[key], checkpoint)
            for key in object_keys
            if options.keys and items[key].raw_key is None
        }
        rows += [[Cell(escaped(key)), value_cell(values.get(key, {}))] for key in object_keys]
        # Keys of a list are there to be copied: they are never shortened.
        lines = list(table(screen, rows, align="<<<>", fits=True, keeps_names=True))
        yield from first_lines(screen, lines, options.limit or 0)
        return
    # A tree of the tensors, the model first; below a header, unless KEY selected only some of them.
    # The optimizer is one line, unless there is nothing else.
    view = summary.view
    states: dict[str, Tensor] = {}
    if not options.keys:
        header = (title_cell(summary.path), *header_blocks(summary, checkpoint), "")
        yield from draw_text(screen, header)
        if not options.optim:
            states = {key: t for key, t in tensors.items() if is_state(bare_key(key, view))}
        if len(states) == len(tensors):
            states = {}
    shown = [(key, tensor) for key, tensor in tensors.items() if key not in states]
    shown.sort(key=lambda entry: ROLES.index(role_of(bare_key(entry[0], view))))
    nodes = build_tree(
        dict(shown), split=lambda key: path_of(key, view), folds_roots=view.is_rank_local
    )
    rows = list(tree_rows(nodes, sort=options.sort))
    # Only the rows that are shown are laid out: of 10⁵ names, the others would take seconds.
    yield from table(screen, rows[: limit or None], align="<<<>", fits=True)
    if limit:
        yield from more_lines(screen, len(rows) - limit)
    if states:
        states_facts = optimizer_facts(states_of(states, bare=lambda key: bare_key(key, view)))
        yield from draw_text(screen, [states_facts])


def _in_order(tensors: Mapping[str, Tensor], sort: str | None) -> list[tuple[str, Tensor]]:
    """Return the tensors sorted by ``size``, the largest first, by ``name``, or as stored."""
    if sort == "size":
        return sorted(tensors.items(), key=lambda entry: -entry[1].n_bytes)
    return sorted(tensors.items()) if sort == "name" else list(tensors.items())
