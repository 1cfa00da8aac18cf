"""The true size of the vocabulary, and the padding that Megatron adds to it.

Rows are padded to a multiple of a constant times TP, so that the padding depends on the layout. If
the true size is known, the global form has exactly the true rows, and the destination gets zero
rows after them, like those of Megatron's own loader. If the true size is unknown, all rows are
kept, and only the same TP size can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.arrays.box import Shape
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.facts import ModelFacts
from core.values import dataclass

PADDING = "vocabulary padding"
"""The reason for which padding is recorded as left out."""
_TP_SIZES = tuple(1 << bits for bits in range(10))


@dataclass(frozen=True, slots=True)
class TrueRows:
    """The size of the true vocabulary.

    Args:
        n_rows: number of rows; None if unknown.
        notes: notes for the user.
    """

    n_rows: int | None
    notes: tuple[str, ...] = ()


def find_true_rows(
    facts: ModelFacts, *, given: int | None, keep_padded: bool, stored: Sequence[int]
) -> TrueRows:
    """Find the number of rows of the true vocabulary.

    Args:
        given: the user's number, or None.
        keep_padded: count padding rows as true rows.
        stored: number of rows, with padding, in each tensor with vocabulary rows.

    Raises:
        UsageError: the user's number is not positive, above the stored rows, below the number that
            the arguments have, or given together with ``keep_padded``.
        CorruptError: the arguments' number is above the stored rows.
    """
    if keep_padded:
        if given is not None:
            raise UsageError("--vocab-size and --keep-padded-vocab cannot be combined")
        return TrueRows(min(stored, default=None))

    # The user's number wins over the arguments'.
    n_rows = facts.vocab_size if given is None else given
    if n_rows is None:
        return TrueRows(None)
    if n_rows < 1:
        raise UsageError(f"vocabulary size {n_rows} is not positive")
    if any(rows < n_rows for rows in stored):
        problem = f"a vocabulary of {n_rows} tokens does not fit in the {min(stored)} stored rows"
        if given is None:
            raise CorruptError(
                problem, hint="the training arguments and the tensors contradict each other"
            )
        raise UsageError(problem, hint="pass the true vocabulary size, without padding")

    # The arguments' number counts only if padding explains the stored rows.
    recorded = facts.vocab_size
    is_explained = recorded is not None and all(explains(facts, recorded, rows) for rows in stored)
    if given is None:
        if is_explained:
            return TrueRows(n_rows)
        note = (
            f"vocab_size {n_rows} in the arguments does not explain the {stored[0]} stored rows, "
            "so it is ignored"
        )
        return TrueRows(None, (note,))

    # A number below that of the arguments would cut off rows of real tokens. A tokenizer may add
    # tokens to those of the arguments.
    if recorded is not None and is_explained and stored:
        if given < recorded:
            raise UsageError(
                f"--vocab-size {given} is smaller than vocab_size {recorded} in the training "
                f"arguments, so the rows of {recorded - given} tokens would be lost",
                hint=f"omit --vocab-size, or pass a number from {recorded} to {min(stored)}",
            )
        if given > recorded:
            note = (
                f"rows {recorded} to {given - 1} are kept as tokens (--vocab-size {given}); "
                f"vocab_size in the training arguments is {recorded}"
            )
            return TrueRows(given, (note,))
    return TrueRows(given)


def explains(facts: ModelFacts, n_rows: int, stored: int) -> bool:
    """Return whether a vocabulary of ``n_rows`` has ``stored`` rows without or with padding.

    The padding may be that of any TP size: the run may have loaded a checkpoint of another size.
    """
    return stored in {
        n_rows,
        *(facts.padded_rows(n_rows, tp=tp) for tp in (facts.topology.tp, *_TP_SIZES)),
    }


@dataclass(frozen=True, slots=True)
class CutVocab:
    """Tensors of a vocabulary without their padding.

    Args:
        shapes: name → shape without padding rows.
        notes: notes for the user.
    """

    shapes: Mapping[str, Shape]
    notes: tuple[str, ...]


def cut_vocab(
    shapes: Mapping[str, Shape], facts: ModelFacts, *, n_rows: int | None, target_tp: int | None
) -> CutVocab:
    """Remove the padding rows of vocabulary tensors, if the true vocabulary is known.

    Args:
        shapes: name → stored shape of the tensors that have a row for each token.
        n_rows: number of rows of the true vocabulary, or None.
        target_tp: TP size of the destination: padding is kept if the destination has the same, so
            that its rows are copied unchanged. None always removes it.
    """
    if n_rows is None:
        return CutVocab(shapes, ())
    rows = n_rows if target_tp is None else facts.padded_rows(n_rows, tp=target_tp)
    change = "padding removed" if rows == n_rows else "re-padded"
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
    """Return the number of true rows: the given one, or else that which ``unshard`` found."""
    model = catalog.facet(MegatronModel)
    return given if given is not None or model is None else model.vocab_size


def padded_rows(key: str, tensor: Tensor, facts: ModelFacts, *, tp: int, n_rows: int | None) -> int:
    """Return the rows of a vocabulary tensor in a destination of size ``tp``.

    Raises:
        UnsupportedError: the true size is unknown, and ``tp`` is not that of the source.
        CorruptError: the tensor has neither the true rows nor the padded ones.
    """
    rows = tensor.shape[0]
    if n_rows is None:
        if tp == facts.topology.tp:
            return rows
        raise UnsupportedError(
            f"it is unknown how many of the {rows} rows are padding, so ckpt cannot pad them for "
            f"TP {tp}",
            key=key,
            hint="pass the true vocabulary size with --vocab-size, or keep all rows with "
            "--keep-padded-vocab",
        )
    padded = facts.padded_rows(n_rows, tp=tp)
    if rows not in (n_rows, padded):
        raise CorruptError(
            f"the tensor has {rows} rows, but the vocabulary has {n_rows} ({padded} with padding)",
            key=key,
        )
    return padded
