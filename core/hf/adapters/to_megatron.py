"""Convert an adapter of peft to the global form of Megatron's adapters.

The fields and facets are those of ``core.hf.to_megatron``, with the training arguments of the base
model. The configuration of the adapter is kept as text in the arguments, for the way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from core.arrays.box import Shape, full_box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.dropped import ADAPTER_CONFIG, Dropped, dropped_unlisted
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.tensor import Tensor
from core.engine.quantize.source import source_of
from core.errors import CorruptError, UnsupportedError, list_some
from core.files.store import ReadStore
from core.hf.adapters.linear import (
    ADAPTER,
    CANONICAL,
    LINEAR_IN,
    LINEAR_OUT,
    MAX_LAYERS,
    WEIGHT,
    adapted_pairs,
    linear_layers_of,
    module_of,
)
from core.hf.adapters.peft import (
    Adaptation,
    check_config,
    parse_config,
    read_config_text,
    sorted_tensors,
)
from core.hf.config_json.config import build_arguments
from core.hf.config_json.origin import choose_config_text
from core.hf.detection import detect_family
from core.hf.family import Family
from core.hf.name_tables import Pair
from core.hf.tensors import fuse
from core.hf.tensors.spelling import match_names
from core.hf.traits import model_of
from core.hf.values import ARGUMENT, CONFIG
from core.megatron.model.args import ADAPTER_ARGUMENT
from core.megatron.model.topology import Topology
from core.pickle.inert import make_namespace
from core.values import dataclass

_FOLD = "merge the adapter into its base model instead: ckpt merge BASE -o DST --lora ADAPTER"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer of Megatron's with an adapter.

    Args:
        pair: its weight.
        items: the adapter of each Hugging Face tensor that the weight consists of; None for those
            without one.
        is_shared: all of them have an adapter, with the same first matrix.
    """

    pair: Pair
    items: tuple[Adaptation | None, ...]
    is_shared: bool

    @property
    def module(self) -> str:
        """Megatron's name of the layer."""
        return self.pair.names[0].removesuffix(WEIGHT)

    @property
    def parts(self) -> Iterator[tuple[str, Shape, Adaptation]]:
        """Module, shape of the weight, and adapter of each adapted Hugging Face tensor."""
        for tensor, item in zip(linear_layers_of(self.pair), self.items, strict=True):
            if item is not None:
                yield module_of(tensor.names[0]), tensor.shape, item


