"""CK30x to CK31x: do the rank files, or the global tensors, make the model that the training arguments describe?

Looked at are checkpoints with Megatron's names: rank files, torch_dist, zarr, and DCP or torch files of such models.
What follows from a rank that is missing, or from metadata that cannot be read, is not said again.

Source: ``core.megatron.reshard.problems``, and what that cites.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.subject import Subject
from core.errors import CheckpointingException, UnknownTensorError, UnsupportedError
from core.megatron.model.args import fields_of, size_in
from core.megatron.model.vocabulary import explains
from core.megatron.reshard.problems import Understood

_MIXED = "the rank directories are not of one checkpoint, or one is damaged: use an older checkpoint"
_LOST = "use an older checkpoint: this one is incomplete"
ARGUMENTS = Code("CK301", Severity.ERROR, "ranks disagree about the training arguments", _MIXED)
NOT_SAVED = Code("CK302", Severity.ERROR, "shards that no rank has saved", "save again with a newer Megatron-LM")
NAMES = Code("CK303", Severity.ERROR, "ranks of a stage hold different tensors", _MIXED)
LAYERS = Code("CK304", Severity.ERROR, "layers are missing, or there are too many", _LOST)
DIFFERS = Code("CK305", Severity.ERROR, "ranks disagree about a tensor's dtype or shape", _MIXED)
TIED = Code("CK306", Severity.ERROR, "a tied copy is missing or of another shape", _LOST)
CHUNKS = Code("CK307", Severity.ERROR, "a rank's model is missing or malformed", _LOST)
ENTRY = Code("CK308", Severity.ERROR, "an entry of the model makes no sense", _LOST)
TENSOR = Code("CK311", Severity.ERROR, "a tensor of the model is missing", _LOST)
EXPERTS = Code("CK313", Severity.ERROR, "experts are missing, or there are too many", _LOST)
SHAPE = Code(
    "CK314", Severity.ERROR, "a shape contradicts the arguments", "use the arguments of this checkpoint, not of another"
)
UNKNOWN = Code(
    "CK315", Severity.NOTE, "a tensor whose layout is not known", "name its layout with --rules FILE, to reshard it"
)
VOCABULARY = Code(
    "CK316", Severity.WARNING, "padding rows of the vocabulary are odd", "pass --vocab-size when you convert"
)
ARGS = Code("CK318", Severity.ERROR, "the training arguments make no sense", "use an older checkpoint")
NOT_HANDLED = Code("CK319", Severity.NOTE, "a layout that is not handled", "convert it with the layout that it has")

CODES = (
    *(ARGUMENTS, NOT_SAVED, NAMES, LAYERS, DIFFERS, TIED, CHUNKS, ENTRY),
    *(TENSOR, EXPERTS, SHAPE, UNKNOWN, VOCABULARY, ARGS, NOT_HANDLED),
)

_BY_RULE = {
    "ranks.arguments": ARGUMENTS,
    "layout.ranks": NOT_SAVED,
    "layout.names": NAMES,
    "layout.layers": LAYERS,
    "layout.ranks_differ": DIFFERS,
    "layout.tied": TIED,
    "layout.chunks": CHUNKS,
    "layout.entries": ENTRY,
    "layout.tensor": TENSOR,
    "layout.experts": EXPERTS,
    "layout.stacks": LAYERS,
    "layout.shapes": SHAPE,
    "layout.args": ARGS,
}
_FOLLOWS = frozenset({NOT_SAVED, LAYERS, TIED, TENSOR, EXPERTS})
"""What a missing rank, or an entry that cannot be read, looks like as well."""
_CAUSES = frozenset({"ranks.folders", "ranks.files", "dcp.entries", "dcp.no_item", "dcp.items"})


def agreeing(subject: Subject) -> Iterator[Finding]:
    """Arguments that differ among ranks."""
    for err in subject.salvaged.problems:
        if err.rule == "ranks.arguments":
            yield _finding(ARGUMENTS, err)


def fitting(subject: Subject) -> Iterator[Finding]:
    """Everything that ``core.megatron.reshard.problems`` finds."""
    is_incomplete = any(err.rule in _CAUSES for err in subject.salvaged.problems)
    is_whole = subject.format is not None and (subject.format.is_mcore or subject.format.partition == "ranks")
    seen: set[tuple[object, ...]] = set()
    for err in subject.model.problems:
        code = _BY_RULE.get(err.rule or "", ENTRY)
        if is_incomplete and code in _FOLLOWS:
            continue
        where = (code.code, err.key, err.rank, err.message if code is not NAMES else _listed_in(err))
        if where not in seen:
            seen.add(where)
            yield _finding(code, err, severity=None if is_whole or code not in _FOLLOWS else Severity.NOTE)


def _listed_in(err: CheckpointingException) -> str:
    """The names that a rank lacks, whichever other rank has them."""
    return err.message.partition(" is in ")[0]


def _finding(code: Code, err: CheckpointingException, *, severity: Severity | None = None) -> Finding:
    """An error as a finding; other formats than Megatron's own may hold a part of a model, which is worth a note."""
    if isinstance(err, UnknownTensorError):
        code = UNKNOWN
    elif isinstance(err, UnsupportedError):
        code = NOT_HANDLED
    hint = None if isinstance(err, UnknownTensorError) else err.hint
    return code.finding(err.message, file=err.file, key=err.key, rank=err.rank, hint=hint, severity=severity)


def padded(subject: Subject) -> Iterator[Finding]:
    """Compares the rows of the vocabulary with what the arguments say of it."""
    model = subject.model.understood
    if model is None:
        return
    fields = fields_of(subject.model.args)
    stated, n_rows = size_in(fields, "padded_vocab_size"), model.facts.vocab_size
    has_free_rows = subject.format is None or subject.format.partition != "ranks"
    for name, rows in _vocabulary(subject, model):
        is_explained = n_rows is None or explains(model.facts, n_rows, rows)
        if n_rows is not None and rows < n_rows:
            yield VOCABULARY.finding(
                "the tensor has fewer rows than the vocabulary",
                key=name,
                expected=f"at least {n_rows} rows (vocab_size)",
                found=f"{rows} rows",
                severity=Severity.ERROR,
            )
        elif stated not in (None, rows) and not (has_free_rows and is_explained):
            yield VOCABULARY.finding(
                "the tensor has not the rows that the arguments say",
                key=name,
                expected=f"{stated} rows (padded_vocab_size)",
                found=f"{rows} rows",
            )
        elif stated is None and not is_explained:
            yield VOCABULARY.finding(
                f"no tensor parallel size pads {n_rows} rows to as many",
                key=name,
                expected=f"a multiple of {model.facts.divisible_by}, next to {n_rows} (vocab_size)",
                found=f"{rows} rows",
            )


def _vocabulary(subject: Subject, model: Understood) -> Iterator[tuple[str, int]]:
    """(name, rows) of the tensors with a row for each word."""
    for name, shape in model.shapes.items():
        held = model.held.get(name)
        rule = subject.rules.rule_of(name) if held is None else held.rule
        if rule.kind == "vocab" and shape:
            yield name, shape[0]


CHECKS = (Check(agreeing, formats=("megatron",)), Check(fitting), Check(padded))
