"""The true size of the vocabulary, and the padding that Megatron adds to it.

Stored rows are padded to a multiple of a number times TP, so that the padding depends on the
layout. Where the true size is known, the global form has exactly the true rows, and the destination
gets zero rows behind them, as Megatron's own loader makes them. Where the true size is not known,
all rows stay as they are, and only the same TP size can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.facets import MegatronModel
from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.facts import ModelFacts

_TP_SIZES = tuple(1 << bits for bits in range(10))


@dataclass(frozen=True, slots=True)
class TrueRows:
    """The size of the true vocabulary.

    Args:
        n_rows: its rows; None where it is not known.
        notes: what the user should know about it.
    """

    n_rows: int | None
    notes: tuple[str, ...] = ()


def find_true_rows(
    facts: ModelFacts, *, given: int | None, keep_padded: bool, stored: Sequence[int]
) -> TrueRows:
    """Find the number of rows of the true vocabulary.

    Args:
        given: the number that the user gave, or None.
        keep_padded: count the padding rows as true ones.
        stored: padded rows of the tensors that have them.

    Raises:
        UsageError: the user's number is not positive or above the stored rows.
        CorruptError: the arguments' number is above the stored rows.
    """
    if keep_padded:
        if given is not None:
            raise UsageError("a vocabulary size and keeping the padded one exclude each other")
        return TrueRows(min(stored, default=None))

    # The user's number wins over the arguments'.
    n_rows = facts.vocab_size if given is None else given
    if n_rows is None:
        return TrueRows(None)
    if n_rows < 1:
        raise UsageError(f"vocabulary size {n_rows} is not positive")
    if any(rows < n_rows for rows in stored):
        problem = f"a vocabulary of {n_rows} does not fit the {min(stored)} rows that are stored"
        if given is None:
            raise CorruptError(
                problem, hint="the training arguments and the tensors contradict each other"
            )
        raise UsageError(problem, hint="give the true vocabulary size, without padding")
    if given is None and not all(explains(facts, n_rows, rows) for rows in stored):
        note = f"vocab_size {n_rows} of the arguments does not explain the {stored[0]} stored rows, so it is ignored"
        return TrueRows(None, (note,))
    return TrueRows(n_rows)


def explains(facts: ModelFacts, n_rows: int, stored: int) -> bool:
    """Return whether ``stored`` rows are a vocabulary of ``n_rows``, without padding or with that
    of some TP size.
    """
    return stored in {
        n_rows,
        *(facts.padded_rows(n_rows, tp=tp) for tp in (facts.topology.tp, *_TP_SIZES)),
    }


@dataclass(frozen=True, slots=True)
class CutVocab:
    """Tensors of a vocabulary without their padding.

    Args:
        shapes: name → shape.
        notes: what the user should know about it.
    """

    shapes: Mapping[str, Shape]
    notes: tuple[str, ...]


def cut_vocab(
    shapes: Mapping[str, Shape], facts: ModelFacts, *, n_rows: int | None, target_tp: int | None
) -> CutVocab:
    """Cut the padding rows of vocabulary tensors, where the true vocabulary is known.

    Args:
        shapes: name → stored shape of the tensors that have a row for each token.
        n_rows: rows of the true vocabulary, or None.
        target_tp: TP size of the destination: padding stays where the destination has exactly as
            much, so that its rows move unchanged. None cuts it everywhere.
    """
    if n_rows is None:
        return CutVocab(shapes, ())
    rows = n_rows if target_tp is None else facts.padded_rows(n_rows, tp=target_tp)
    change = "padding removed" if rows == n_rows else "padded anew"
    cut: dict[str, Shape] = {}
    notes: list[str] = []
    for name, shape in shapes.items():
        if shape[0] in (n_rows, rows):
            cut[name] = shape
        else:
            cut[name] = (n_rows, *shape[1:])
            notes.append(f"{name}: {shape[0]} → {rows} rows (vocabulary {n_rows}, {change})")
    return CutVocab(cut, tuple(notes))


def rows_of(catalog: Catalog, given: int | None) -> int | None:
    """Return the rows of the true vocabulary: the number that the caller gives, else the one that
    ``unshard`` found.
    """
    model = catalog.facet(MegatronModel)
    return given if given is not None or model is None else model.vocab_size


def padded_rows(meta: TensorMeta, facts: ModelFacts, *, tp: int, n_rows: int | None) -> int:
    """Return the rows of a vocabulary tensor in a destination of size ``tp``.

    Raises:
        UnsupportedError: the true size is not known, and ``tp`` is not that of the source.
        CorruptError: the tensor has neither the true rows nor the padded ones.
    """
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
        raise CorruptError(
            f"{rows} rows are neither the {n_rows} true ones nor {padded} with padding",
            key=meta.key,
        )
    return padded
