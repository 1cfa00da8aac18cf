"""The line that loads the result of a conversion, to be pasted into a command or a program.

==================== =============================================================================
 destination          line
==================== =============================================================================
 megatron, torch_dist options of Megatron's training script: ``--load DST``, the sizes, and
 and zarr of Megatron ``--no-load-optim`` or ``--no-load-rng`` for what is not in the checkpoint,
                      and those that a model from Hugging Face needs (``checkpoint_args``)
 fsdp_dtensor         the same with ``--use-megatron-fsdp``, without a pipeline
 the same with towers Megatron-Bridge's setting ``checkpoint.pretrained_checkpoint=DST``
 Hugging Face model   ``AutoModelForCausalLM.from_pretrained("DST")``; the class of a composite one
 adapter              ``PeftModel.from_pretrained(model, "DST")``; torch_dist with Megatron-Bridge's
                      ``load_peft_adapter_checkpoint``; rank files, which no library loads without
                      their model, with this project's ``ckpt.open``
 any other            the call of the library that reads the format (``Format.load_call``)
 an object store      ``ckpt.open``: the libraries read local files
==================== =============================================================================

Source: Megatron-LM d98e8a64 ``training/arguments.py``, ``training/checkpointing.py``
(``load_checkpoint``); transformers 5.23, huggingface_hub 2.4, peft 0.21.2, Megatron-Bridge
067f987d ``peft/utils.py``, ``training/checkpointing.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from core.engine.catalog.catalog import AnyCatalog, TargetCatalog
from core.engine.catalog.dropped import ADAPTER_CONFIG
from core.engine.catalog.facets import FsdpDtensorFacts, PipelineFacts, RankFacts
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import CheckpointingException
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG
from core.formats.load_calls import quoted
from core.megatron.model.topology import Topology
from core.opening.locate import RELEASE, TRACKER
from core.pickle.inert import as_mapping
from core.publish.stage.destination import choose_destination
from core.values import dataclass

_KINDS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True, slots=True)
class WrittenResult:
    """The result of a conversion, as far as the line that loads it depends on it.

    Args:
        dst: path of the destination.
        format: its format.
        target: its catalog.
        images: its files.
        topology: its parallel sizes; None unless it has Megatron's training arguments.
        config: the ``config.json`` of a model with Hugging Face's names; None for other tensors,
            and for a model that is incomplete or has other names.
    """

    dst: Path
    format: Format
    target: TargetCatalog
    images: Sequence[FileImage]
    topology: Topology | None
    config: Mapping[str, object] | None


def load_line(result: WrittenResult) -> str:
    """Return the line that loads the result of a conversion."""
    has_tracker = any(image.path == TRACKER for image in result.images)
    if not has_tracker:
        return _library_call(result)
    from core.megatron.placement.adapter_rows import is_adapter

    # Of Megatron's formats, Megatron-Bridge loads torch_dist.
    is_bridged = result.format.has_common_state and result.format.lists_chunks
    if is_bridged and is_adapter(result.target):
        metadata = next(Path(image.path) for image in result.images if ".metadata" in image.path)
        return f"load_peft_adapter_checkpoint(model, {quoted(result.dst / metadata.parent)}, peft)"
    if is_bridged and _has_towers(result.target):
        return f"checkpoint.pretrained_checkpoint={shlex.quote(str(result.dst))}"
    # Megatron's training script loads an adapter only as a part of its model.
    if result.topology is not None and not is_adapter(result.target):
        return " ".join(_megatron_options(result, result.topology))
    return _library_call(result)


def _has_towers(target: TargetCatalog) -> bool:
    """Return True if a model of Megatron-Bridge has towers beside its text model."""
    from core.megatron.rules.tables import load_rules

    layers = tuple(f"{wrapper.text}decoder." for wrapper in load_rules().wrappers)
    is_llava = any(key.startswith("vision_projection.") for key in target.tensors)
    return not is_llava and any(key.startswith(layers) for key in target.tensors)


def _library_call(result: WrittenResult) -> str:
    """Return the call that loads a result without Megatron's training script."""
    # Libraries read the local file system; ckpt reads URLs as well.
    line = None
    if choose_destination(result.dst).is_on_disk:
        line = _hugging_face_call(result)
        if line is None and (call := result.format.load_call) is not None:
            line = call(result.dst, result.target, result.images)
    return line or f"ckpt.open({quoted(result.dst)})"


def _hugging_face_call(result: WrittenResult) -> str | None:
    """Return the call that loads a directory of a Hugging Face library; None for other results."""
    if not result.format.has_hf_config or result.target.write.is_file:
        return None
    dst, paths = quoted(result.dst), {image.path for image in result.images}
    if result.target.facet(PipelineFacts) is not None:
        return f"DiffusionPipeline.from_pretrained({dst})"
    if ADAPTER_CONFIG in paths:
        return f"PeftModel.from_pretrained(model, {dst})"
    if result.config is None or CONFIG not in paths:
        return None
    from core.hf.towers.models import composite_models

    names = result.config.get("architectures")
    composite = composite_models().get(str(result.config.get("model_type")))
    if composite is not None:
        return f"{composite.architecture}.from_pretrained({dst})"
    stated = [str(name) for name in names] if isinstance(names, list) else []
    kind = next((kind for kind in _KINDS for name in stated if name.endswith(kind)), "")
    return f"AutoModel{kind}.from_pretrained({dst})"


