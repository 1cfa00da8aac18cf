"""CK30x, CK31x: check that the tensors form the model that the training arguments describe.

These checks cover checkpoints with Megatron's names: rank files, torch_dist, zarr, and DCP or torch
files of such models. Consequences of a missing rank or of unreadable metadata are not reported
again.

Source: ``core.megatron.reshard.problems``, and the sources cited there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnknownTensorError,
    UnsupportedError,
)
from core.verbs.checks.finding import Code, Finding, Severity, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.megatron.reshard.problems import Understood

ARGUMENTS = get_code("CK301")
NOT_SAVED = get_code("CK302")
NAMES = get_code("CK303")
LAYERS = get_code("CK304")
DIFFERS = get_code("CK305")
TIED = get_code("CK306")
CHUNKS = get_code("CK307")
ENTRY = get_code("CK308")
PLACE = get_code("CK309")
TENSOR = get_code("CK311")
EXPERTS = get_code("CK313")
SHAPE = get_code("CK314")
UNKNOWN = get_code("CK315")
VOCABULARY = get_code("CK316")
WHOLE = get_code("CK317")
ARGS = get_code("CK318")
NOT_HANDLED = get_code("CK319")


_BY_RULE = {
    "ranks.arguments": ARGUMENTS,
    "layout.ranks": NOT_SAVED,
    "layout.names": NAMES,
    "layout.layers": LAYERS,
    "layout.ranks_differ": DIFFERS,
    "layout.places": PLACE,
    "layout.tied": TIED,
    "layout.chunks": CHUNKS,
    "layout.entries": ENTRY,
    "layout.tensor": TENSOR,
    "layout.experts": EXPERTS,
    "layout.stacks": LAYERS,
    "layout.shapes": SHAPE,
    "layout.args": ARGS,
}
_MOST_MISSING = 1000
"""Maximum number of a tower's tensors to report: a damaged configuration may describe any."""
_FOLLOWS = frozenset({NOT_SAVED, LAYERS, TIED, TENSOR, EXPERTS})
"""Codes that a missing rank or an unreadable entry would also cause."""
_CAUSES = frozenset({"ranks.folders", "ranks.files", "dcp.entries", "dcp.no_item", "dcp.items"})


def report_argument_differences(subject: Subject) -> Iterator[Finding]:
    """Report training arguments that differ between ranks (CK301)."""
    for err in subject.salvaged.problems:
        if err.rule == "ranks.arguments":
            yield _layout_finding(ARGUMENTS, err)


def check_model_layout(subject: Subject) -> Iterator[Finding]:
    """Report the problems that ``core.megatron.reshard.problems`` finds in the model."""
    is_incomplete = any(err.rule in _CAUSES for err in subject.salvaged.problems)
    has_full_model = subject.format is not None and subject.format.has_layout
    reported: set[tuple[object, ...]] = set()
    missing: set[str | None] = set()
    for err in chain(subject.model.problems, _find_missing_in_towers(subject)):
        code = _BY_RULE.get(err.rule or "", ENTRY)
        if (is_incomplete and code in _FOLLOWS) or (code is TENSOR and err.key in missing):
            continue
        if code is TENSOR:
            missing.add(err.key)
        # Many ranks report the same problem. In messages about names ("NAME is in RANK …") only the
        # rank that has the tensor differs.
        text = err.message.partition(" is in ")[0] if code is NAMES else err.message
        identity = (code.code, err.key, err.rank, text)
        if identity in reported:
            continue
        reported.add(identity)
        # Formats other than Megatron's own may hold part of a model on purpose.
        is_note = code in _FOLLOWS and not has_full_model
        yield _layout_finding(code, err, severity=Severity.NOTE if is_note else None)


