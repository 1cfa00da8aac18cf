"""Convert the tensors of ranks, and stacked ones, to the global form; only metadata changes.

::

    rank files ──┐                                         ┌── to_ranks.shard ──▶ rank files
    torch_dist ──┼── unshard ──▶ global per-layer form ────┤
    DCP, torch ──┘                                         └── to_torch_dist ──▶ torch_dist

``core.megatron.reshard.from_ranks`` describes the global per-layer form. The rules are data:
``megatron/rules/megatron.toml``, read by ``core.megatron.rules.tables``. A tensor or setting that
is not supported yet raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import split_state_key
from core.engine.catalog.tensor import without_ties
from core.errors import list_some
from core.files.store import ReadStore
from core.megatron.model.args import topology_of
from core.megatron.optimizer.remainders import check_master_dtypes, refuse_remainders
from core.megatron.placement.adapter_rows import is_halved, to_matrix_order
from core.megatron.rules.rules import UNKNOWN_SOURCE, Rules


def unshard(
    catalog: Catalog,
    *,
    rules: Rules,
    vocab_size: int | None = None,
    optim: str = "carry",
    keep_padded_vocab: bool = False,
    target_tp: int | None = None,
    store: ReadStore | None = None,
) -> Catalog:
    """Return the global per-layer form of a Megatron checkpoint.

    Args:
        catalog: a rank catalog (``core.formats.megatron.format``), or a torch_dist, DCP or torch
            catalog whose tensors have Megatron's names: stacked or per layer, with or without the
            prefix ``model.``. Its objects should be loaded (``core.opening.objects.loaded``);
            extra states that are not loaded keep their old keys.
        rules: the layout's rules.
        vocab_size: rows of the vocabulary without padding; None takes the number in the training
            arguments.
        optim: ``carry`` optimizer state, ``drop`` it with a note, or ``refuse`` it.
        keep_padded_vocab: treat padding rows as part of the vocabulary.
        target_tp: the TP size that the result is meant for; padding rows are then kept where that
            size needs exactly as many, so that they move unchanged. None drops them wherever the
            size of the vocabulary is known.
        store: the checkpoint's files, to compare master weights with weights; None skips the
            comparison.

    Returns:
        The catalog described in ``core.megatron.reshard.from_ranks``.

    Raises:
        UnsupportedError: the training arguments are missing, the checkpoint holds something that is
            not supported yet, or ``optim`` is ``refuse`` and there is optimizer state.
        UnknownTensorError: no rule matches a name.
        MissingShardError: a rank, a layer or a tensor is missing.
        CorruptError: ranks, shapes and arguments contradict each other.
        UsageError: ``vocab_size`` does not fit the stored rows.
    """
    is_rank_local = catalog.is_rank_local
    if is_rank_local:
        from core.megatron.reshard.from_ranks import unshard_ranks as build
    else:
        from core.megatron.reshard.from_global import unshard_global as build

    model = build(
        catalog,
        rules=rules,
        vocab_size=vocab_size,
        optim=optim,
        keep_padded_vocab=keep_padded_vocab,
        target_tp=target_tp,
        store=store,
    )

    # Compare master weights with weights; for rank files, reading the optimizer already did.
    check_master_dtypes(model.tensors)
    strange: Sequence[str] = ()
    if store is not None and not is_rank_local:
        from core.megatron.optimizer.proof import strange_masters

        strange = strange_masters(model, store)
    if strange:
        assert store is not None, "nothing was compared without files"
        refuse_remainders(model, store, strange)
        reason = "the weights may have been changed after the optimizer's last step"
        model = model.noted(
            [f"the master weights of {list_some(strange)} do not round to the weights; {reason}"]
        )

    # Rows whose order depends on the TP size are those of the run that saved.
    if any(map(is_halved, model.tensors)):
        model = to_matrix_order(model, topology_of(catalog.args).tp)

    # Name the tensors that no rule describes: only the user vouches for their layout.
    names = model.tensors if rules.takes_unknown else ()
    unknown = [key for key in names if split_state_key(key) is None and rules.is_unknown(key)]
    if unknown:
        model = model.noted(
            [f"{UNKNOWN_SOURCE}: every rank gets {list_some(unknown)}, which no rule matches"]
        )
    # A step may put one tensor under several keys (a weight that is its own master); Megatron ties
    # none, so each is stored by itself.
    return replace(model, tensors=without_ties(model.tensors))