def _megatron_options(result: WrittenResult, topology: Topology) -> Iterator[str]:
    """Yield the options with which Megatron's training script loads a result."""
    from core.hf.values import ARGUMENT as HUGGING_FACE
    from core.megatron.extras.schedule import ENTRY as SCHEDULE
    from core.megatron.extras.schedule import OVERRIDE, is_constant_schedule
    from core.megatron.model.args import fields_of

    target = result.target
    yield f"--load {shlex.quote(str(result.dst))}"
    yield f"--ckpt-format {result.format.megatron_name}"

    is_fsdp = target.facet(FsdpDtensorFacts) is not None
    if is_fsdp:
        yield "--use-megatron-fsdp"

    # The sizes; those of experts equal the others unless they are given.
    yield f"--tensor-model-parallel-size {topology.tp}"
    if not is_fsdp:
        yield f"--pipeline-model-parallel-size {topology.pp}"
        yield from _pipeline_options(target, topology)
    if topology.ep > 1:
        yield f"--expert-model-parallel-size {topology.ep}"
    if topology.expert_tp != topology.tp:
        yield f"--expert-tensor-parallel-size {topology.expert_tp}"

    # No script has the arguments of a model that came from Hugging Face yet.
    fields = fields_of(target.args)
    if HUGGING_FACE in fields:
        from core.verbs.convert.report.checkpoint_args import list_uncopied_options

        yield from list_uncopied_options(fields)

    # Of a release, Megatron loads neither optimizer nor random states anyway.
    if any(image.path.startswith(f"{RELEASE}/") for image in result.images):
        return
    if not any(map(is_optimizer_key, (*target.tensors, *target.objects))):
        yield "--no-load-optim"
    elif is_constant_schedule((target.common or {}).get(SCHEDULE)):
        yield OVERRIDE
    if not _has_random_states(target):
        yield "--no-load-rng"


def _pipeline_options(target: TargetCatalog, topology: Topology) -> Iterator[str]:
    """Yield Megatron's options for the distribution of layers over stages and model chunks."""
    from core.megatron.model.args import fields_of, parse_facts
    from core.megatron.model.hybrid import NAMES as PATTERNS
    from core.megatron.model.pipeline import Pipeline, layout_text
    from core.megatron.model.pipeline_args import list_v_options

    # The stages of a hybrid model are parts of its pattern.
    fields = fields_of(target.args)
    for name in PATTERNS:
        pattern = fields.get(name)
        if isinstance(pattern, str) and pattern:
            if "|" in pattern:
                yield f"--{name.replace('_', '-')} {shlex.quote(pattern)}"
            return

    n_layers = None
    pipeline = topology.pipeline
    try:
        facts = parse_facts(target.args)
        n_layers = facts.n_layers
        pipeline = pipeline or facts.pipeline_at(topology.pp, topology.vpp)
    except CheckpointingException:  # a model that ckpt cannot reshard, copied as it was
        pipeline = pipeline or Pipeline()
    if pipeline.layout is not None:
        yield f"--pipeline-model-parallel-layout {shlex.quote(layout_text(pipeline.layout))}"
        return
    for place, count in (("first", pipeline.first), ("last", pipeline.last)):
        if count is not None:
            yield f"--decoder-{place}-pipeline-num-layers {count}"
    if pipeline.counts_embedding:
        yield "--account-for-embedding-in-pipeline-split"
    if pipeline.counts_loss:
        yield "--account-for-loss-in-pipeline-split"
    if pipeline.has_embedding_stage:
        yield "--standalone-embedding-stage"
    if pipeline.is_v_shaped:  # a schedule of a fork, which sets the number of chunks
        yield from list_v_options(fields_of(target.args))
        return
    if topology.vpp == 1:
        return

    # Every version has the first option, which needs stages of equal size.
    is_even = pipeline.first is None and pipeline.last is None
    if is_even and n_layers is not None:
        n_layers += pipeline.counts_embedding + pipeline.counts_loss
        n_chunks = (topology.pp - pipeline.has_embedding_stage) * topology.vpp
        yield f"--num-layers-per-virtual-pipeline-stage {n_layers // n_chunks}"
    else:
        yield f"--num-virtual-stages-per-pipeline-rank {topology.vpp}"


def _has_random_states(catalog: AnyCatalog) -> bool:
    """Return True if a Megatron checkpoint has random states."""
    from core.megatron.extras.common_state import RNG

    ranks = catalog.facet(RankFacts)
    if ranks is None:
        return any(key.partition("/")[0] == RNG for key in catalog.objects)
    return any(RNG in (as_mapping(files) or {}) for _, files in ranks.ranks.values())
