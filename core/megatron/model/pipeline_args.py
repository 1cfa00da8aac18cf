"""The training arguments that distribute layers over pipeline stages: reading and writing.

============================================ ======================================================
 argument                                    value
============================================ ======================================================
 ``decoder_first_pipeline_num_layers``       a number or None, called
                                             ``num_layers_in_first_pipeline_stage`` in transformer
                                             configurations; the same for the last stage
 ``account_for_embedding_in_pipeline_split`` a bool; the same for the loss
 ``pipeline_model_parallel_layout``          a string, lists of words, or a pickled
                                             ``PipelineParallelLayerLayout``, of which only the
                                             attributes are read
 ``standalone_embedding_stage``              a bool, in older Megatron
 ``num_layer_list``                          MindSpeed's text with the number of layers of every
                                             stage: ``"4,4,3"``; written as a layout
 ``zero_bubble_v_schedule``,                 a bool: V-shaped (sail-sg's zero bubble, Primus)
 ``enable_1f1b_v``
 ``pp_algorithm``                            V-shaped by these names, if ``patch_primus_pipeline``
                                             (Primus)
 ``schedules_method``                        V-shaped if ``dualpipev`` (MindSpeed)
============================================ ======================================================

Source: Megatron-LM d98e8a64 ``training/arguments.py``; megatron-core 0.16.1
``transformer/pipeline_parallel_layer_layout.py``; Primus (AMD-AGI, 2025)
``primus/backends/megatron/patches``; MindSpeed-LLM (2025) ``schedules_method``,
``--num-layer-list``.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import CorruptError, UsageError
from core.megatron.model.pipeline import Pipeline, layout_of_words, layout_text, parse_layout
from core.pickle.fields import FieldReader, describe_value, text_or_none
from core.pickle.inert import Global, Inert, attributes

LAYOUT = "pipeline_model_parallel_layout"
FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
COUNTS_EMBEDDING = "account_for_embedding_in_pipeline_split"
COUNTS_LOSS = "account_for_loss_in_pipeline_split"
EMBEDDING_STAGE = "standalone_embedding_stage"
LAYER_COUNTS = "num_layer_list"
_LAYER_TYPE = Global("megatron.core.transformer.enums", "LayerType")
_LAYER_TYPES = {1: "embedding", 2: "loss", 3: "encoder", 4: "decoder", 5: "mtp"}


def pipeline_of(fields: Mapping[str, object], *, file: str | None = None) -> Pipeline:
    """Return the distribution of layers that the arguments of a run describe.

    Raises:
        CorruptError: an argument is invalid, or two of them exclude each other.
    """
    try:
        return Pipeline(
            first=_count(fields, FIRST),
            last=_count(fields, LAST),
            counts_embedding=bool(fields.get(COUNTS_EMBEDDING)),
            counts_loss=bool(fields.get(COUNTS_LOSS)),
            layout=layout_of(fields.get(LAYOUT)) or _layout_of_counts(fields),
            has_embedding_stage=bool(fields.get(EMBEDDING_STAGE)),
            is_v_shaped=is_v_shaped(fields),
        )
    except UsageError as err:
        raise CorruptError(
            f"in the training arguments, {err.message}", file=file, hint=err.hint
        ) from err


def is_v_shaped(fields: Mapping[str, object]) -> bool:
    """Return whether the arguments of a fork describe a V-shaped pipeline."""
    is_primus = bool(fields.get("patch_primus_pipeline")) and not fields.get("patch_zero_bubble")
    return (
        bool(fields.get("zero_bubble_v_schedule") or fields.get("enable_1f1b_v"))
        or (is_primus and fields.get("pp_algorithm") in _V_ALGORITHMS)
        or fields.get("schedules_method") == "dualpipev"
    )


def list_v_options(fields: Mapping[str, object]) -> list[str]:
    """Return the options of a fork's training script that give a V-shaped pipeline."""
    options = [
        f"--{name.replace('_', '-')}"
        for name in ("zero_bubble_v_schedule", "enable_1f1b_v")
        if fields.get(name)
    ]
    method = fields.get("schedules_method")
    return options + ([f"--schedules-method {method}"] if method == "dualpipev" else [])


_V_ALGORITHMS = ("zbv-formatted", "v-half", "v-min")
_V_ARGUMENTS = {
    "zero_bubble_v_schedule": False,
    "enable_1f1b_v": False,
    "patch_primus_pipeline": False,
    "schedules_method": None,
}
"""Argument of a V-shaped pipeline → its value for another one."""