def adapter_to_megatron(
    catalog: Catalog,
    config: Mapping[str, object],
    store: ReadStore,
    *,
    tp: int,
    family: Family | None = None,
    transformer_impl: str | None = None,
) -> Catalog:
    """Return the global form of Megatron's adapters.

    Args:
        catalog: the adapter's tensors under peft's names.
        config: the parsed ``config.json`` of the base model.
        store: the adapter's files; first matrices are compared.
        tp: tensor parallel size that the arguments state.
        family: the model's family; None for that of its ``model_type``.
        transformer_impl: as for ``core.hf.to_megatron``.

    Raises:
        UnsupportedError: not plain LoRA of linear layers with one rank and one alpha, or of a
            family without a table.
        CorruptError: the adapter's tensors contradict its configuration or the base model.
    """
    text = read_config_text(store)
    peft = parse_config(text)
    check_config(peft)
    adaptations, replacements = sorted_tensors(catalog, peft)
    if replacements:
        raise UnsupportedError(
            "the adapter replaces tensors of the base model, which Megatron's adapters cannot do: "
            f"{list_some(replacements)}",
            key=next(iter(replacements.values())),
            hint=_FOLD,
        )
    rank, scaling = _scaling_of(adaptations)

    # Describe the base model by training arguments.
    if family is None:
        family, _ = detect_family(catalog.tensors, config)
    first = next(iter(adaptations.values()))
    fields = build_arguments(
        config,
        family,
        dtype=catalog.tensors[first.a].dtype,
        transformer_impl=transformer_impl,
        divisible_by=1,
        iteration=1,
        n_mtp=0,
    )
    n_rows = fields["vocab_size"]
    assert isinstance(n_rows, int)
    model = model_of(fields, n_rows=n_rows, n_tensors=MAX_LAYERS)

    # Find the layers, and decide between the two forms of Megatron-Bridge.
    pairs = list(adapted_pairs(family, model))
    names = [name for pair in pairs for part in pair.tensors for name in part.names]
    key_of = match_names(adaptations, names)
    adaptations = {key_of.get(name, name): item for name, item in adaptations.items()}
    layers = list(_layers(catalog, pairs, adaptations, store))
    unknown = adaptations.keys() - {
        name for layer in layers for part in layer.pair.tensors for name in part.names
    }
    if unknown:
        raise UnsupportedError(
            f"Megatron has no adapters for these layers: {list_some(unknown)}",
            key=adaptations[min(unknown)].a,
            hint="Megatron does not support adapters for embeddings, output layers and experts; "
            f"{_FOLD}"
            if key_of
            else f"make sure that {CONFIG} belongs to the adapter's base model",
        )
    is_canonical = not all(layer.is_shared for layer in layers)
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        tensors.update(_tensors_of(catalog, layer, is_canonical=is_canonical))

    copies = {
        item.a: catalog.tensors[item.a]
        for layer in layers
        if not (is_canonical and _has_canonical_form(layer))
        for _, _, item in list(layer.parts)[1:]
    }

    fields |= {
        "tensor_model_parallel_size": tp,
        ARGUMENT: choose_config_text(config, catalog.documents.get(CONFIG)),
        ADAPTER_ARGUMENT: text.decode(),
    }
    args = make_namespace(fields)
    form = "CanonicalLoRA" if is_canonical else "LoRA"
    targets = sorted({target for layer in layers for target in _targets(layer, is_canonical)})
    call = f"{form}(target_modules={targets}, dim={rank}, alpha={scaling * rank:g})"

    return Catalog(
        format=catalog.format,
        version=None,
        tensors=tensors,
        iteration=1,
        args=args,
        common={"args": args, "checkpoint_version": 3.0, "iteration": 1},
        notes=(*catalog.notes, _describe_use(layers, call)),
        dropped=(
            *catalog.dropped,
            *dropped_unlisted(copies, "identical to another module's"),
            Dropped((ADAPTER_CONFIG,), "its text is in the arguments", is_listed=False),
        ),
        facets={
            MegatronModel: MegatronModel(vocab_size=n_rows, order=tuple(tensors)),
            Topology: Topology(),
        },
    )


def _describe_use(layers: Iterable[_Layer], call: str) -> str:
    """Return the note on how Megatron-Bridge is configured for the adapters, or why it cannot be.

    Megatron-Bridge 067f987d sets the adapters that a fused layer lacks to None, and then calls them
    in ``forward`` and ``sharded_state_dict`` (``peft/canonical_lora.py``).

    Args:
        call: the call that constructs the configuration.
    """
    missing = {
        module_of(tensor.names[0]): None
        for layer in layers
        if _has_canonical_form(layer)
        for tensor, item in zip(layer.pair.tensors, layer.items, strict=True)
        if item is None
    }
    if not missing:
        return f"to load these adapters, configure Megatron-Bridge with {call}"
    return (
        f"Megatron-Bridge 067f987d cannot use {call}, because there are no adapters for "
        f"{' and '.join(missing)}; to continue with Megatron, {_FOLD}"
    )


def _scaling_of(adaptations: Mapping[str, Adaptation]) -> tuple[int, float]:
    """Return the rank and the scaling of all adapters.

    Raises:
        UnsupportedError: they differ, or one belongs to an embedding.
    """
    for item in adaptations.values():
        if item.is_embedding:
            raise UnsupportedError(
                "Megatron has no adapters for embeddings", key=item.a, hint=_FOLD
            )
    kinds = {(item.rank, item.scaling): item.a for item in adaptations.values()}
    if len(kinds) > 1:
        ranks = ", ".join(f"rank {rank} × {scaling:g}" for rank, scaling in sorted(kinds))
        raise UnsupportedError(
            f"the layers have different ranks or scaling factors ({ranks}), but all adapters in a "
            "Megatron-Bridge model share one rank and one scaling factor",
            key=list(kinds.values())[1],
            hint=_FOLD,
        )
    ((rank, scaling),) = kinds
    return rank, scaling


