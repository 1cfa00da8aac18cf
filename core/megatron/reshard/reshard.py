"""Layouts: rank-local tensors to global ones and back, metadata only.

::

    rank files ──┐                                             ┌── shard ──▶ rank files of another topology
    torch_dist ──┼── unshard ──▶ global per-layer form ────────┤
    DCP, torch ──┘   (``core.megatron.reshard.from_ranks``)                 └── stack ──▶ torch_dist

The rules are data: ``megatron/rules/megatron.toml``, read by ``core.megatron.rules.tables``. What
is not handled yet is refused by name.
"""

from __future__ import annotations

from core.catalog.catalog import Catalog
from core.catalog.optimizer_keys import state_of
from core.files.store import ReadStore
from core.megatron.model.checks import listed
from core.megatron.optimizer.proof import strange_masters
from core.megatron.reshard.from_global import is_megatron, unshard_global
from core.megatron.reshard.from_ranks import unshard_ranks
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.to_torch_dist import Stacked, stack
from core.megatron.rules.rules import UNKNOWN_SOURCE, Rules
from core.megatron.rules.tables import load_rules

__all__ = ["Rules", "Stacked", "is_megatron", "load_rules", "shard", "stack", "unshard"]


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
            catalog whose tensors have Megatron's names: stacked or per layer, with or without
            ``model.`` before them. Its objects should have been loaded
            (``core.opening.objects.loaded``); extra states that have not been are left as they are,
            under their old keys.
        rules: the layout's table.
        vocab_size: true rows of the vocabulary; None takes the training arguments' word.
        optim: ``carry`` optimizer state, ``drop`` it with a note, or ``refuse`` it.
        keep_padded_vocab: count padding rows as true ones.
        target_tp: the TP size that the result is meant for; padding rows are then kept where that
            size needs exactly as many, so that they move unchanged. None cuts them wherever the
            true vocabulary is known.
        store: the checkpoint's files, where masters are to be compared with weights; None leaves
            that out.

    Returns:
        A catalog as ``core.megatron.reshard.from_ranks`` describes it.

    Raises:
        UnsupportedError: no training arguments, or something that is not handled yet.
        UnknownTensorError: no rule fits a name.
        MissingShardError: a rank, a layer or a tensor is absent.
        CorruptError: ranks, shapes and arguments contradict each other.
        UsageError: ``vocab_size`` does not fit.
    """
    is_rank_local = catalog.is_rank_local
    model = (unshard_ranks if is_rank_local else unshard_global)(
        catalog,
        rules=rules,
        vocab_size=vocab_size,
        optim=optim,
        keep_padded_vocab=keep_padded_vocab,
        target_tp=target_tp,
        store=store,
    )

    # Reading the optimizer of rank files has compared masters with weights already.
    strange = [] if store is None or is_rank_local else strange_masters(model, store)
    if strange:
        reason = "do not round to their weights: were the weights changed after the optimizer's last step?"
        model = model.noted([f"masters of {listed(strange)} {reason}"])

    # Tensors whose rule only the user vouches for are named.
    names = model.tensors if rules.takes_unknown else ()
    unknown = [key for key in names if state_of(key) is None and rules.is_unknown(key)]
    if unknown:
        model = model.noted(
            [f"no rule fits {listed(unknown)}: replicated on every rank ({UNKNOWN_SOURCE})"]
        )
    return model
