"""What must be true of a model before its layout is changed: it is complete, and its shapes fit its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.errors import CorruptError, MissingShardError
from core.layout_args import Facts
from core.layout_rules import Rules

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_SHOWN = 6


def check_complete(names: Iterable[str], facts: Facts, rules: Rules) -> None:
    """A model has its embeddings, all its layers, and the same parameters in each.

    Raises:
        MissingShardError: something is absent; names it.
    """
    present = set(names)
    for name in (EMBEDDING, *(() if facts.is_tied else (OUTPUT,))):
        if name not in present:
            raise MissingShardError("the tensor is not in the checkpoint", key=name)
    subs_of: dict[int, set[str]] = {}
    for name in present:
        found = rules.layer_of(name)
        if found is not None:
            subs_of.setdefault(found[0], set()).add(found[1])
    missing = sorted(set(range(facts.n_layers)) - set(subs_of))
    if missing:
        raise MissingShardError(f"layers {listed(missing)} of {facts.n_layers} are not in the checkpoint")
    extra = sorted(set(subs_of) - set(range(facts.n_layers)))
    if extra:
        raise CorruptError(f"there are layers {listed(extra)}, but the model has {facts.n_layers}")
    every = set().union(*subs_of.values())
    for layer, subs in sorted(subs_of.items()):
        if subs != every:
            absent = min(every - subs)
            raise MissingShardError("other layers have this tensor", key=rules.layer_name(layer, absent))


def check_gate(name: str, rows: int, columns: int, *, is_gated: bool) -> None:
    """Compares the rows of fc1 with the columns of fc2.

    Raises:
        CorruptError: the rows are not the columns, or twice as many in a gated MLP.
    """
    if rows != columns * (1 + is_gated):
        kind = "a gated" if is_gated else "a plain"
        raise CorruptError(
            f"the arguments say {kind} MLP, so fc1 should have {columns * (1 + is_gated)} rows for {columns} columns "
            f"of fc2, but it has {rows}",
            key=name,
            hint="is swiglu in the arguments right?",
        )


def check_qkv_rows(name: str, rows: int, facts: Facts) -> None:
    """Compares the rows of the fused QKV weight with the heads of the arguments.

    Raises:
        CorruptError: they are not heads and groups of that many channels (nor with an output gate beside the queries).
    """
    if facts.head_dim is None:
        return
    plain = (facts.n_heads + 2 * facts.n_groups) * facts.head_dim
    gated = (2 * facts.n_heads + 2 * facts.n_groups) * facts.head_dim
    if rows not in (plain, gated):
        raise CorruptError(
            f"{facts.n_heads} heads and {facts.n_groups} groups of {facts.head_dim} channels make {plain} rows, "
            f"but there are {rows}",
            key=name,
        )


def listed(items: Sequence[object]) -> str:
    """A few items for a message."""
    text = ", ".join(map(str, items[:_SHOWN]))
    return text + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
