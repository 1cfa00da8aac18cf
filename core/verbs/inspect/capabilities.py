"""Find the formats that a checkpoint can be converted to, and the options that this takes.

Nothing is guessed: the job is planned as in ``core.verbs.convert.run``, up to the point where bytes
would move, first without options, then with those that may help. To keep inspecting a checkpoint
quick,

* the objects are loaded once, and the global form is built once for all formats that share it;
* of many tensors whose names differ only in their numbers, and which are alike otherwise, only the
  first is planned. A parallel layout needs the complete model: there, the form is built from all
  tensors, and thinned afterwards for formats without a layout.

So damage in one of many layers is not found here, but by ``core.verbs.validate.run``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import combinations

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import TrainingState
from core.engine.changes.select import build_dtype_rule, keep_entries
from core.engine.plan.match import OVERLAPS_RULE
from core.engine.plan.plan import make_plan
from core.errors import CheckpointingException
from core.formats.format import Format
from core.formats.registry import format_called, writable_formats
from core.formats.torch.nested_names import uses_in
from core.megatron.model.topology import Topology
from core.opening.objects import with_objects_loaded
from core.opening.open import Checkpoint
from core.opening.target import retyped
from core.pickle.inert import attributes, count_values
from core.pickle.names import judge
from core.pickle.noted import gc_paused
from core.values import dataclass
from core.verbs.convert.global_form.build import global_form
from core.verbs.convert.global_form.form import GlobalForm
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.options import FSDP_DTENSOR, has_model_form, writes_fsdp_dtensor
from core.verbs.convert.sizes import target_topology
from core.verbs.convert.target_form import cut_form, without_unsafe
from core.verbs.inspect.capability import (
    HF,
    MANY,
    NEEDS_LAYOUT,
    WITH_FLOAT32,
    WITHOUT_OPTIM,
    Capability,
    ModelTraits,
    list_representatives,
)

MANY_STREAMS = 4_096
"""More objects than this are thinned before loading, because each may have its own stream."""
LARGE = 400
"""More tensors than this are not laid out in files if a parallel layout has checked them."""
HUGE = 60_000
"""A model with a layout and more tensors than this is not tried: planning takes too long."""
MANY_NAMES = 5_000
"""If more tensors than this remain after thinning, none is tried: 10,000 take about ten seconds."""
MANY_VALUES = 100_000
"""A checkpoint with more values in its objects is not tried: every format would write them."""
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of ``convert`` that may make a job possible.

    Args:
        text: the condition, with the option, for the user.
        fields: fields of the job that the option sets.
    """

    text: str
    fields: Mapping[str, object]


_NO_OPTIM = _Option(WITHOUT_OPTIM, {"optim": "drop"})
_DEQUANTIZE = _Option("with the weights dequantized: --dequantize bf16", {"dequantize": "bf16"})
_LEAVES_OPTIM_OUT = "the optimizer is left out"
"""Condition of ``--to hf``, which leaves the optimizer out without an option."""
_HF_NAMES = _Option("with Hugging Face's names: --names hf", {"names": "hf"})
_DROP_UNKNOWN = _Option(
    "without objects of unknown classes: --drop-unknown", {"drop_unknown": True}
)
_VOCABULARY = _Option(
    "with the size of the vocabulary: --vocab-size N, or --keep-padded-vocab",
    {"keep_padded_vocab": True},
)
_FLOAT32 = _Option(WITH_FLOAT32, {"dtype": ((None, "float32"),)})
_MEGATRON = "megatron"


