"""Bring another checkpoint under the names of the first one, whatever its format and layout.

===================  ======================  ==================================================
 first                another                 becomes
===================  ======================  ==================================================
 Megatron             Megatron                global per-layer tensors, the first's implementation
 Megatron             Hugging Face            Megatron's names (``core.hf.to_megatron``)
 Hugging Face         Megatron                Hugging Face's names (``core.hf.to_hf``)
 any other            any other               its own names
===================  ======================  ==================================================

Optimizer states are left out: a mean of moments belongs to no step of any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.attributes import turn_into_attributes
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.stored import StoredArray, files_read
from core.engine.changes.select import without_optimizer
from core.errors import UnsupportedError
from core.megatron.extras.common_state import is_megatron
from core.megatron.model.args import parse_facts
from core.megatron.placement.implementation import with_implementation
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.rules import Rules
from core.opening.objects import loaded
from core.opening.open import Checkpoint
from core.opening.source_files import config_of_source
from core.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """How Megatron checkpoints become global tensors; the same for all sources.

    Args:
        rules: the layout rules.
        vocab_size: rows of the vocabulary without padding; None if the arguments record them.
        keep_padded_vocab: keep padding rows as if they were real ones.
    """

    rules: Rules
    vocab_size: int | None = None
    keep_padded_vocab: bool = False


def form_like(
    other: Checkpoint,
    first: Catalog,
    *,
    config: Mapping[str, object] | None,
    options: FormOptions,
    prefix: str,
) -> Catalog:
    """Return another checkpoint's tensors under the names of the first one.

    Args:
        other: the other checkpoint.
        first: the first one, in the form in which it is merged.
        config: the ``config.json`` of the first one, or None.
        options: how Megatron checkpoints become global tensors.
        prefix: put before the names of its files (``core.files.source_store``).

    Raises:
        UnsupportedError: the names of the two belong to different families.
        CheckpointingException: the other checkpoint is damaged or incomplete.
    """
    from core.hf.names import is_hf
    from core.hf.to_hf import to_hf
    from core.hf.to_megatron import to_megatron

    catalog = turn_into_attributes(loaded(other.catalog, other.store))
    rules = options.rules
    other_config = config_of_source(other)
    has_layout = catalog.is_rank_local or is_megatron(catalog, rules)
    if has_layout:
        catalog = unshard(
            catalog,
            rules=rules,
            vocab_size=options.vocab_size,
            optim="drop",
            keep_padded_vocab=options.keep_padded_vocab,
        )
    # Before any renaming, as tensors that are computed from others name the files of these.
    catalog = with_file_prefix(catalog, prefix)

    # Megatron's names, of the implementation that the first one has.
    if first.facet(MegatronModel) is not None:
        is_local = parse_facts(first.args, names=rules.model_of(first.tensors)).is_local
        implementation = "local" if is_local else "transformer_engine"
        if has_layout:
            catalog = with_implementation(catalog, implementation, rules=rules)
        elif is_hf(catalog, other_config):
            assert other_config is not None
            catalog = to_megatron(catalog, other_config, transformer_impl=implementation)
        else:
            raise _other_family(other, "Megatron's")
    elif has_layout:
        if not is_hf(first, config):
            raise _other_family(other, "neither Megatron's nor Hugging Face's")
        assert config is not None
        model_type = config.get("model_type")
        catalog = to_hf(
            catalog,
            model_type=model_type if isinstance(model_type, str) else None,
            has_config=False,
        )
    return without_optimizer(catalog).catalog


def _other_family(other: Checkpoint, names: str) -> UnsupportedError:
    """Return the error for a checkpoint whose names cannot be those of the first one."""
    return UnsupportedError(
        f"the first checkpoint has {names} tensor names, and this checkpoint's names cannot "
        "be mapped to them",
        file=str(other.path),
        hint="first convert one checkpoint to the other's names: ckpt convert SRC DST --names hf "
        "(or megatron)",
    )


def with_file_prefix(catalog: Catalog, prefix: str) -> Catalog:
    """Return a catalog whose files have the names that a joined store gives them."""

    def moved(array: StoredArray) -> StoredArray:
        extent = array.extent
        # Encodings of formats take the file from the extent; none of them names further files.
        assert not files_read(extent.encoding)
        extent = replace(extent, file=prefix + extent.file)
        return replace(array, extent=extent)

    return catalog.map_tensors(lambda _, tensor: tensor.with_arrays(moved))
