"""CK530–CK538: the tensors of a Hugging Face directory against its ``config.json``, as transformers loads them.

The comparison is that of conversions (``core.hf.comparison``). A directory is looked at if its weights lie in files
that transformers loads; of a file alone, only one with all tensors of a model, beside its ``config.json``. Adapters and
weights that other software wrote under names of its own (MLX) are not judged.

Source: transformers 5.23 ``modeling_utils.py`` (which files are loaded, by which names).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from core.checks import Check, Code
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.finding import Finding, Severity
from core.formats.hf_files import CONFIG, config_of
from core.hf.comparison import compared
from core.hf.problem import Kind, Problem
from core.hf.proof import fitting_prefix

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

CODES = (MISSING, UNEXPECTED, SHAPE, N_LAYERS, N_EXPERTS, TIES, QUANTIZATION, DTYPE, SENSE)
_CODE_OF: Mapping[Kind, Code] = {
    "missing": MISSING,
    "unexpected": UNEXPECTED,
    "shape": SHAPE,
    "layers": N_LAYERS,
    "experts": N_EXPERTS,
    "ties": TIES,
    "quantization": QUANTIZATION,
    "dtype": DTYPE,
    "config": SENSE,
}
_LOADED = re.compile(r"(shard-\d+-)?(pytorch_)?model(\.\w+)?(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)")
"""Names of files that transformers loads, and of those that torch's Hugging Face storage writes."""
_ALONE = ("model.safetensors", "pytorch_model.bin")
_MOST_NAMED = 100


def model(subject: Subject) -> Iterator[Finding]:
    """CK530–CK538."""
    catalog, store = subject.catalog, subject.store
    if catalog is None or store.entry not in (None, *_ALONE):
        return
    try:
        config = config_of(store)
    except CheckpointingException:
        return  # found where small files are looked at
    written_by = catalog.attrs.get("metadata")
    is_torch = not isinstance(written_by, Mapping) or written_by.get("format", "pt") == "pt"
    if config is None or not is_torch or not all(_LOADED.fullmatch(name) for name in _weight_files(subject)):
        return
    problems = compared(catalog.tensors, config, files=store.files())
    prefix = fitting_prefix(catalog.tensors, config, problems)
    hint = None if prefix is None else f"convert it again with --strip-prefix {prefix}"
    for kind, group in groupby(sorted(problems, key=_kind_of), key=_kind_of):
        same = list(group)
        for problem in same[:_MOST_NAMED]:
            yield _finding(problem, hint=hint)
        if len(same) > _MOST_NAMED:
            yield _CODE_OF[kind].finding(f"and {len(same) - _MOST_NAMED:,} more of this kind", file=CONFIG, hint=hint)


def _weight_files(subject: Subject) -> set[str]:
    """Return the names of the files in which the tensors lie."""
    assert subject.catalog is not None
    arrays = (fragment.array for key in subject.catalog.tensors for fragment in subject.catalog.fragments(key))
    return {array.extent.file for array in arrays if array is not None and array.extent is not None}


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


CHECKS = (Check(model, formats=("safetensors", "torch_bin")),)