def capabilities_of(checkpoint: Checkpoint, model: ModelTraits) -> tuple[Capability, ...] | None:
    """Return the possible and impossible conversions of a checkpoint.

    Formats under the same condition, or with the same reason against them, share an entry.

    Returns:
        None if the checkpoint is too large to try them.
    """
    if model.has_layout and len(checkpoint.catalog.tensors) > HUGE:
        return None
    if _has_many_values(checkpoint.catalog):
        return None
    # Try every format that can be written, and safetensors with Hugging Face's names as well.
    possible: dict[str | None, list[str]] = {}
    impossible: dict[str | None, list[str]] = {}
    written = writable_formats()
    targets = [(format.name, format) for format in written if format is not checkpoint.format]
    if not model.is_hf:
        targets += [(HF, format) for format in written if HF in format.aliases]
    # Megatron-FSDP's checkpoints are DCP with a form of its own, for Megatron's models only.
    if model.has_layout:
        targets += [(FSDP_DTENSOR, format) for format in written if FSDP_DTENSOR in format.aliases]
    with gc_paused():
        trials = _Trials(checkpoint, model)
        if trials.has_many_names:
            return None
        for name, format in targets:
            is_possible, why = trials.conversion(name, format)
            (possible if is_possible else impossible).setdefault(why, []).append(name)
        can_reshard, why = trials.reshard()
    return (
        *(Capability("convert", True, tuple(names), why) for why, names in possible.items()),
        *(Capability("convert", False, tuple(names), why) for why, names in impossible.items()),
        Capability("reshard", can_reshard, (), why),
    )


