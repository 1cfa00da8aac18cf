"""Options and report of a conversion, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from core.files.syscalls import default_memory_bytes
from core.values import (
    Brief,
    bytes_text,
    changed_fields,
    list_facts,
    n_text,
    seconds_text,
    shown_briefly,
)

if TYPE_CHECKING:
    from core.engine.device.device import Device
    from core.engine.team.protocol import Figures
    from core.megatron.model.pipeline import Pipeline
    from core.megatron.model.version import MegatronVersion
    from core.verbs.convert.report.dropped import DroppedReason
    from core.verbs.merge.request import Merge

MIB = 1 << 20
DEFAULT_MEMORY_BYTES = default_memory_bytes()
DEFAULT_THREADS = 2

SIZES = ("tp", "pp", "vpp", "ep", "etp")
"""Names of the parallel sizes; options for those of the destination end in ``_new``."""
PIPELINE_OPTIONS = {
    "decoder_first_pipeline_num_layers": "first",
    "decoder_last_pipeline_num_layers": "last",
    "account_for_embedding_in_pipeline_split": "counts_embedding",
    "account_for_loss_in_pipeline_split": "counts_loss",
    "pipeline_model_parallel_layout": "layout",
}
"""Option → its field of ``core.megatron.model.pipeline.Pipeline``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChange:
    """Parallel sizes of the destination, and the sizes that the user asserts the source has.

    Args:
        tp, pp, vpp, ep, etp: sizes of the destination; None keeps the source's.
        pipeline: distribution of the destination's layers over its pipeline stages; None keeps
            the source's where it still applies, and distributes evenly otherwise
            (``core.megatron.model.facts.ModelFacts.pipeline_at``).
        pipeline_options: names of the options that gave the pipeline, for messages.
        source: asserted sizes of the source by name; a mismatch is an error.
    """

    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    pipeline: Pipeline | None = None
    pipeline_options: tuple[str, ...] = ()
    source: dict[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes to change, by name."""
        return {name: size for name in SIZES if (size := getattr(self, name)) is not None}

    @property
    def is_change(self) -> bool:
        """True if a size or the pipeline of the destination is given."""
        return bool(self.sizes) or self.pipeline is not None

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that give the sizes and the pipeline of the destination."""
        return (*(f"{name}_new" for name in self.sizes), *self.pipeline_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Options of one conversion.

    Args:
        src: path of the source (``core.opening.open`` has the kinds of paths).
        dst: path of the destination; None proposes a name in the directory of ``src``.
        to: target format; None keeps the source's.
        iteration: iteration of a training root; None for the one that its tracker names.
        topology: parallel sizes to change and to check; None for none.
        is_reshard: the verb is ``reshard``; a proposed name then has the parallel sizes.
        vocab_size: the true number of vocabulary rows, where the checkpoint does not record it.
        config: the ``config.json`` of a model with Hugging Face's names, where the source has none
            of its own; or the one that a Megatron checkpoint was converted from, for what its
            arguments cannot express.
        family: a TOML file that describes the family of a model with Hugging Face's names, in place
            of the tables of this program (``core.hf.family``).
        text_model: take the text model out of a vision-language model and leave out all else
            (``core.hf.text_model``).
        tokenizer: a directory whose tokenizer files become part of a Hugging Face directory.
        make_vocab_size_divisible_by: where Hugging Face's weights become Megatron's, padded
            vocabularies are multiples of it times TP; None for Megatron's default.
        keep_padded_vocab: keep padding rows as if they were real ones.
        optim: ``carry`` or ``drop`` the optimizer; None carries it, except into a Hugging Face
            checkpoint, which has none.
        rng: ``keep`` or ``drop`` the random states; None keeps them where possible
            (``core.megatron.extras.random_states``).
        names: family of the tensor names to write: ``hf``, ``hf:MODEL_TYPE`` or ``megatron``;
            None keeps the names, unless the target format implies a family.
        transformer_impl: ``local`` or ``transformer_engine``: rename Megatron's parameters to
            those of this implementation; None keeps them, and takes Transformer Engine's where the
            source has Hugging Face's names (``core.megatron.placement.implementation``).
        megatron_version: the megatron-core that will load the rank files; None writes the
            optimizer's groups as the source has them.
        experts: the kind of experts to write (``core.megatron.placement.expert_kind``); None keeps
            it.
        param_order: order of the parameters that an optimizer numbers: ``model`` for that of the
            checkpoint's own model, or the path of a file with their names
            (``core.opening.numbered_optimizers``); None keeps the numbers.
        dequantize: dtype that quantized tensors are dequantized to; None keeps them. This and the
            options up to ``quantize`` are applied by ``core.verbs.convert.apply_changes``, in its
            order. Each matches the names that the changes before it produced, the first those that
            ``ckpt inspect`` shows.
        dequantize_optim: dequantize optimizer states of 8 and 4 bits to float32.
        include, exclude: globs of the entries to keep and to drop.
        strip_prefix: prefixes to remove from keys.
        add_prefix: prefix to add to all keys; None for none.
        rename: (pattern, replacement) pairs.
        untie, tie: (key, original) pairs: write the key as a copy, or drop it after checking that
            it is identical.
        stack_layers: stack layers along an axis.
        unstack_layers: globs of stacked tensors to split into layers; () for the usual names, None
            for no unstacking.
        layer_axis: number of the axis along which layers are stacked or unstacked, from 0.
        dtype, quantize: (glob, dtype) pairs, of which later ones win; the glob None stands for the
            model's weights.
        max_shard_size: maximum size of an output file with tensors, where the format can split;
            None for its default.
        metadata_only: write new metadata only; data files are hard links to the source's
            (``core.verbs.convert.hard_links``).
        weights_only: set aside every object that ``torch.load(weights_only=True)`` refuses, even
            where it could stay as it was.
        drop_unknown: drop objects of unknown classes where the target cannot hold them.
        drop_missing: leave out entries that an index lists without data.
        missing_chunks: ``fill`` zarr chunks that are not stored, or ``error`` to refuse them
            (``core.opening.open``).
        on_replica_mismatch: ``error`` compares the copies of a tensor that several ranks hold and
            refuses different ones; ``first`` takes the first and does not read the others.
        memory_bytes: memory limit of the process, imports included.
        beside_bytes: part of ``memory_bytes`` that is used by what the engine does not count, such
            as the runtime of a team.
        threads: number of copying threads.
        resume: keep an unfinished staging directory on failure, and continue one.
        force: replace an existing destination as soon as the new one is complete.
        crc, digest: compute CRC-32 and content digests in the same pass.
        fsync: wait until the bytes are on the disk.
        fingerprint: compute fingerprints of the canonical tensors in the same pass
            (``core.publish.manifest.fingerprint_copy``).
        verify: read the result back before it becomes visible, and compare every byte with the
            source.
        rules: a TOML file with additional layout rules.
        unknown: ``refuse`` tensors without a layout rule, or ``replicate`` those that are the same
            on all ranks.
        device: the device for per-byte work; None for the CPU. The bytes are the same.
        merge: compute the tensors from those of ``src`` and of other checkpoints; None to move
            those of ``src``.
    """

    src: Path
    dst: Path | None = None
    to: str | None = None
    iteration: int | None = None
    topology: TopologyChange | None = None
    is_reshard: bool = False
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int | None = None
    keep_padded_vocab: bool = False
    optim: str | None = None
    rng: str | None = None
    names: str | None = None
    config: Path | None = None
    family: Path | None = None
    text_model: bool = False
    tokenizer: Path | None = None
    transformer_impl: str | None = None
    megatron_version: MegatronVersion | None = None
    experts: str | None = None
    param_order: str | None = None
    dequantize: str | None = None
    dequantize_optim: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: tuple[str, ...] = ()
    add_prefix: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    untie: tuple[tuple[str, str], ...] = ()
    tie: tuple[tuple[str, str], ...] = ()
    stack_layers: bool = False
    unstack_layers: tuple[str, ...] | None = None
    layer_axis: int = 0
    dtype: tuple[tuple[str | None, str], ...] = ()
    quantize: tuple[tuple[str | None, str], ...] = ()
    max_shard_size: int | None = None
    metadata_only: bool = False
    weights_only: bool = False
    drop_unknown: bool = False
    drop_missing: bool = False
    missing_chunks: str = "fill"
    on_replica_mismatch: str = "error"
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    beside_bytes: int = 0
    threads: int = DEFAULT_THREADS
    resume: bool = False
    force: bool = False
    crc: bool = True
    digest: bool = True
    fsync: bool = True
    fingerprint: bool = False
    verify: bool = False
    rules: Path | None = None
    unknown: str = "refuse"
    device: Device | None = None
    merge: Merge | None = None

    @property
    def given_options(self) -> list[str]:
        """Names of the options that differ from their defaults, as in ``NoEffectError``."""
        names: list[str] = []
        for name in changed_fields(self):
            value = getattr(self, name)
            if isinstance(value, TopologyChange):
                names += (*value.options, *value.source)
            else:
                is_off = value is False or (name, value) == ("optim", "drop")
                names.append(f"no_{name}" if is_off else name)
        return names

    @property
    def stacking(self) -> bool | None:
        """True to stack layers, False to unstack them, None to keep them as they are."""
        return True if self.stack_layers else None if self.unstack_layers is None else False

    @property
    def own_memory_bytes(self) -> int:
        """The part of ``memory_bytes`` that the engine counts and divides."""
        return self.memory_bytes - self.beside_bytes


@shown_briefly
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of a finished job.

    Args:
        src, dst: paths of the source and the destination.
        source_format, format: names of their formats.
        n_tensors: tensors written.
        bytes_read: bytes of tensors read.
        bytes_written: bytes of all output files.
        bytes_resumed: part of ``bytes_written`` that an earlier, interrupted run had written.
        bytes_verified: bytes of tensors that were read back and compared; 0 without ``verify``.
        n_copies: copies of (parts of) tensors on several ranks that were compared and are equal.
        seconds: wall time.
        files: output files, relative to ``dst`` (or its name, if it is one file).
        n_fingerprints: fingerprints in the manifest.
        n_read_back: fingerprints for which the result was read back.
        manifest: path of the manifest.
        notes: what the user should know.
        next: the line that loads the result: options of Megatron, or a call of the library that
            reads the format.
        dropped: entries of the source that the destination does not hold, with the reason.
        dropped_reasons: the reasons, each once, with the number of entries and examples.
        workers: figures of each of several workers; () for a single process.
    """

    src: str
    dst: str
    source_format: str
    format: str
    n_tensors: int
    bytes_read: int
    bytes_written: int
    bytes_resumed: int
    bytes_verified: int
    n_copies: int
    seconds: float
    files: tuple[str, ...]
    n_fingerprints: int
    n_read_back: int
    manifest: str
    notes: tuple[str, ...]
    dropped: tuple[str, ...]
    dropped_reasons: tuple[DroppedReason, ...] = ()
    next: str = ""
    workers: tuple[Figures, ...] = ()

    def brief(self) -> Brief:
        """Return what is shown of the report."""
        size = f"{n_text(len(self.files), 'file')}, {bytes_text(self.bytes_written)}"
        verified = f", {bytes_text(self.bytes_verified)} read back" if self.bytes_verified else ""
        facts = [
            ("format", f"{self.format}, {size}"),
            ("tensors", f"{self.n_tensors:,}"),
            ("time", f"{seconds_text(self.seconds)}{verified}"),
            *list_facts("not carried", self.dropped_reasons),
            *list_facts("note", self.notes),
        ]
        return Brief(f"wrote {self.dst}", [*facts, ("next", self.next)] if self.next else facts)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Build a report from its fields in JSON, of ``as_dict`` or with the workers."""
        from core.engine.team.protocol import Figures
        from core.verbs.convert.report.dropped import DroppedReason

        lists = ("files", "notes", "dropped")
        reasons = (
            DroppedReason(reason["reason"], reason["n_entries"], tuple(reason["examples"]))
            for reason in content["dropped_reasons"]
        )
        return cls(
            **{
                **content,
                **{name: tuple(content[name]) for name in lists},
                "dropped_reasons": tuple(reasons),
                "workers": tuple(Figures(*figures) for figures in content.get("workers", ())),
            }
        )

    def as_dict(self) -> dict[str, object]:
        """Build the JSON object of the report, without the workers."""
        report = asdict(self)
        del report["workers"]
        return report