def _find_missing_in_towers(subject: Subject) -> Iterator[CheckpointingException]:
    """Yield an error for each tensor that the towers of Megatron-Bridge's models lack."""
    model = subject.model.understood
    if model is None:
        return
    from core.megatron.extras.common_state import EXTRA_STATE
    from core.megatron.model.args import fields_of
    from core.megatron.model.checks import ADAPTER

    names = {
        name
        for name in model.shapes
        if name.startswith(subject.rules.towers) and not name.endswith(EXTRA_STATE)
    }
    if not names or any(ADAPTER in name for name in names):
        return
    from core.hf.config_json.origin import origin_of
    from core.hf.towers.completeness import find_missing_megatron_tensors

    try:
        origin = origin_of(fields_of(subject.model.args))
        config = None if origin is None else origin.config
        for name in islice(find_missing_megatron_tensors(names, config), _MOST_MISSING):
            problem = "the tensor is not in the checkpoint"
            yield MissingShardError(problem, key=name, rule="layout.tensor")
    except CorruptError as err:
        yield err.breaking("layout.args")


def _layout_finding(
    code: Code, err: CheckpointingException, *, severity: Severity | None = None
) -> Finding:
    """Convert an error to a finding; its class may override the code."""
    if isinstance(err, UnknownTensorError):
        code = UNKNOWN
    elif isinstance(err, UnsupportedError):
        code = NOT_HANDLED
    hint = None if isinstance(err, UnknownTensorError) else err.hint
    return code.finding(
        err.message, file=err.file, key=err.key, rank=err.rank, hint=hint, severity=severity
    )


def check_vocabulary(subject: Subject) -> Iterator[Finding]:
    """Compare the rows of vocabulary tensors with the sizes in the arguments (CK316)."""
    model = subject.model.understood
    if model is None:
        return
    from core.megatron.model.args import fields_of, size_in
    from core.megatron.model.vocabulary import explains

    fields = fields_of(subject.model.args)
    n_padded, n_rows = size_in(fields, "padded_vocab_size"), model.facts.vocab_size
    # Outside rank files, other software may have padded the vocabulary anew.
    has_free_rows = subject.format is None or not subject.format.is_rank_local
    # Report at most one problem for each tensor: too few rows, or not as many as recorded, or odd
    # padding.
    for name, rows in _vocabulary_tensors(subject, model):
        is_plausible = n_rows is None or explains(model.facts, n_rows, rows)
        if n_rows is not None and rows < n_rows:
            yield VOCABULARY.finding(
                "the tensor has fewer rows than the vocabulary",
                key=name,
                expected=f"at least {n_rows} rows (vocab_size)",
                found=f"{rows} rows",
                severity=Severity.ERROR,
            )
        elif n_padded not in (None, rows) and not (has_free_rows and is_plausible):
            yield VOCABULARY.finding(
                "the number of rows does not match the training arguments",
                key=name,
                expected=f"{n_padded} rows (padded_vocab_size)",
                found=f"{rows} rows",
            )
        elif n_padded is None and not is_plausible:
            yield VOCABULARY.finding(
                f"no tensor-parallel size pads {n_rows} rows to {rows}",
                key=name,
                expected=f"{n_rows} rows (vocab_size), padded to a multiple of "
                f"{model.facts.divisible_by}",
                found=f"{rows} rows",
            )


def _vocabulary_tensors(subject: Subject, model: Understood) -> Iterator[tuple[str, int]]:
    """Yield (name, number of rows) of the tensors with one row per token."""
    for name, shape in model.shapes.items():
        tensor = model.held.get(name)
        rule = subject.rules.rule_of(name) if tensor is None else tensor.rule
        if shape and rule.for_shape(shape).kind == "vocab":
            yield name, shape[0]


def check_equal_shards(subject: Subject) -> Iterator[Finding]:
    """Report tensors that are the same on several ranks although their rule cuts them (CK317).

    At the lowest level, one tensor of each kind is compared.
    """
    from core.megatron.reshard.equal_shards import suggest_rules

    model = subject.model.understood
    for item in () if model is None else model.equal:
        yield WHOLE.finding(str(item), key=item.name, hint=suggest_rules([item]))


CHECKS = (
    Check(report_argument_differences, formats=("megatron",)),
    Check(check_model_layout),
    Check(check_vocabulary),
    Check(check_equal_shards, formats=("megatron",)),
)
