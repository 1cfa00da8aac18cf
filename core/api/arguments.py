"""Arguments of the verbs: their former names, and the options of a job as keyword arguments."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, cleandoc, signature
from typing import ParamSpec, TypeVar

from core.api.spelling import spell, spell_result
from core.errors import CheckpointingException
from core.verbs.convert.job import SIZES, Job
from core.verbs.convert.job_options import OPTIONS, PARSERS

P = ParamSpec("P")
Result = TypeVar("Result")

_FORMER_NAMES = {"optimizer": "optim", "memory_bytes": "memory"}
"""Former name of an argument → its name."""
_FORMER_SIZES = {name: f"{name}_new" for name in SIZES}
"""The same, of ``reshard`` only."""
_OTHER_OPTIONS = """
    tp_new, pp_new, vpp_new, ep_new, etp_new: parallel sizes of the destination; None keeps the
        source's sizes.
    decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers: layers in the first and
        in the last pipeline stage of the destination.
    account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: count the
        embedding (the loss) as a layer.
    pipeline_model_parallel_layout: contents of each model chunk: ``E|(t|)*3,m|L``.
    optim: False omits the optimizer, True requires it; None carries it over, except into a
        Hugging Face checkpoint, which cannot contain one.
    unstack_layers: globs of stacked tensors to split into layers; ``auto`` for the usual names.
    memory: memory limit of the process, in bytes or as text: ``8GiB``.
"""
"""Descriptions of the options that differ from the fields of a job."""
_TYPES = {"account": "bool | None", "pipeline": "str | None", "memory": "str | int | None"}
"""First word of an option that is no field of a job → its type; the others are numbers."""


VERBS: dict[str, Mapping[str, Parameter]] = {}
"""Verb → its arguments by name; each enters itself by its decorator."""


@contextmanager
def naming_arguments(verb: str = "convert") -> Iterator[None]:
    """Name options in errors as arguments of a verb. Also a decorator."""
    try:
        yield
    except CheckpointingException as err:
        err.reword(partial(spell, verbs=VERBS, verb=verb))
        raise


def as_verb(verb: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a verb to take former names of arguments, and to name arguments in messages."""
    VERBS[verb.__name__] = signature(verb).parameters

    former_names = _FORMER_NAMES | (_FORMER_SIZES if verb.__name__ == "reshard" else {})
    names = {
        former: name
        for former, name in former_names.items()
        if name in signature(verb).parameters and former not in signature(verb).parameters
    }

    @wraps(verb)
    def call(*args: P.args, **options: P.kwargs) -> Result:
        for former in names.keys() & options.keys():
            name = names[former]
            text = f"{verb.__name__}({former}=…) is deprecated: use {name}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            value = options.pop(former)
            if name in options and value is not None:
                raise TypeError(f"{verb.__name__}() got both {name} and its former name {former}")
            options.setdefault(name, value)
        signature(verb).bind(*args, **options)  # a TypeError for names that do not exist
        with naming_arguments(verb.__name__):
            result = verb(*args, **options)
        return spell_result(result, VERBS, verb=verb.__name__)

    return call


def takes_options(
    *, without: Collection[str] = ()
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Return a decorator that shows the options of a job in signature and help of a function.

    Args:
        without: options that the function does not take.
    """
    names = [name for name in OPTIONS if name not in without]

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        own = signature(function)
        parameters = [
            item for item in own.parameters.values() if item.kind != Parameter.VAR_KEYWORD
        ]
        parameters += map(_build_parameter, names)
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        texts = [text for text in _list_descriptions() if {*_list_names(text)} & {*names}]
        function.__doc__ = "\n".join([cleandoc(function.__doc__ or ""), "", "Options:", *texts])
        return function

    return decorate


def _build_parameter(option: str) -> Parameter:
    """Return the parameter of a signature for an option."""
    field = {field.name: field for field in fields(Job)}.get(option)
    if field is None:
        default, kind = None, _TYPES.get(option.partition("_")[0], "int | None")
    else:
        default, kind = field.default, str(field.type)
        if option in PARSERS:
            parse = PARSERS[option]
            parse = parse.func if isinstance(parse, partial) else parse
            first, *_ = signature(parse).parameters.values()
            kind = f"{first.annotation}{' | None' if default is None else ''}"
    return Parameter(option, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _list_descriptions() -> list[str]:
    """Return the descriptions of the options, each with its names first."""
    _, _, arguments = cleandoc(Job.__doc__ or "").partition("\nArgs:")
    _, *others = re.split(r"\n(?=    \S)", _OTHER_OPTIONS.rstrip())
    _, *of_job = re.split(r"\n(?=    \S)", arguments)
    described = {name for text in others for name in _list_names(text)}
    return [*others, *(text for text in of_job if described.isdisjoint(_list_names(text)))]


def _list_names(description: str) -> list[str]:
    """Return the names at the beginning of a description."""
    return description.partition(":")[0].strip().split(", ")