class _Trials:
    """Plans jobs to find out whether they are possible, and keeps what several of them share."""

    def __init__(self, checkpoint: Checkpoint, model: ModelTraits) -> None:
        self._model = model
        self._is_covered = False
        self._is_vetted = False
        self._failure: CheckpointingException | None = None
        self._raw_forms: dict[tuple[object, ...], GlobalForm] = {}
        self._forms: dict[tuple[object, ...], GlobalForm | CheckpointingException] = {}
        self._rank_refusals: dict[tuple[int, Topology], CheckpointingException | None] = {}
        self._has_training_state = checkpoint.catalog.facet(TrainingState) is not None
        # Thin the catalog before loading objects with streams of their own, because thousands take
        # long, and after loading, when the classes in them are known.
        is_plain = not model.has_layout and not checkpoint.catalog.is_rank_local
        try:
            if is_plain and len(checkpoint.catalog.objects) > MANY_STREAMS:
                checkpoint = replace(checkpoint, catalog=_thinned(checkpoint.catalog))
            checkpoint = with_objects_loaded(checkpoint)
            if is_plain:
                checkpoint = replace(checkpoint, catalog=_thinned(checkpoint.catalog))
        except CheckpointingException as err:
            self._failure = err
        self._source = checkpoint
        self.has_many_names = (
            is_plain and self._failure is None and len(checkpoint.catalog.tensors) > MANY_NAMES
        )

    def conversion(self, to: str, format: Format) -> tuple[bool, str | None]:
        """Return whether the checkpoint can be converted, and the condition or the reason."""
        model = self._model
        # Hugging Face's names have none for the optimizer, so it is left out without an option.
        leaves_optim_out = to == HF and model.has_optimizer
        needs_layout = (
            format.has_layout or to in (HF, FSDP_DTENSOR) or self._source.format.is_rank_local
        )
        offers = (
            (_NO_OPTIM, model.has_optimizer and not leaves_optim_out),
            (_DEQUANTIZE, model.has_scales),
            (_VOCABULARY, needs_layout and self._lacks_vocabulary),
            (_HF_NAMES, model.is_hf and format.has_common_state),
            (_FLOAT32, format.adapt is not None),
        )
        options = [option for option, is_useful in offers if is_useful]
        # For a model with Hugging Face's names, the planner gives a more precise reason.
        lacks_layout = needs_layout and model.layout_refusal is not None and not model.is_hf
        # DeepSpeed's universal form takes an optimizer under Hugging Face's names, not Megatron's.
        if (
            format.has_named_optimizer
            and model.has_optimizer
            and not model.is_hf
            and not lacks_layout
        ):
            casts = [option for option in options if option in (_DEQUANTIZE, _FLOAT32)]
            job = Job(src=self._source.path, to=to)
            is_possible, why = self._try_options(job, format, [_HF_NAMES, *casts])
            if is_possible:
                return True, why
        # No option gives the tensors other names.
        if lacks_layout and not self._source.format.has_layout:
            options = []
        job = Job(src=self._source.path, to=to, optim="drop" if leaves_optim_out else "carry")
        is_possible, why = self._try_options(job, format, options)
        if lacks_layout and not is_possible:
            return False, model.layout_refusal
        if is_possible and leaves_optim_out:
            return True, "; ".join([_LEAVES_OPTIM_OUT, *([why] if why else [])])
        return is_possible, why

    def reshard(self) -> tuple[bool, str | None]:
        """Return whether the parallel sizes can be changed, and the condition or the reason."""
        own = self._source.format
        if self._model.layout_refusal is not None and not self._model.is_hf:
            return False, self._model.layout_refusal
        options = [
            *([_NO_OPTIM] if self._model.has_optimizer else []),
            *([_DEQUANTIZE] if self._model.has_scales else []),
            *([_VOCABULARY] if self._lacks_vocabulary else []),
        ]
        job = Job(src=self._source.path, topology=TopologyChange(tp=1), is_reshard=True)
        if own.has_layout:
            return self._try_options(job, own, options)
        # A format without a parallel layout can only be resharded into one that has it.
        megatron = format_called(_MEGATRON)
        is_possible, why = self._try_options(replace(job, to=megatron.name), megatron, options)
        if not is_possible:
            return False, why
        return True, "; ".join([*([why] if why else []), NEEDS_LAYOUT])

    def _try_options(
        self, job: Job, format: Format, options: list[_Option]
    ) -> tuple[bool, str | None]:
        """Return whether a job is possible, and the fewest options that it takes or the reason.

        Args:
            options: options that may help.
        """
        first = self._refusal(job, format, ())
        if first is None:
            return True, None
        if not self._is_vetted and self._has_unknown_classes and not format.keeps_unknown_classes:
            options = [*options, _DROP_UNKNOWN]
        # If all options together do not help, fewer of them do not either.
        with_all = self._refusal(job, format, tuple(options)) if options else first
        if with_all is not None:
            return False, with_all.sentence
        subsets = [
            chosen for size in range(1, len(options)) for chosen in combinations(options, size)
        ]
        fewest = next(
            (chosen for chosen in subsets if self._refusal(job, format, chosen) is None), options
        )
        return True, "; ".join(option.text for option in fewest)

    def _refusal(
        self, job: Job, format: Format, options: tuple[_Option, ...]
    ) -> CheckpointingException | None:
        """Plan a job with some options; return the error, or None if the job is possible."""
        fields = {name: value for option in options for name, value in option.fields.items()}
        job = replace(job, **fields)  # type: ignore[arg-type]  # the table has fields of a job
        try:
            form = self._form(job, format, options)
            # Converting to rank files and changing sizes into them are one plan for equal sizes.
            if format.is_rank_local and not job.dtype:
                sizes = (id(form), target_topology(job, form.catalog, format))
                if sizes not in self._rank_refusals:
                    self._rank_refusals[sizes] = self._plan_refusal(job, format, form)
                return self._rank_refusals[sizes]
        except CheckpointingException as err:
            return err
        return self._plan_refusal(job, format, form)

    def _plan_refusal(
        self, job: Job, format: Format, form: GlobalForm
    ) -> CheckpointingException | None:
        """Cut a global form for a job, and plan it; return the error, or None."""
        assert format.lay_out is not None, "only formats that ckpt can write are tried"
        try:
            # A parallel layout is checked with all tensors; others with a sample.
            has_layout = (
                has_model_form(job, format) and self._model.has_layout and job.names is None
            )
            catalog, target = cut_form(
                job, form.catalog if has_layout else _thinned(form.catalog), format
            )
            if has_layout and len(form.catalog.tensors) > LARGE:
                return None
            if format.check is not None:
                format.check(target)
                return None
            # The plan proves that the source has every region and that each cast exists. Without
            # layout and casts, the plan for one format proves it for all.
            images = tuple(format.lay_out(target))
            if has_layout or job.dtype or job.dequantize or not self._is_covered:
                make_plan(catalog, target, images)
                self._is_covered = True
        except CheckpointingException as err:
            # Nothing helps against the overlaps, and finding them takes seconds.
            if err.rule == OVERLAPS_RULE:
                self._failure = err
            return err
        return None

    def _form(self, job: Job, format: Format, options: tuple[_Option, ...]) -> GlobalForm:
        """Build the checked global form for a job, or take it from an earlier job.

        Raises:
            CheckpointingException: the job is not possible.
        """
        if self._failure is not None:
            raise self._failure
        # A cast is the last of the changes, so it can be applied to the form without it.
        casts = job.dtype if not self._model.has_scales else ()
        if casts:
            form = self._form(
                replace(job, dtype=()),
                format,
                tuple(option for option in options if option != _FLOAT32),
            )
            return replace(form, catalog=retyped(form.catalog, build_dtype_rule(casts)))
        # Formats without a layout share a form, as do Megatron's distributed formats for a source
        # in another format; its optimizer apart, a Hugging Face model has one form for rank files
        # as well. Raw forms are shared by formats that differ only in the classes they keep.
        form_name: object = self._model.is_hf and format.carries_files
        if writes_fsdp_dtensor(job):
            form_name = FSDP_DTENSOR
        elif format.has_layout:
            renames_weights = (
                self._model.is_hf and not self._model.has_optimizer and job.names is None
            )
            is_shared = format.has_common_state or renames_weights
            is_shared &= self._source.catalog.common is None
            form_name = "mcore" if is_shared else format.name
        keeps_unknown = format.keeps_unknown_classes
        # Rank files have no sizes but those of the job, for which the form is the same.
        keeps_sizes = job.topology is None or format.is_rank_local
        optim = "carry" if job.optim is None and not self._has_training_state else job.optim
        option_texts = (option.text for option in options)
        raw_key = (form_name, job.to == HF, keeps_sizes, optim, *option_texts)
        key = (keeps_unknown, *raw_key)
        result = self._forms.get(key)
        if result is None:
            try:
                if raw_key not in self._raw_forms:
                    self._raw_forms[raw_key] = global_form(job, self._source, format)
                result = without_unsafe(self._raw_forms[raw_key], job, self._source, format)
                self._is_vetted |= not keeps_unknown and not job.drop_unknown
            except CheckpointingException as err:
                result = err
            self._forms[key] = result
        if isinstance(result, CheckpointingException):
            raise result
        return result

    @cached_property
    def _lacks_vocabulary(self) -> bool:
        """True if the training arguments do not state the vocabulary's size without padding."""
        fields = attributes(self._source.catalog.args) or {}
        return bool(fields) and fields.get("vocab_size") is None

    @cached_property
    def _has_unknown_classes(self) -> bool:
        objects = self._source.catalog.objects.values()
        return any(judge(use) == "unknown" for item in objects for use in uses_in(item.value))


def _has_many_values(catalog: Catalog) -> bool:
    """Return whether the objects have too many values to plan writing them."""
    values = [item.value for item in catalog.objects.values() if item.raw_key is None]
    return count_values(values, limit=MANY_VALUES) > MANY_VALUES


def _thinned(catalog: Catalog) -> Catalog:
    """Keep only the first of tensors and objects whose names differ in their numbers.

    Tensors must also have the same dtype and number of axes, objects the same classes. Objects with
    streams that are not loaded yet are compared by their names only.
    """
    if len(catalog.tensors) + len(catalog.objects) <= MANY or not catalog.tensors:
        return catalog

    keys = {*list_representatives(catalog.tensors)}
    first_of: dict[object, str] = {}
    for key, item in catalog.objects.items():
        first_of.setdefault((_DIGITS.sub("0", key), frozenset(uses_in(item.value))), key)
    keys |= {*first_of.values(), *catalog.refused}
    return keep_entries(catalog, keys.__contains__).catalog
