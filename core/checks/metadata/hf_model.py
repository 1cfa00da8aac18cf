"""CK530–CK540: the tensors of a Hugging Face directory against its ``config.json``, as transformers loads them.

The comparison is that of conversions (``core.hf.proof.comparison``). A directory is looked at if its weights lie in
files that transformers loads; of a file alone, only one with all tensors of a model, beside its ``config.json``.
Adapters and weights that other software wrote under names of its own (MLX) are not judged.

Source: transformers 5.23 ``modeling_utils.py`` (which files are loaded, by which names).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from core.catalog.facets import WeightFileFacts
from core.catalog.stored import StoredArray
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.checks.watch import Watch
from core.errors import CheckpointingException
from core.formats.huggingface.files import CONFIG, config_of
from core.hf.proof.comparison import compared
from core.hf.proof.expected import HEAD, described, is_tied, unchecked_text
from core.hf.proof.problem import Kind, Problem
from core.hf.proof.proof import fitting_prefix

_OTHER_CONFIG = "find the config.json of these weights, or an older copy of both"
MISSING = Code("CK530", Severity.ERROR, "config.json asks for a tensor that is not there", _OTHER_CONFIG)
UNEXPECTED = Code(
    "CK531", Severity.WARNING, "config.json has no place for a tensor", "transformers ignores it: is it needed?"
)
SHAPE = Code("CK532", Severity.ERROR, "a shape contradicts config.json", _OTHER_CONFIG)
N_LAYERS = Code("CK533", Severity.ERROR, "config.json states another number of layers", _OTHER_CONFIG)
N_EXPERTS = Code("CK534", Severity.ERROR, "config.json states another number of experts", _OTHER_CONFIG)
TIES = Code(
    "CK535",
    Severity.ERROR,
    "config.json contradicts tied embeddings",
    "set tie_word_embeddings to what the model was trained with",
)
QUANTIZATION = Code(
    "CK536",
    Severity.ERROR,
    "quantized weights contradict config.json",
    "find the config.json of these weights: transformers loads others, or other numbers",
)
DTYPE = Code("CK537", Severity.ERROR, "an element type that weights cannot have", "use another copy of the weights")
SENSE = Code("CK538", Severity.ERROR, "config.json lacks a size, or states one that makes no sense", _OTHER_CONFIG)
UNTIED = Code(
    "CK539",
    Severity.WARNING,
    "the output layer differs from the embedding it is tied to",
    "set tie_word_embeddings to false if it was trained so: transformers 4 drops this tensor, 5 keeps it",
    Level.DEEP,
)
SISTERS = Code(
    "CK540",
    Severity.ERROR,
    "a layer or an expert differs from the others",
    "copy the checkpoint again, or use an older one",
)

CODES = (MISSING, UNEXPECTED, SHAPE, N_LAYERS, N_EXPERTS, TIES, QUANTIZATION, DTYPE, SENSE, UNTIED, SISTERS)
_CODE_OF: Mapping[Kind, Code] = {
    "missing": MISSING,
    "unexpected": UNEXPECTED,
    "shape": SHAPE,
    "layers": N_LAYERS,
    "experts": N_EXPERTS,
    "sisters": SISTERS,
    "ties": TIES,
    "quantization": QUANTIZATION,
    "dtype": DTYPE,
    "config": SENSE,
}
_LOADED = re.compile(r"(shard-\d+-)?(pytorch_)?model(\.\w+)?(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)")
"""Names of files that transformers loads, and of those that torch's Hugging Face storage writes."""
_ALONE = ("model.safetensors", "pytorch_model.bin")
_MOST_NAMED = 100
_FORMATS = ("safetensors", "torch_bin")


