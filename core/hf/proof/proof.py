"""Proves that a catalog holds the model that a ``config.json`` describes, before anything of it is written.

What is compared is ``core.hf.proof.comparison``'s, which ``ckpt validate`` uses as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from core.catalog.catalog import Catalog, TensorMeta
from core.changes.rename import is_optimizer_key
from core.errors import CheckpointingException, CorruptError, MissingShardError, UnknownTensorError, UnsupportedError
from core.hf.config import CONFIG
from core.hf.proof.comparison import compared
from core.hf.proof.expected import BODY, described, unchecked_text
from core.hf.proof.problem import Kind, Problem, more_text

_MOST_PREFIXES = 4
_WRAPPERS = ("state_dict.", "model_state_dict.", "module.", "_orig_mod.", "app.", "model.model.")
"""What training frameworks put in front of all names; no model of transformers stores such names."""
_OTHER_CONFIG = f"is this the {CONFIG} of these weights?"
_HINTS: Mapping[Kind, str] = {
    **dict.fromkeys(("missing", "shape", "layers", "experts", "config"), _OTHER_CONFIG),
    "sisters": "copy the checkpoint again, or use an older one",
    "unexpected": "leave it out with --exclude if the model does not need it",
    "dtype": "weights are floating-point numbers: leave other tensors out with --exclude",
    "ties": "set tie_word_embeddings to true in config.json if the output layer shares the embedding's weights",
    "quantization": "multiply the scales in with --dequantize bf16, or give the config.json of the quantized model",
}


def check_model(
    catalog: Catalog, config: Mapping[str, object], *, files: Collection[str], is_strict: bool
) -> tuple[str, ...]:
    """Return notes, once the tensors of a catalog are those of the model that a configuration describes.

    Args:
        catalog: flat keys.
        config: the parsed ``config.json``.
        files: names of the files beside it.
        is_strict: refuse tensors for which the model has no place; otherwise they are noted.

    Raises:
        MissingShardError: a tensor is absent.
        UnknownTensorError: the model has no place for a tensor, or all names have a prefix too much.
        CorruptError: counts, shapes, element types, ties or the quantization contradict the configuration.
        UnsupportedError: there is optimizer state.
    """
    model_type = str(config.get("model_type"))[:80]
    states = [key for key in catalog.tensors if is_optimizer_key(key)]
    weights = {key: meta for key, meta in catalog.tensors.items() if not is_optimizer_key(key)}
    problems = compared(weights, config, files=files)
    prefix = fitting_prefix(weights, config, problems)
    if prefix is not None:
        rest = compared(_without(weights, prefix), config, files=files)
        options = f"--strip-prefix {prefix}" + (" --no-optim" if states else "")
        raise UnknownTensorError(
            f"the names begin with {prefix!r}, unlike those of {model_type} models"
            + (f"; without it, {rest[0].message}{more_text(rest)}" if rest else ""),
            key=next(key for key in weights if key.startswith(prefix)),
            hint=f"take it off with {options}" + (f", and give the {CONFIG} of this model" if rest else ""),
        )
    severe = tuple(problem for problem in problems if is_strict or problem.kind != "unexpected")
    if severe:
        raise _error_of(severe, model_type)
    if states and is_strict:
        raise UnsupportedError(
            f"Hugging Face models have no place for optimizer state ({len(states):,} tensors)",
            key=states[0],
            hint="leave it out with --no-optim",
        )
    notes = []
    stated = next((config[name] for name in ("dtype", "torch_dtype") if isinstance(config.get(name), str)), None)
    dtypes = {meta.dtype for meta in weights.values()}
    if is_strict and stated is not None and len(dtypes) == 1 and str(stated).removeprefix("torch.") not in dtypes:
        notes.append(
            f"{CONFIG} says {stated}, the weights are {min(dtypes)}: transformers casts them as it loads them, unless "
            "told otherwise"
        )
    if problems:
        notes.append(f"{model_type} models have no place for {_keys_text(problems)}; transformers ignores it")
    unchecked = unchecked_text(config)
    if described(config) is None:
        wrapper = next((text for text in _WRAPPERS if all(key.startswith(text) for key in weights)), None)
        if wrapper is not None and weights:
            raise UnknownTensorError(
                f"all names begin with {wrapper!r}, as in a training framework's state dict: transformers knows no "
                "such name, and would start from random weights",
                key=next(iter(weights)),
                hint=f"take it off with --strip-prefix {wrapper}",
            )
    if unchecked is not None:
        notes.append(f"not checked: {unchecked}")
    return tuple(notes)


def fitting_prefix(
    tensors: Mapping[str, TensorMeta], config: Mapping[str, object], problems: Collection[Problem]
) -> str | None:
    """Return what must be taken off the names so that they become those of the model, or None.

    Counts and shapes may differ even then.

    Args:
        tensors: the tensors of a checkpoint, by key.
        config: the parsed ``config.json``.
        problems: what ``compared`` says of them.
    """
    model = described(config)
    if model is None or _names_fit(problems):
        return None
    (embedding,) = model.family.first[0].hf
    names = (embedding, embedding.removeprefix(BODY))
    prefixes = dict.fromkeys(key.removesuffix(name) for name in names for key in tensors if key.endswith("." + name))
    for prefix in list(prefixes)[:_MOST_PREFIXES]:
        stripped = _without(tensors, prefix)
        if len(stripped) == len(tensors) and _names_fit(compared(stripped, config)):
            return prefix
    return None


def _names_fit(problems: Collection[Problem]) -> bool:
    return all(problem.kind not in ("missing", "unexpected") for problem in problems)


def _without(tensors: Mapping[str, TensorMeta], prefix: str) -> dict[str, TensorMeta]:
    """Return tensors without a prefix of their names."""
    return {key.removeprefix(prefix): meta for key, meta in tensors.items()}


def _error_of(problems: tuple[Problem, ...], model_type: str) -> CheckpointingException:
    """Return the error that the first of several problems is."""
    first = problems[0]
    is_count = first.kind in ("layers", "experts")  # rather the config.json of another model
    is_absent = first.is_lack and not is_count
    kind = MissingShardError if is_absent else UnknownTensorError if first.kind == "unexpected" else CorruptError
    return kind(
        f"not the {model_type} model that {CONFIG} describes: {first.message}{more_text(problems)}",
        key=first.key,
        hint=_HINTS[first.kind],
    )


def _keys_text(problems: tuple[Problem, ...]) -> str:
    """Return the first keys of problems, and how many others there are."""
    keys = [str(problem.key) for problem in problems]
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3:,} others" if keys[3:] else "")
