"""A job, and the facts about its source that decide how the global form is built.

The facts come from the job's options (``--names``, ``--param-order``, ``--config``) and from the
files of the source. Reading them checks each by itself; ``refusals`` checks them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.errors import UsageError
from core.files.json_object import parse_json_object
from core.files.store import translate_os_errors
from core.formats.format import Format
from core.formats.huggingface.files import CONFIG, config_document_of
from core.opening.config_beside import lacks_arguments, may_have_arguments, with_config_arguments
from core.opening.open import Checkpoint
from core.opening.source_files import config_of_source
from core.values import dataclass
from core.verbs.convert.job import Job
from core.verbs.convert.options import HF_ALIASES, writes_fsdp_dtensor

if TYPE_CHECKING:
    from core.formats.trainer.proven_names import ParameterOrder
    from core.hf.family import Family
    from core.megatron.rules.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class FormRequest:
    """A job and the facts about its source that decide how the global form is built.

    Args:
        job: the conversion.
        format: the format of the destination.
        names: family of the tensor names to write, ``hf`` or ``megatron``; None keeps the names.
        model_type: the Hugging Face model type that ``--names`` gives, or None.
        config: the parsed ``config.json`` of the source, or None.
        config_document: content of the file of ``--config`` or of the source's ``config.json``.
        family: the model's family as ``--family`` describes it, or None.
        is_described: the training arguments of the source come from ``--config``.
        comes_from_hf: the source's tensors have Hugging Face's names.
        is_peft: the source is an adapter that peft wrote.
        is_restacked: ``core.megatron.reshard.to_torch_dist`` is to stack or unstack the layers.
        others: the other sources of a merge.
    """

    job: Job
    format: Format
    names: str | None
    model_type: str | None
    config: Mapping[str, object] | None
    config_document: bytes | None
    family: Family | None
    is_described: bool
    comes_from_hf: bool
    is_peft: bool
    is_restacked: bool
    others: tuple[Checkpoint, ...] = ()

    @property
    def rules(self) -> Rules:
        """The layout rules; reading their table takes a while, and most formats do not need it."""
        return load_job_rules(self.job)

    def has_megatron_model(self, catalog: Catalog) -> bool:
        """Return whether a catalog of global tensors is a Megatron model, with its arguments."""
        if catalog.is_rank_local or not may_have_arguments(catalog):
            return False
        from core.megatron.extras.common_state import is_megatron

        return is_megatron(catalog, self.rules)

    @property
    def writes_hf(self) -> bool:
        """True if a Hugging Face checkpoint is written: its names, and its configuration beside."""
        return self.names == "hf" and self.format.carries_files

    @property
    def becomes_hf(self) -> bool:
        """True if Megatron's names become Hugging Face's."""
        return self.names == "hf" and not self.comes_from_hf

    @property
    def becomes_megatron(self) -> bool:
        """True if Hugging Face's names become Megatron's."""
        needs_megatron = self.names == "megatron" or (self.format.has_layout and self.names != "hf")
        return self.comes_from_hf and needs_megatron


def load_job_rules(job: Job) -> Rules:
    """Load the layout rules of a job.

    Raises:
        CheckpointingException: the user's file cannot be used.
    """
    from core.megatron.rules.tables import load_rules as load_tables

    return load_tables(job.rules, unknown=job.unknown)


def parse_names(job: Job) -> tuple[str | None, str | None]:
    """Parse ``--names``, and ``--to hf`` and ``--to fsdp_dtensor``, which imply it.

    Returns:
        ``hf``, ``megatron`` or None to keep the names; and the Hugging Face model type or None.

    Raises:
        UsageError: ``--names`` has another value.
    """
    if job.names is None:
        if writes_fsdp_dtensor(job):
            return "megatron", None
        return ("hf", None) if job.to is not None and job.to.lower() in HF_ALIASES else (None, None)
    family, _, model_type = job.names.partition(":")
    if family not in ("hf", "megatron") or (model_type and family != "hf"):
        raise UsageError(
            f"--names: unknown value {job.names!r}",
            hint="use hf, hf:MODEL_TYPE (such as hf:qwen3_moe), or megatron",
        )
    return family, model_type or None


def read_param_order(option: str) -> ParameterOrder | None:
    """Read the file of ``--param-order``; None for the order of the model.

    Raises:
        UsageError: it is not a list of names.
        StorageError: the file cannot be read.
    """
    from core.formats.trainer.proven_names import MODEL, parse_order

    if option == MODEL:
        return None
    with translate_os_errors(option, doing="read"):
        data = Path(option).read_bytes()
    return parse_order(data, label=option)


def read_config(
    job: Job, catalog: Catalog, source: Checkpoint
) -> tuple[Catalog, Mapping[str, object] | None]:
    """Find and parse the model's ``config.json``, and add one of ``--config`` to the catalog.

    Without ``--config`` the file is stored with the weights or in a directory above them.

    Returns:
        The catalog, and the parsed configuration or None.

    Raises:
        UsageError: both ``--config`` and the source have one.
        CorruptError: the file is not valid JSON.
        UnsupportedError: it is to describe a Megatron model, and is of no supported family.
    """
    if job.config is None:
        return catalog, config_of_source(source)
    if isinstance(catalog.files.get(CONFIG), Tensor):
        raise UsageError(
            f"--config: SRC already has a {CONFIG}",
            file=str(job.config),
            hint=f"omit --config, or edit the {CONFIG} in SRC",
        )
    with translate_os_errors(str(job.config), doing="read"):
        data = job.config.read_bytes()
    config = parse_json_object(data, file=str(job.config))
    # The tensors of a Megatron model without arguments are described by the configuration alone.
    if lacks_arguments(catalog) and isinstance(config.get("model_type"), str):
        family = None
        if job.family is not None:
            from core.hf.family import read_family

            family = read_family(job.family)
        catalog = with_config_arguments(
            catalog, data, file=str(job.config), iteration=source.iteration, family=family
        )
    return replace(catalog, files={**catalog.files, CONFIG: data}), config


def config_document(catalog: Catalog, source: Checkpoint) -> bytes | None:
    """Return the content of the model's ``config.json``, from ``--config`` or from the source."""
    content = catalog.files.get(CONFIG)
    if isinstance(content, bytes):
        return content
    return config_document_of(source.store) if CONFIG in source.catalog.files else None
