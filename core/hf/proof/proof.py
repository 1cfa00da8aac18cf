"""Prove that a catalog holds the model that a ``config.json`` describes, before writing it.

The comparison itself is in ``core.hf.proof.comparison``; ``ckpt validate`` uses it as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from shlex import quote

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnknownTensorError,
    UnsupportedError,
)
from core.hf.proof.comparison import find_differences
from core.hf.proof.expected import find_model_class, unchecked_text
from core.hf.proof.problem import Kind, Problem, more_text
from core.hf.values import CONFIG, UNUSED_WEIGHT_HINT

_MOST_PREFIXES = 4
_WRAPPERS = ("state_dict.", "model_state_dict.", "module.", "_orig_mod.", "app.", "model.model.")
"""Prefixes that training frameworks add to all names; no transformers model stores such names."""
_OTHER_CONFIG = f"check that this is the right {CONFIG} for these weights"
_HINTS: Mapping[Kind, str] = {
    **dict.fromkeys(("missing", "shape", "layers", "experts", "config"), _OTHER_CONFIG),
    "sisters": "replace this layer's weights with the weights from another copy of the model",
    "unexpected": UNUSED_WEIGHT_HINT,
    "dtype": "weights must be floating-point numbers; drop other tensors with --exclude",
    "ties": "set tie_word_embeddings in config.json to true if the output layer shares the "
    "embedding's weights, to false if it has its own",
    "quantization": "apply the scales with --dequantize bf16, or pass the config.json of the "
    "quantized model",
}


def prove_model(
    catalog: Catalog,
    config: Mapping[str, object],
    *,
    files: Collection[str],
    is_strict: bool,
    takes_optimizer: bool = False,
) -> tuple[str, ...]:
    """Raise unless the tensors of a catalog form the model that a configuration describes.

    Args:
        catalog: flat keys.
        config: parsed ``config.json``.
        files: names of the files in the same directory.
        is_strict: refuse tensors that the model does not have; otherwise only note them.
        takes_optimizer: optimizer states are not refused, because the destination stores them.

    Returns:
        Notes for the user.

    Raises:
        MissingShardError: a tensor is missing.
        UnknownTensorError: the model has no such tensor, or all names have a surplus prefix.
        CorruptError: counts, shapes, element types, ties or the quantization contradict the
            configuration.
        UnsupportedError: the catalog contains optimizer state, ``is_strict`` and not
            ``takes_optimizer``.
    """
    model_type = str(config.get("model_type"))[:80]
    states = [key for key in catalog.tensors if is_optimizer_key(key)]
    weights = {key: tensor for key, tensor in catalog.tensors.items() if not is_optimizer_key(key)}

    # A surplus prefix explains most other problems, so it is reported first.
    problems = find_differences(weights, config, files=files)
    prefix = fitting_prefix(weights, config, problems)
    if prefix is not None:
        raise _prefix_error(
            weights, config, prefix, files=files, states=states, takes_optimizer=takes_optimizer
        )

    # transformers would load another model than the saved one.
    severe = tuple(problem for problem in problems if is_strict or problem.kind != "unexpected")
    if severe:
        first = severe[0]
        # A wrong count is more likely the config.json of another model than lost tensors.
        error: type[CheckpointingException] = CorruptError
        if first.is_lack and first.kind not in ("layers", "experts"):
            error = MissingShardError
        elif first.kind == "unexpected":
            error = UnknownTensorError
        raise error(
            f"this is not the {model_type} model that {CONFIG} describes: "
            f"{first.message}{more_text(severe)}",
            key=first.key,
            hint=_HINTS[first.kind],
        )
    if states and is_strict and not takes_optimizer:
        raise UnsupportedError(
            f"Hugging Face models cannot store optimizer state ({len(states):,} tensors)",
            key=states[0],
            hint="drop it with --no-optim",
        )

    if find_model_class(config) is None:
        wrapper = next(
            (text for text in _WRAPPERS if all(key.startswith(text) for key in weights)), None
        )
        if wrapper is not None and weights:
            raise UnknownTensorError(
                f"all names begin with {wrapper!r}, as in a training framework's state dict; "
                "transformers would not recognize these names and would initialize the weights "
                "randomly",
                key=next(iter(weights)),
                hint=f"remove the prefix with --strip-prefix {wrapper}",
            )

    # Note differences with which the model can still be used.
    notes = _dtype_notes(weights, config) if is_strict else []
    if problems:
        keys = [str(problem.key) for problem in problems]
        keys_text = ", ".join(keys[:3]) + (f" and {len(keys) - 3:,} more" if keys[3:] else "")
        notes.append(f"{model_type} models do not have {keys_text}; transformers ignores them")
    unchecked = unchecked_text(config)
    if unchecked is not None:
        notes.append(f"not checked: {unchecked}")
    return tuple(notes)


def _prefix_error(
    weights: Mapping[str, Tensor],
    config: Mapping[str, object],
    prefix: str,
    *,
    files: Collection[str],
    states: Sequence[str],
    takes_optimizer: bool,
) -> UnknownTensorError:
    """Build the error for names with a surplus prefix."""
    from core.hf.optimizer.states import carrying_option

    model_type = str(config.get("model_type"))[:80]
    remaining = find_differences(_without(weights, prefix), config, files=files)
    options = f"--strip-prefix {quote(prefix)}"
    if states:
        carrying = carrying_option(states) if takes_optimizer else None
        options += " --no-optim" if carrying is None else f" {carrying}"
    return UnknownTensorError(
        f"the tensor names begin with {prefix!r}, unlike the names in {model_type} models"
        + (
            f"; without the prefix, {remaining[0].message}{more_text(remaining)}"
            if remaining
            else ""
        ),
        key=next(key for key in weights if key.startswith(prefix)),
        hint=f"remove the prefix with {options}"
        + (f", and pass the {CONFIG} of this model" if remaining else ""),
    )


def _dtype_notes(weights: Mapping[str, Tensor], config: Mapping[str, object]) -> list[str]:
    """Return a note if the weights have another dtype than the configuration declares."""
    declared = next(
        (config[name] for name in ("dtype", "torch_dtype") if isinstance(config.get(name), str)),
        None,
    )
    dtypes = {tensor.dtype for tensor in weights.values()}
    if declared is None or len(dtypes) != 1 or str(declared).removeprefix("torch.") in dtypes:
        return []
    note = (
        f"{CONFIG} declares {declared}, but the weights are {min(dtypes)}; by default, "
        "transformers casts them when loading"
    )
    return [note]


def fitting_prefix(
    tensors: Mapping[str, Tensor], config: Mapping[str, object], problems: Collection[Problem]
) -> str | None:
    """Find the prefix whose removal turns the names into those of the model.

    Counts and shapes may still differ.

    Args:
        tensors: tensors of a checkpoint, by name.
        config: parsed ``config.json``.
        problems: result of ``find_differences`` for them.

    Returns:
        The prefix with its dot; None if no prefix is needed or none fits.
    """
    # Every candidate ends where the name of the embedding begins.
    model = find_model_class(config)
    if model is None or _names_fit(problems):
        return None
    (embedding,) = model.family.first[0].hf
    names = (embedding, embedding.removeprefix(model.family.body))
    prefixes = dict.fromkeys(
        key.removesuffix(name) for name in names for key in tensors if key.endswith("." + name)
    )
    for prefix in list(prefixes)[:_MOST_PREFIXES]:
        stripped = _without(tensors, prefix)
        if len(stripped) == len(tensors) and _names_fit(find_differences(stripped, config)):
            return prefix
    return None


def _names_fit(problems: Collection[Problem]) -> bool:
    """Return whether the problems include neither missing nor unexpected names."""
    return all(problem.kind not in ("missing", "unexpected") for problem in problems)


def _without(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors with a prefix removed from their names."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
