"""The true size of the vocabulary, and the padding that Megatron adds to it.

Stored rows are padded to a multiple of a number times TP, so that the padding depends on the layout. Where the true
size is known, the global form has exactly the true rows, and the destination gets zero rows behind them, as
Megatron's own loader makes them. Where nothing says how many rows are true, they stay as they are, and only the
same TP size can be written.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.facets import MegatronModel
from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.facts import Facts

_TP_SIZES = tuple(1 << bits for bits in range(10))


def vocab_rows(
    facts: Facts, *, given: int | None, keep_padded: bool, stored: Sequence[int], notes: list[str]
) -> int | None:
    """Rows of the true vocabulary; None where nothing says.

    Args:
        given: what the user says.
        keep_padded: count the padding rows as true ones.
        stored: padded rows of the tensors that have them.

    Raises:
        UsageError: the user's number is not positive or above the stored rows.
        CorruptError: the arguments' number is above the stored rows.
    """
    if keep_padded:
        if given is not None:
            raise UsageError("a vocabulary size and keeping the padded one exclude each other")
        return min(stored, default=None)
    n_rows = facts.vocab_size if given is None else given
    if n_rows is None:
        return None
    if n_rows < 1:
        raise UsageError(f"vocabulary size {n_rows} is not positive")
    if any(rows < n_rows for rows in stored):
        what = f"a vocabulary of {n_rows} does not fit the {min(stored)} rows that are stored"
        if given is None:
            raise CorruptError(what, hint="the training arguments and the tensors contradict each other")
        raise UsageError(what, hint="give the true vocabulary size, without padding")
    if given is None and not all(explains(facts, n_rows, rows) for rows in stored):
        notes.append(
            f"the arguments' vocab_size {n_rows} does not explain the {stored[0]} stored rows, so it is not used"
        )
        return None
    return n_rows


def explains(facts: Facts, n_rows: int, stored: int) -> bool:
    """Whether ``stored`` rows are a vocabulary of ``n_rows``, without padding or with that of some TP size."""
    return stored in {n_rows, *(facts.padded_rows(n_rows, tp=tp) for tp in (facts.topology.tp, *_TP_SIZES))}


def cut_vocab(
    shape: Shape, name: str, facts: Facts, *, n_rows: int | None, target_tp: int | None, notes: list[str]
) -> Shape:
    """The shape without padding rows, where the true vocabulary is known.

    With ``target_tp``, padding stays if the destination has exactly as much: its rows then move unchanged.
    """
    if n_rows is None or n_rows == shape[0]:
        return shape
    rows = n_rows if target_tp is None else facts.padded_rows(n_rows, tp=target_tp)
    if rows == shape[0]:
        return shape
    padding = "no padding" if rows == n_rows else f"{rows - n_rows} of them zeros"
    notes.append(f"{name}: {shape[0]} rows become {rows} ({n_rows} true ones, {padding})")
    return (n_rows, *shape[1:])


def rows_of(catalog: Catalog, given: int | None) -> int | None:
    """Rows of the true vocabulary: what the caller says, else what ``unshard`` found."""
    model = catalog.facet(MegatronModel)
    return given if given is not None or model is None else model.vocab_size


def padded_rows(meta: TensorMeta, facts: Facts, *, tp: int, n_rows: int | None) -> int:
    """Rows of a vocabulary tensor in the destination."""
    rows = meta.shape[0]
    if n_rows is None:
        if tp == facts.topology.tp:
            return rows
        raise UnsupportedError(
            f"how many of the {rows} rows are padding is not known, so neither is the padding for TP {tp}",
            key=meta.key,
            hint="give the true vocabulary size with --vocab-size, or --keep-padded-vocab to keep every row",
        )
    padded = facts.padded_rows(n_rows, tp=tp)
    if rows not in (n_rows, padded):
        raise CorruptError(f"{rows} rows are neither the {n_rows} true ones nor {padded} with padding", key=meta.key)
    return padded