def layout_of(value: object) -> tuple[str, ...] | None:
    """Return the letters of every chunk of a layout argument, or None if it is None or empty.

    Args:
        value: a string, lists of words, or a pickled ``PipelineParallelLayerLayout``.

    Raises:
        UsageError: the value is not a layout.
    """
    if value is None or value == "" or value == []:
        return None
    if isinstance(value, Inert) and value.fn != _LAYER_TYPE:
        return _layout_of_object(value)
    if isinstance(value, str):
        return parse_layout(value)
    if isinstance(value, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in value):
        return layout_of_words([[_word_of(item) for item in row] for row in value])
    raise UsageError(f"{LAYOUT} is a {type(value).__name__}; expected a string or lists of layers")


def _layout_of_counts(fields: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the layout that MindSpeed's list of numbers of layers stands for, or None.

    Raises:
        UsageError: the list is malformed.
    """
    text, n_predictions = fields.get(LAYER_COUNTS), fields.get("mtp_num_layers")
    if text in (None, ""):
        return None
    counts = (text_or_none(text) or describe_value(text)).split(",")
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise UsageError(f"{LAYER_COUNTS} is {describe_value(text)}, not comma-separated numbers")
    chunks = "|".join(f"t*{count}" if int(count) else "" for count in counts)
    ending = f"m*{n_predictions}L" if isinstance(n_predictions, int) and n_predictions else "L"
    return parse_layout(f"E{chunks}{ending}")


def _layout_of_object(value: Inert) -> tuple[str, ...]:
    """Return the layout of a pickled ``PipelineParallelLayerLayout``.

    The object keeps its constructor's argument, or lists of the chunks of each stage.

    Raises:
        UsageError: the object has neither.
    """
    fields = attributes(value) or {}
    if isinstance(fields.get("input_data"), (str, list)):
        return layout_of(fields["input_data"]) or ()
    stages = fields.get("layout")
    if (
        not isinstance(stages, list)
        or not stages
        or not all(isinstance(stage, list) and stage for stage in stages)
    ):
        raise UsageError(f"{LAYOUT} is a {value.class_name} without a layout")

    # Chunks are ordered with the virtual stages outermost.
    chunks = [stage[v] for v in range(len(stages[0])) for stage in stages if v < len(stage)]
    return layout_of(chunks) or ()


def _word_of(item: object) -> str:
    """Return the word in a layout's list, or the name of a pickled ``LayerType`` there."""
    if isinstance(item, Inert) and item.fn == _LAYER_TYPE and len(item.args) == 1:
        return _LAYER_TYPES.get(item.args[0], "") if isinstance(item.args[0], int) else ""
    return item if isinstance(item, str) else describe_value(item)


def _count(fields: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    count = next((fields[name] for name in names if fields.get(name) is not None), None)
    if count is None:
        return None
    return FieldReader(error=UsageError).read_int(count, names[0], least=1)


def changes_for(fields: Mapping[str, object], pipeline: Pipeline) -> dict[str, object]:
    """Return the arguments that must change, or be added, to describe ``pipeline``.

    Args:
        fields: arguments of the source.
    """
    source = pipeline_of(fields)
    changes: dict[str, object] = {}
    if pipeline.layout != source.layout:
        changes[LAYOUT] = None if pipeline.layout is None else layout_text(pipeline.layout)
        changes[LAYER_COUNTS] = None

    # Numbers of layers have two names; those in the arguments change, or else the first is added.
    for names, before, after in (
        (FIRST, source.first, pipeline.first),
        (LAST, source.last, pipeline.last),
    ):
        if before != after:
            changes |= dict.fromkeys([name for name in names if name in fields] or names[:1], after)
    for name, had, has in (
        (COUNTS_EMBEDDING, source.counts_embedding, pipeline.counts_embedding),
        (COUNTS_LOSS, source.counts_loss, pipeline.counts_loss),
        (EMBEDDING_STAGE, source.has_embedding_stage, pipeline.has_embedding_stage),
    ):
        if had != has:
            changes[name] = has
    if source.is_v_shaped and not pipeline.is_v_shaped:
        changes |= _V_ARGUMENTS

    # An absent argument means None or False already.
    return {name: value for name, value in changes.items() if name in fields or value}
