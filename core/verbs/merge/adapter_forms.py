"""Bring adapters and their bases under the names of transformers, whatever checkpoints they are.

===================  ===============================================================================
 adapter of           becomes
===================  ===============================================================================
 peft                 itself
 Megatron-Bridge      an adapter of peft (``core.hf.adapters.to_peft``)
===================  ===============================================================================

===================  ===============================================================================
 base of              is folded
===================  ===============================================================================
 transformers         as it is
 Megatron             under the names of transformers (``core.hf.to_hf``); a fused weight of
                      Megatron's then consists of the folded parts
===================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.facets import MegatronModel
from core.engine.changes.select import without_optimizer
from core.errors import UnsupportedError, UsageError
from core.files.json_object import parse_json_object
from core.files.store import ReadStore
from core.hf.values import CONFIG
from core.megatron.extras.common_state import is_megatron
from core.megatron.reshard.unshard import unshard
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.verbs.merge.adapter import Adapter, fold_adapter
from core.verbs.merge.forms import FormOptions, with_file_prefix
from core.verbs.merge.merge import MergedCatalog, MergeSource


def adapter_form(other: Checkpoint, *, options: FormOptions, prefix: str) -> Adapter:
    """Return an adapter under peft's names.

    Args:
        other: the adapter.
        options: how Megatron checkpoints become global tensors.
        prefix: put before the names of its files (``core.files.source_store``).

    Raises:
        UsageError: it is not an adapter.
        CheckpointingException: it is damaged, incomplete or not supported.
    """
    from core.engine.catalog.dropped import ADAPTER_CONFIG
    from core.hf.adapters.peft import is_peft, parse_config, read_config_text
    from core.hf.adapters.to_peft import adapter_to_peft
    from core.megatron.placement.adapter_rows import is_adapter

    label = str(other.path)
    catalog = loaded(other.catalog, other.store)
    if catalog.is_rank_local or is_megatron(catalog, options.rules):
        catalog = unshard(catalog, rules=options.rules, optim="drop")
        if is_adapter(catalog):
            catalog = adapter_to_peft(with_file_prefix(catalog, prefix))
            return Adapter(label, catalog, parse_config(catalog.documents[ADAPTER_CONFIG]))
    elif is_peft(catalog, other.store):
        config = parse_config(read_config_text(other.store))
        # A trainer's checkpoint has the optimizer beside the adapter, and a merge takes none.
        weights = without_optimizer(catalog).catalog
        return Adapter(label, with_file_prefix(weights, prefix), config)
    raise UsageError(
        f"--lora: the path is not an adapter, because it has no peft {ADAPTER_CONFIG} and its "
        "tensors do not have the names of a Megatron adapter",
        file=label,
        hint="pass the directory written by peft's save_pretrained, or Megatron-Bridge's adapter "
        "checkpoint",
    )


def fold(
    base: MergeSource, adapter: Adapter, *, store: ReadStore, config: Mapping[str, object] | None
) -> MergedCatalog:
    """Return the base, under its own names, with the adapter folded in.

    Args:
        base: the base model, in Megatron's global form or under the names of transformers.
        adapter: from ``adapter_form``.
        store: the files of both.
        config: the ``config.json`` of a base with the names of transformers, or None.

    Raises:
        UnsupportedError: the base belongs to no known family, or its embedding and output layer are
            tied in Megatron's form and would not be any more, or as for ``fold_adapter``.
        CorruptError, MissingShardError: adapter and base do not fit each other.
    """
    from core.hf.tensors import fuse
    from core.hf.to_hf import to_hf, weights_of

    if base.catalog.facet(MegatronModel) is None:
        folded = fold_adapter(base, adapter, store=store, config=config)
        return MergedCatalog(folded.catalog, folded.notes)

    # Fold under the names of transformers, and put the changed weights together again.
    catalog = without_optimizer(base.catalog).catalog
    under_hf = to_hf(catalog, has_config=True)
    config = parse_json_object(under_hf.documents[CONFIG], file=CONFIG)
    folded = fold_adapter(MergeSource(base.label, under_hf), adapter, store=store, config=config)
    after = folded.catalog
    if after.documents[CONFIG] != under_hf.documents[CONFIG]:
        raise UnsupportedError(
            "the adapter unties the output layer from the embedding, or resizes the vocabulary, "
            "which contradicts the base's Megatron arguments",
            file=adapter.label,
            hint="first convert the base, and merge into the result: ckpt convert SRC DST --to hf",
        )
    pairs = {}
    for name, pair in weights_of(catalog).items():
        names = [tensor.names[0] for tensor in pair.tensors]
        if not folded.changed.intersection(names):
            continue
        is_plain = pair.shift is None and pair.packed is None and pair.entry is None
        if not is_plain or pair.is_swapped or pair.is_transposed or pair.twins:
            raise UnsupportedError(
                "the adapter changes a tensor that Megatron stores in a different form",
                key=name,
                hint="first convert the base: ckpt convert SRC DST --to hf",
            )
        pairs[name] = pair

    tensors = dict(catalog.tensors)
    for name, pair in pairs.items():
        parts = [folded.catalog.tensors[part.names[0]] for part in pair.tensors]
        fused = fuse.fuse_parts(pair.strips, parts, pair.shape)
        tensors[name] = replace(tensors[name], tiling=fused.tiling)
    return MergedCatalog(replace(catalog, tensors=tensors), folded.notes)
