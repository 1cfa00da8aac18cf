"""CK530–CK540: compare the tensors of a Hugging Face directory with its ``config.json``.

Conversions make the same comparison (``core.hf.proof.comparison``). A directory is checked if its
weights are stored in files that transformers loads; a single file only if it holds all tensors of a
model and is next to its ``config.json``. Adapters, and weights that other software wrote under
names of its own (MLX), are not checked.

Source: transformers 5.23 ``modeling_utils.py`` (names of the files that are loaded).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from shlex import quote
from typing import TYPE_CHECKING

from core.engine.catalog.attributes import ROOT
from core.engine.catalog.stored import StoredArray
from core.errors import CheckpointingException
from core.formats.huggingface.files import CONFIG, read_config_json
from core.hf.proof.expected import declares_tie, find_model_class, unchecked_text
from core.hf.proof.problem import Kind
from core.values import n_text
from core.verbs.checks.finding import Code, Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.verbs.checks.watch import Watch

MISSING = get_code("CK530")
UNEXPECTED = get_code("CK531")
SHAPE = get_code("CK532")
N_LAYERS = get_code("CK533")
N_EXPERTS = get_code("CK534")
TIES = get_code("CK535")
QUANTIZATION = get_code("CK536")
DTYPE = get_code("CK537")
SENSE = get_code("CK538")
UNTIED = get_code("CK539")
SISTERS = get_code("CK540")

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
_LOADED = re.compile(
    r"(shard-\d+-)?(pytorch_)?model(\.\w+)?(-\d+-of-\d+)?(\.\w+)?\.(safetensors|bin)"
)
"""Names of weight files that transformers loads or torch's Hugging Face storage writes."""
_ALONE = ("model.safetensors", "pytorch_model.bin")
_MOST_NAMED = 100
_FORMATS = ("safetensors", "torch_bin")


def check_model(subject: Subject) -> Iterator[Finding]:
    """Compare the tensors with ``config.json`` (CK530–CK538, CK540)."""
    from core.hf.proof.comparison import find_differences
    from core.hf.proof.proof import fitting_prefix

    config, catalog = _read_comparable_config(subject), subject.catalog
    if catalog is None or config is None:
        return
    problems = find_differences(catalog.tensors, config, files=subject.store.files())
    # If all names would fit without a common prefix, the conversion forgot to remove it.
    prefix = fitting_prefix(catalog.tensors, config, problems)
    hint = None if prefix is None else f"convert it again with --strip-prefix {quote(prefix)}"
    # Name at most 100 problems of a kind, and count the rest.
    for kind, group in groupby(sorted(problems, key=attrgetter("kind")), key=attrgetter("kind")):
        same_kind = list(group)
        for problem in same_kind[:_MOST_NAMED]:
            yield _CODE_OF[kind].finding(
                problem.message,
                file=CONFIG,
                key=problem.key,
                expected=problem.expected,
                found=problem.found,
                hint=hint,
            )
        if len(same_kind) > _MOST_NAMED:
            yield _CODE_OF[kind].finding(
                f"{n_text(len(same_kind) - _MOST_NAMED, 'more finding')} of this kind",
                file=CONFIG,
                hint=hint,
            )


def unchecked(subject: Subject) -> tuple[str, ...]:
    """Return a note if the tensors are not compared because the model family is unknown."""
    try:
        config = _read_comparable_config(subject)
    except CheckpointingException:
        return ()  # reported by ``check_model``
    text = None if config is None else unchecked_text(config)
    return () if text is None else (text,)


def watch(subject: Subject) -> Watch:
    """Request the digests of tied tensors that are both stored."""
    from core.verbs.checks.watch import Watch

    return Watch(digests_of=frozenset(array.name for array in _tied_arrays(subject)))


def check_tied_tensors(subject: Subject) -> Iterator[Finding]:
    """Check that tied tensors hold the same values if both are stored (CK539)."""
    arrays = _tied_arrays(subject)
    # An array that could not be read has no digest; other checks report it.
    sums = subject.byte_scan.scanned.arrays
    digests = {sums[array.name].digest for array in arrays if array.name in sums}
    if len(digests) > 1 and None not in digests:
        embedding, head = arrays
        yield UNTIED.finding(
            f"{CONFIG} ties the tensor to {embedding.name}, but the values differ",
            file=head.extent.file,
            key=head.name,
            expected=f"the values of {embedding.name}",
            found="different values",
        )


def _tied_arrays(subject: Subject) -> tuple[StoredArray, ...]:
    """Return the arrays of embedding and output layer if they are tied, both stored and comparable.

    Returns:
        Both arrays, or ().
    """
    config = _read_comparable_config(subject)
    family = None if config is None else find_model_class(config)
    if (
        subject.catalog is None
        or config is None
        or family is None
        or not declares_tie(config, family.family)
    ):
        return ()
    # A tensor in several fragments has no digest of its own.
    (embedding,) = family.family.first[0].hf
    arrays = []
    for key in (embedding, family.family.head):
        fragments = [*subject.catalog.fragments(key)] if key in subject.catalog.tensors else []
        array = fragments[0].array if len(fragments) == 1 else None
        if array is None:
            return ()
        arrays.append(array)
    # Arrays of different types or shapes cannot be compared by digest.
    is_comparable = len({(array.dtype, array.shape) for array in arrays}) == 1
    return tuple(arrays) if is_comparable else ()


def _read_comparable_config(subject: Subject) -> Mapping[str, object] | None:
    """Read the ``config.json`` to compare the tensors with.

    Returns:
        None if there is none, or if the tensors are not those of a complete model.
    """
    catalog, store, format = subject.catalog, subject.store, subject.format
    is_described = format is not None and format.has_hf_config
    if catalog is None or not is_described or store.entry not in (None, *_ALONE):
        return None
    # Files of other frameworks (format "mlx") and of adapters have names of their own.
    is_torch = catalog.attributes.get(ROOT, {}).get("format", "pt") == "pt"
    if not is_torch or not all(_LOADED.fullmatch(name) for name in _weight_files(subject)):
        return None
    try:
        return read_config_json(store)
    except CheckpointingException:
        return None  # reported by the checks of small files


def _weight_files(subject: Subject) -> set[str]:
    """Return the names of the files that hold the tensors."""
    assert subject.catalog is not None
    arrays = (
        fragment.array
        for key in subject.catalog.tensors
        for fragment in subject.catalog.fragments(key)
    )
    return {array.extent.file for array in arrays if array is not None}


CHECKS = (
    Check(check_model, formats=_FORMATS),
    Check(check_tied_tensors, Level.DEEP, formats=_FORMATS),
)