def model(subject: Subject) -> Iterator[Finding]:
    """CK530–CK538, CK540."""
    config = _configuration(subject)
    if subject.catalog is None or config is None:
        return
    catalog = subject.catalog
    problems = compared(catalog.tensors, config, files=subject.store.files())
    prefix = fitting_prefix(catalog.tensors, config, problems)
    hint = None if prefix is None else f"convert it again with --strip-prefix {prefix}"
    for kind, group in groupby(sorted(problems, key=_kind_of), key=_kind_of):
        same = list(group)
        for problem in same[:_MOST_NAMED]:
            yield _finding(problem, hint=hint)
        if len(same) > _MOST_NAMED:
            yield _CODE_OF[kind].finding(f"and {len(same) - _MOST_NAMED:,} more of this kind", file=CONFIG, hint=hint)


def unchecked(subject: Subject) -> tuple[str, ...]:
    """Return what is not compared with a configuration because the family of the model is not known."""
    try:
        config = _configuration(subject)
    except CheckpointingException:
        return ()  # found by the check
    text = None if config is None else unchecked_text(config)
    return () if text is None else (text,)


def watch(subject: Subject) -> Watch:
    """Ask for the digests of tied tensors that are both stored."""
    return Watch(digests_of=frozenset(array.name for array in _tied(subject)))


def tied_tensors(subject: Subject) -> Iterator[Finding]:
    """CK539."""
    arrays = _tied(subject)
    sums = subject.deep.scanned.arrays
    digests = {sums[array.name].digest for array in arrays if array.name in sums}
    if len(digests) > 1 and None not in digests:
        embedding, head = arrays
        yield UNTIED.finding(
            f"{CONFIG} ties it to {embedding.name}, but the numbers are others",
            file=head.extent.file,
            key=head.name,
            expected=f"the same as {embedding.name}",
            found="other numbers",
        )


def _tied(subject: Subject) -> tuple[StoredArray, ...]:
    """Return the arrays of the embedding and of the output layer if they are tied and both stored, else ()."""
    config = _configuration(subject)
    family = None if config is None else described(config)
    if subject.catalog is None or config is None or family is None or not is_tied(config):
        return ()
    (embedding,) = family.family.first[0].hf
    keys = [key for key in (embedding, HEAD) if key in subject.catalog.tensors]
    fragments = [subject.catalog.fragments(key) for key in keys]
    arrays = tuple(pieces[0].array for pieces in fragments if len(pieces) == 1 and pieces[0].array is not None)
    return arrays if len(arrays) == 2 and len({(array.dtype, array.shape) for array in arrays}) == 1 else ()


def _configuration(subject: Subject) -> Mapping[str, object] | None:
    """Return the configuration by which the tensors are judged; None if they are not."""
    catalog, store = subject.catalog, subject.store
    is_read = catalog is not None and subject.format is not None and subject.format.name in _FORMATS
    if catalog is None or not is_read or store.entry not in (None, *_ALONE):
        return None
    facts = catalog.facet(WeightFileFacts)
    is_torch = facts is None or facts.metadata.get("format", "pt") == "pt"
    if not is_torch or not all(_LOADED.fullmatch(name) for name in _weight_files(subject)):
        return None
    try:
        return config_of(store)
    except CheckpointingException:
        return None  # found where small files are looked at


def _weight_files(subject: Subject) -> set[str]:
    """Return the names of the files in which the tensors lie."""
    assert subject.catalog is not None
    arrays = (fragment.array for key in subject.catalog.tensors for fragment in subject.catalog.fragments(key))
    return {array.extent.file for array in arrays if array is not None}


def _kind_of(problem: Problem) -> Kind:
    return problem.kind


def _finding(problem: Problem, *, hint: str | None) -> Finding:
    return _CODE_OF[problem.kind].finding(
        problem.message,
        file=CONFIG,
        key=problem.key,
        expected=problem.expected,
        found=problem.found,
        hint=hint,
    )


CHECKS = (Check(model, formats=_FORMATS), Check(tied_tensors, Level.DEEP, formats=_FORMATS))
