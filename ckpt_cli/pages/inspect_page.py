"""The page of ``ckpt inspect``: the header, and the details of selected entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckpt_cli.pages.inspect_object import attributes_text, object_blocks, object_json
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Facts,
    Table,
    bytes_text,
    count_text,
    date_text,
    dim_cell,
    draw_text,
    fact_list,
    first_lines,
    list_facts,
    n_text,
)
from ckpt_cli.screen.terminal import Screen, escaped
from core.engine.catalog.attributes import PATHS_ENTRY, ROOT
from core.verbs.inspect.summary import ROLE_TITLES

if TYPE_CHECKING:
    from pathlib import Path

    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.tensor import Tensor
    from core.opening.listing import Listing
    from core.opening.open import Checkpoint
    from core.verbs.inspect.capability import Capability
    from core.verbs.inspect.model_description import ModelDescription
    from core.verbs.inspect.optimizer_states import OptimizerStates
    from core.verbs.inspect.summary import Summary
    from core.verbs.pictures.shards import ShardMap

_MOST_ATTRIBUTED = 4
"""Maximum number of containers and tensors whose attributes are shown above the tree."""


def choose_catalog(summary: Summary, checkpoint: Checkpoint, key: str) -> Catalog:
    """Return the catalog that contains a selected tensor: the view, or that of the rank files."""
    return summary.view if key in summary.view.tensors else checkpoint.catalog


def map_of(summary: Summary, checkpoint: Checkpoint, key: str) -> ShardMap:
    """Return the boxes of a selected tensor.

    Raises:
        CheckpointingException: the metadata of the tensor cannot be read.
    """
    from core.verbs.pictures.shards import shard_map

    return shard_map(choose_catalog(summary, checkpoint, key), key)


def map_blocks(
    summary: Summary, checkpoint: Checkpoint, keys: Sequence[str], *, is_complete: bool
) -> Iterator[Block]:
    """Yield the drawings of some tensors' boxes.

    Args:
        keys: keys of the tensors.
        is_complete: draw all tensors, and list all of their boxes.
    """
    from ckpt_cli.pages.pictures.shards import LISTED, MAPS, draw_keys, map_lines

    def draw(key: str) -> Iterator[Block]:
        shards = map_of(summary, checkpoint, key)
        listed = 0 if is_complete else LISTED
        yield partial(map_lines, shards=shards, listed=listed, hint="; --limit 0 lists all")

    limit = None if is_complete else MAPS
    yield from draw_keys(keys, draw, limit=limit, hint="--limit 0 draws all")


def detail_lines(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: Mapping[str, Tensor],
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
    from ckpt_cli.pages.inspect_tensor import tensor_blocks
    from core.verbs.inspect.preview import first_values, places_of

    # Tensors: an empty line between two of them.
    for number, (key, tensor) in enumerate(tensors.items()):
        if number:
            yield ""
        catalog = choose_catalog(summary, checkpoint, key)
        values = first_values(checkpoint.store, catalog, key, n_values) if n_values else None
        attributes = summary.attributes.get(key, {})
        places = places_of(catalog, key)
        blocks = tensor_blocks(key, tensor, places, values, attributes=attributes)
        yield from first_lines(screen, list(draw_text(screen, blocks)), limit)
    entries = [(key, object_json(summary.view.objects[key], checkpoint)) for key in objects]
    yield from draw_text(screen, object_blocks(entries, limit=limit))


def header_blocks(summary: Summary, checkpoint: Checkpoint) -> Iterator[Block]:
    """Yield facts about the checkpoint and a table of its groups."""
    yield Facts(header_facts(summary, checkpoint))
    # The groups (model, moments, …), with a total if there are several.
    yield ""
    rows: list[list[Cell | str]] = []
    for group in (*summary.groups, *([summary.total] * (len(summary.groups) > 1))):
        figures = [f"{group.n_tensors:,}", count_text(group.n_elements), bytes_text(group.n_bytes)]
        title = ROLE_TITLES.get(group.name, group.name)
        rows.append([title, *figures, Cell(", ".join(group.dtypes), ("cyan",))])
    yield Table(rows, align="<>>><", head=("", "tensors", "elements", "bytes"), fits=True)
    if summary.iterations is not None:
        yield ""
        yield _iteration_table(summary.iterations, shown=checkpoint.path)
        if summary.iterations.rest is not None:
            yield dim_cell(f"… and {summary.iterations.rest}")


def _iteration_table(iterations: Listing, *, shown: Path) -> Table:
    """Return the iterations of a training root by date and size, which reads no metadata.

    Args:
        shown: the checkpoint whose page this is, in one of them.
    """
    rows: list[list[Cell | str]] = []
    for item in iterations.checkpoints:
        remark = Cell("← this one", ("bold",)) if shown.is_relative_to(item.path) else Cell("")
        if item.format is None:
            remark = Cell("incomplete, or not a checkpoint", ("red",))
        n_bytes, n_files = item.n_bytes, item.n_files
        rows.append(
            [
                str(item.iteration),
                Cell(date_text(item.modified) if item.modified else "", ("dim",)),
                "" if n_bytes is None else bytes_text(n_bytes),
                "" if n_files is None else f"{n_files:,}",
                remark,
            ]
        )
    return Table(rows, align="><>><", head=("iteration", "modified", "size", "files"))


def optimizer_facts(states: OptimizerStates) -> Facts:
    """Return the line below the tree for an optimizer whose tensors are not listed.

    For example ``Adam: exp_avg, exp_avg_sq, fp32 masters, 3 × 1.21 GiB (--optim shows them)``.
    """
    # States of equal size share a number.
    names_of: dict[int, list[str]] = {}
    for name, n_bytes in states.bytes_of.items():
        names_of.setdefault(n_bytes, []).append(escaped(name))
    texts = []
    for n_bytes, names in names_of.items():
        times = f"{len(names)} × " if len(names) > 1 else ""
        texts.append(f"{', '.join(names)}, {times}{bytes_text(n_bytes)}")
    algorithm = f"{states.algorithm}: " if states.algorithm else ""
    text = f"{algorithm}{'; '.join(texts)} (--optim shows them)"
    return Facts([("optimizer", text)])


def header_facts(summary: Summary, checkpoint: Checkpoint) -> list[tuple[str, Cell | str]]:
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
    model = model_text(summary.description)
    if model:
        pairs.append(("model", escaped(model)))
    pairs.append(("optimizer", summary.optimizer_title or "none"))
    pairs.append(("files", f"{n_text(summary.n_files, 'file')}, {bytes_text(summary.file_bytes)}"))
    extras = sorted(checkpoint.catalog.files)
    if extras:
        names = ", ".join(extras if len(extras) <= 4 else (*extras[:3], "…"))
        pairs.append(("", escaped(f"{n_text(len(extras), 'other file')}: {names}")))
    if summary.n_objects:
        pairs.append(("objects", f"{summary.n_objects:,}, listed by --flat"))
    pairs += _attribute_facts(summary)
    # What can be done with it, what no conversion takes along, and notes.
    pairs += capability_facts(summary)
    if checkpoint.catalog.dropped:
        from core.verbs.convert.report.dropped import group_by_reason

        reasons = group_by_reason(checkpoint.catalog.dropped)
        pairs += list_facts("not carried", list(map(str, reasons)), "yellow")
    return [*pairs, *fact_list("note", summary.notes, "yellow")]


def _attribute_facts(summary: Summary) -> list[tuple[str, Cell | str]]:
    """Return a fact for each of the first containers and tensors with attributes, the root first.

    Entries of a state dict that hold attributes are among its objects, but are shown here as well.
    """
    paths = sorted(summary.attributes, key=lambda path: path != ROOT)
    texts = [
        f"{path}{': ' if path else ''}{attributes_text(summary.attributes[path])}"
        for path in paths[:_MOST_ATTRIBUTED]
    ]
    pairs = list(fact_list("metadata", texts))
    if len(paths) > len(texts):
        text = f"… those of {len(paths) - len(texts):,} more, shown by {PATHS_ENTRY} as KEY"
        pairs.append(("", Cell(text, ("dim",))))
    return pairs


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


def capability_facts(summary: Summary) -> Iterator[tuple[str, Cell | str]]:
    """Yield what can be done with a checkpoint, and why not, a fact for each."""
    for number, capability in enumerate(summary.capabilities):
        yield "" if number else "can", _capability_cell(capability)


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


def model_text(model: ModelDescription) -> str:
    """Return the model's family and sizes on one line; empty if nothing is known.

    For example ``llama · 8.03 B parameters · 32 layers · hidden 4096 · 32 heads in 8 groups``.
    """
    # Sizes: the text before and after each. Groups of one head each are ordinary attention.
    heads = " head" if model.n_heads == 1 else " heads"
    if model.n_groups is not None and model.n_groups != model.n_heads:
        heads += f" in {n_text(model.n_groups, 'group')}"
    experts = " experts"
    if model.expert_ffn_size not in (None, model.ffn_size):
        experts += f" of {model.expert_ffn_size}"
    if model.n_experts_per_token is not None:
        experts += f", top {model.n_experts_per_token}"
    sizes = (
        ("", None if model.n_parameters is None else count_text(model.n_parameters), " parameters"),
        ("", model.n_layers, " layer" if model.n_layers == 1 else " layers"),
        ("hidden ", model.hidden_size, ""),
        ("", model.n_heads, heads),
        ("SwiGLU " if model.is_swiglu else "MLP ", model.ffn_size, ""),
        ("", model.n_experts, experts),
    )
    texts = [model.family] if model.family else []
    texts += [f"{before}{size}{after}" for before, size, after in sizes if size is not None]
    # The vocabulary, with its padded size if that differs, and tied embeddings.
    padded = model.padded_vocab_size
    vocab = model.vocab_size or padded
    if vocab is not None:
        is_padded = padded not in (None, vocab)
        texts.append(f"vocabulary {vocab}{f' padded to {padded}' if is_padded else ''}")
    if model.is_tied:
        texts.append("tied embeddings")
    return " · ".join(texts)