def _layers(
    catalog: Catalog,
    pairs: Iterable[Pair],
    adaptations: Mapping[str, Adaptation],
    store: ReadStore,
) -> Iterator[_Layer]:
    """Yield the layers with an adapter.

    Raises:
        CorruptError: an adapter does not fit its layer.
        CheckpointingException: a first matrix cannot be read.
    """
    decoded = DecodedStore(store)

    def matrix(item: Adaptation) -> bytes:
        tensor = source_of(catalog, item.a)
        return bytes(tensor.read(decoded, full_box(tensor.shape)))

    for pair in pairs:
        items = []
        for tensor in linear_layers_of(pair):
            name = next((name for name in tensor.names if name in adaptations), None)
            items.append(None if name is None else adaptations[name])
            if name is not None:
                _check_shapes(catalog, adaptations[name], tensor.shape)
        given = [item for item in items if item is not None]
        if not given:
            continue
        kinds = {(catalog.tensors[item.a].dtype, catalog.tensors[item.b].dtype) for item in given}
        is_shared = len(given) == len(items) and (
            len(items) == 1 or (len(kinds) == 1 and len(set(map(matrix, given))) == 1)
        )
        yield _Layer(pair, tuple(items), is_shared)


def _check_shapes(catalog: Catalog, item: Adaptation, weight: Shape) -> None:
    """Raise unless the matrices of an adapter fit the weight.

    Raises:
        CorruptError: they do not.
    """
    shapes = {item.a: (item.rank, weight[1]), item.b: (weight[0], item.rank)}
    for key, shape in shapes.items():
        if catalog.tensors[key].shape != shape:
            raise CorruptError(
                f"the tensor has shape {catalog.tensors[key].shape}, but {CONFIG} and "
                f"{ADAPTER_CONFIG} imply {shape}",
                key=key,
                hint="check that this is the configuration of the adapter's base model",
            )


def _tensors_of(
    catalog: Catalog, layer: _Layer, *, is_canonical: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer's adapter, with functions that return their fragments.

    Raises:
        UnsupportedError: the layer has no canonical form, but its parts differ.
    """
    start = layer.module + ADAPTER
    if is_canonical and _has_canonical_form(layer):
        for module, _, item in layer.parts:
            for key, name in ((item.a, LINEAR_IN), (item.b, LINEAR_OUT)):
                yield f"{start}{CANONICAL[module]}.{name}", catalog.tensors[key]
        return
    if not layer.is_shared:
        modules = ", ".join(module_of(tensor.names[0]) for tensor in layer.pair.tensors)
        raise UnsupportedError(
            f"Megatron fuses {modules} into one layer, but their adapters have different lora_A "
            "matrices",
            key=next(item.a for _, _, item in layer.parts),
            hint=_FOLD,
        )
    items = [item for _, _, item in layer.parts]
    yield start + LINEAR_IN, catalog.tensors[items[0].a]
    yield (
        start + LINEAR_OUT,
        fuse.fuse_parts(
            layer.pair.strips,
            [catalog.tensors[item.b] for item in items],
            (layer.pair.shape[0], items[0].rank),
        ),
    )


def _has_canonical_form(layer: _Layer) -> bool:
    """Return whether CanonicalLoRA has an adapter for each tensor of a layer."""
    tensors = layer.pair.tensors
    return (
        len(tensors) > 1
        and layer.pair.n_alternations == 1
        and all(module_of(tensor.names[0]) in CANONICAL for tensor in tensors)
    )


def _targets(layer: _Layer, is_canonical: bool) -> Iterator[str]:
    """Yield what selects a layer among ``target_modules`` of Megatron-Bridge."""
    linear = layer.module.rpartition(".")[2]
    if not (is_canonical and _has_canonical_form(layer)):
        yield linear
        return
    for module, _, _ in layer.parts:
        part = CANONICAL[module].removeprefix("adapter_")
        yield f"linear_{part}" if linear == "linear_qkv" else f"{linear}_{part}"
