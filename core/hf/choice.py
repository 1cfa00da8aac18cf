"""Choose the family of a model with Megatron's names.

Training arguments do not name a family, and several families may have the same layers: a model with
a Llama's arguments may have been a Mistral without windows, or a Phi-3. The first of these decides:

1. the family that the user names, or its table;
2. the ``model_type`` of the ``config.json`` that the model was converted from
   (``core.hf.config_json.origin``);
3. the only family that is recognised by its arguments; of several, the one with the fewest settings
   of its own, as every other one would be a special case of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.errors import UnsupportedError
from core.hf.arguments import misfitting_arguments
from core.hf.family import Family, families, family_called
from core.hf.traits import FEATURES
from core.values import dataclass

_N_NEAREST = 3


@dataclass(frozen=True, slots=True)
class _FamilyFit:
    """A family and, as texts, the arguments of a model that it cannot have (``misfits``)."""

    family: Family
    misfits: tuple[str, ...]


def choose_family(
    fields: Mapping[str, object],
    features: frozenset[str],
    *,
    requested: str | Family | None,
    origin: str | None,
) -> Family:
    """Return the family of a model.

    Args:
        fields: training arguments by name.
        features: features of the model (``core.hf.traits``).
        requested: the family that the user wants, by its model type or as a table; or None.
        origin: model type that the model had before it was converted to Megatron; or None.

    Raises:
        UnsupportedError: no family, or not the requested one, has such models; the message names
            the arguments. Or several families have.
        UsageError: the requested family is unknown.
    """
    if requested is not None:
        family = family_called(requested) if isinstance(requested, str) else requested
        fit = _fit_of(family, fields, features)
        if fit.misfits:
            raise UnsupportedError(
                f"the model is not of family {family.model_type}: {', '.join(fit.misfits)}",
                hint=f"supported families: {', '.join(families())}",
            )
        return family

    fits = sorted(
        (_fit_of(family, fields, features) for family in families().values()),
        key=lambda fit: (
            len(fit.misfits),
            origin not in (fit.family.model_type, *fit.family.aliases),
            not fit.family.is_detected,
            len(fit.family.settings),
        ),
    )
    type_names = {
        name for family in families().values() for name in (family.model_type, *family.aliases)
    }
    if origin is not None and origin not in type_names:
        raise UnsupportedError(
            f"the model was converted from one of type {origin[:80]!r}, which has no table",
            hint="give its table with --family FILE.toml, or a family with --names hf:MODEL_TYPE",
        )
    candidates = [fit.family for fit in fits if not fit.misfits]
    for family in candidates:
        if origin is not None and origin in (family.model_type, *family.aliases):
            return family
    if not candidates:
        raise _no_family(fits)
    # Of the families that are recognised by their arguments, take the plainest.
    candidates = [family for family in candidates if family.is_detected] or candidates
    fewest = min(len(family.settings) for family in candidates)
    plainest = [family for family in candidates if len(family.settings) == fewest]
    if len(plainest) > 1:
        names = [family.model_type for family in plainest]
        raise UnsupportedError(
            f"the arguments fit models of {len(names)} families: {', '.join(names)}",
            hint=f"name the family, such as --names hf:{names[0]}",
        )
    return plainest[0]


def _fit_of(family: Family, fields: Mapping[str, object], features: frozenset[str]) -> _FamilyFit:
    """Compare a model with a family."""

    def texts() -> Iterator[str]:
        for name in family.misfits(features):
            arg = FEATURES[name]
            yield f"argument {arg} is {fields.get(arg)!r}"
        for arg, value in misfitting_arguments(fields, family).items():
            actual = fields.get(arg)
            yield f"argument {arg} is {actual!r}, not {value!r}"

    return _FamilyFit(family, tuple(texts()))


def _no_family(fits: list[_FamilyFit]) -> UnsupportedError:
    """Build the error for a model of no family; ``fits`` has the nearest family first."""
    nearest = fits[0]
    alike = [fit.family.model_type for fit in fits if fit.misfits == nearest.misfits]
    if len(alike) > 1:
        return UnsupportedError(
            f"no family of Hugging Face models fits: {', '.join(nearest.misfits)}",
            hint=f"nearest families: {', '.join(alike[:_N_NEAREST])}; describe the model's family "
            "in a file and give it with --family FILE.toml",
        )
    others = [
        f"{fit.family.model_type} ({len(fit.misfits)} argument{'s' * (len(fit.misfits) > 1)})"
        for fit in fits[1:_N_NEAREST]
    ]
    return UnsupportedError(
        f"the model is not of family {nearest.family.model_type}: {', '.join(nearest.misfits)}",
        hint=f"other families differ, too: {', '.join(others)}; describe its family in a file and "
        "give it with --family FILE.toml",
    )
