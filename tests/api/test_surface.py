"""The documented names are there: modules, functions, classes, bases, parameters, their order,
kinds and defaults.

``surface.json`` says what is documented, one signature a line, in Python's syntax; ``sources``
there says where each module's list comes from. Annotations are compared where the source states
them.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import json
import types
import typing
from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import CheckpointingException

SURFACE = json.loads(Path(__file__).with_name("surface.json").read_text("utf-8"))["modules"]
PACKAGE = "core.dist_checkpointing"

OURS = {
    f"{PACKAGE}.serialization.save": {"manifest", "overwrite"},
}
"""Keyword-only parameters with defaults that are there in addition."""

METHOD_KINDS = {
    "methods": types.FunctionType,
    "classmethods": classmethod,
    "staticmethods": staticmethod,
}


def rows(kind: str) -> list[Any]:
    """(module, what it documents of a kind), one for each of the kind."""
    return [
        pytest.param(
            module, item, id=f"{module.removeprefix(PACKAGE).lstrip('.')}:{item.split('(')[0]}"
        )
        for module, stated in SURFACE.items()
        for item in stated.get(kind, ())
    ]


def members() -> list[Any]:
    """(module, class, kind of method, signature)."""
    return [
        pytest.param(
            module,
            name,
            kind,
            signature,
            id=f"{module.removeprefix(PACKAGE)}:{name}.{signature.split('(')[0]}",
        )
        for module, stated in SURFACE.items()
        for name, parts in stated.get("classes", {}).items()
        for kind in METHOD_KINDS
        for signature in parts.get(kind, ())
    ]


def module_of(name: str) -> types.ModuleType:
    return importlib.import_module(name)


def namespace(module: str) -> dict[str, Any]:
    """What the texts of defaults, bases and annotations may name."""
    import logging
    import pathlib

    import numpy
    import torch
    import torch.distributed.checkpoint as dcp
    import zarr

    names = {
        **vars(typing),
        "core": importlib.import_module("core"),
        "torch": torch,
        "pathlib": pathlib,
        "np": numpy,
    }
    names |= {
        "logging": logging,
        "ABC": ABC,
        "abc": importlib.import_module("abc"),
        "enum": enum,
        "Enum": enum.Enum,
    }
    names |= {name: getattr(dcp, name) for name in ("DefaultSavePlanner", "DefaultLoadPlanner")}
    names |= {"FileSystemWriter": dcp.FileSystemWriter, "FileSystemReader": dcp.FileSystemReader}
    names |= {"numpy": numpy, "zarr": zarr, "Path": pathlib.Path}
    mapping = importlib.import_module(
        f"{PACKAGE}.mapping"
    )  # where types alone need them, modules do not import these
    return names | vars(mapping) | vars(module_of(module))


def evaluated(text: Any, module: str) -> Any:
    return eval(text, namespace(module)) if isinstance(text, str) else text


def normal(annotation: Any, module: str) -> Any:
    """An annotation in which spellings of one type are equal."""
    annotation = evaluated(annotation, module)
    if annotation is None:
        return type(None)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return frozenset(normal(arg, module) for arg in args)
    if origin is None:
        return annotation
    inner = (
        tuple(normal(part, module) for part in arg)
        if isinstance(arg, list)
        else normal(arg, module)
        for arg in args
    )
    return (origin, *inner)


def optional(annotation: Any) -> Any:
    """With None among the types: what a default of None says, whether or not the annotation
    does.
    """
    return (annotation if isinstance(annotation, frozenset) else frozenset([annotation])) | {
        type(None)
    }


@dataclasses.dataclass(frozen=True)
class Parameter:
    name: str
    kind: Any
    default: Any
    annotation: Any


def stated(signature: str, module: str) -> tuple[list[Parameter], Any]:
    """The parameters of a signature in ``surface.json`` and what it returns."""
    node = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    parameters = list(_parameters(plain, defaults, inspect.Parameter.POSITIONAL_OR_KEYWORD, module))
    if args.vararg:
        parameters += _parameters([args.vararg], [None], inspect.Parameter.VAR_POSITIONAL, module)
    parameters += _parameters(
        args.kwonlyargs, args.kw_defaults, inspect.Parameter.KEYWORD_ONLY, module
    )
    if args.kwarg:
        parameters += _parameters([args.kwarg], [None], inspect.Parameter.VAR_KEYWORD, module)
    return parameters, None if node.returns is None else normal(ast.unparse(node.returns), module)


def _parameters(args: Any, defaults: Any, kind: Any, module: str) -> Iterator[Parameter]:
    for arg, default in zip(args, defaults, strict=True):
        value = (
            inspect.Parameter.empty if default is None else evaluated(ast.unparse(default), module)
        )
        annotation = None if arg.annotation is None else normal(ast.unparse(arg.annotation), module)
        yield Parameter(arg.arg, kind, value, annotation)


def is_same_default(default: Any, other: Any) -> bool:
    if isinstance(default, types.LambdaType) and default.__name__ == "<lambda>":
        return callable(other) and default(default) is other(
            default
        )  # the documented ones return what they are given
    return type(default) is type(other) and bool(default == other)


def check_signature(function: Any, text: str, module: str, name: str) -> None:
    expected, returned = stated(text, module)
    signature = inspect.signature(function)
    extra = OURS.get(name, set())
    actual = [
        parameter for parameter in signature.parameters.values() if parameter.name not in extra
    ]
    for parameter in signature.parameters.values():
        if parameter.name in extra:
            assert (
                parameter.kind is parameter.KEYWORD_ONLY
                and parameter.default is not parameter.empty
            )
    assert [(p.name, p.kind) for p in actual] == [(p.name, p.kind) for p in expected]
    for actual_parameter, theirs in zip(actual, expected, strict=True):
        assert is_same_default(theirs.default, actual_parameter.default), (
            f"{actual_parameter.name}: {actual_parameter.default!r}, not {theirs.default!r}"
        )
        if theirs.annotation is not None:
            assert actual_parameter.annotation is not actual_parameter.empty, (
                f"{actual_parameter.name} has no annotation"
            )
            annotation, wanted = normal(actual_parameter.annotation, module), theirs.annotation
            if actual_parameter.default is None:
                annotation, wanted = optional(annotation), optional(wanted)
            assert annotation == wanted, f"{actual_parameter.name}: {annotation}, not {wanted}"
    if returned is not None:
        assert normal(signature.return_annotation, module) == returned


@pytest.mark.parametrize(
    "module", [name for name in SURFACE if SURFACE[name]["source"] != "382eeea"]
)
def test_a_module_with_a_page_of_its_own_is_there(module: str) -> None:
    assert module_of(module).__doc__


@pytest.mark.parametrize(("module", "name"), rows("exports"))
def test_the_package_exports_it(module: str, name: str) -> None:
    package = module_of(module)
    assert name in package.__all__ and hasattr(package, name)


@pytest.mark.parametrize(("module", "name"), rows("data"))
def test_a_module_variable_is_there(module: str, name: str) -> None:
    assert getattr(module_of(module), name) is not None


@pytest.mark.parametrize(("module", "signature"), rows("functions"))
def test_a_function_has_the_documented_signature(module: str, signature: str) -> None:
    name = signature.split("(")[0]
    check_signature(getattr(module_of(module), name), signature, module, f"{module}.{name}")


@pytest.mark.parametrize(("module", "name"), rows("classes"))
def test_a_class_has_the_documented_bases_fields_and_properties(module: str, name: str) -> None:
    cls, parts = getattr(module_of(module), name), SURFACE[module]["classes"][name]
    for base in parts.get("bases", ()):
        if base == "NamedTuple":
            assert issubclass(cls, tuple) and cls._fields
        else:
            assert evaluated(base, module) in cls.__mro__[1:]
    for prop in parts.get("properties", ()):
        assert isinstance(inspect.getattr_static(cls, prop), property)
    for field in parts.get("attributes", ()):
        field_name, annotation = field.split(": ")
        assert normal(cls.__annotations__[field_name], module) == normal(annotation, module)
    if "members" in parts:
        assert {member.name: member.value for member in cls} == parts["members"]
    if "fields" in parts:
        check_fields(cls, parts["fields"], module)


def check_fields(cls: Any, texts: list[str], module: str) -> None:
    """A dataclass or named tuple has these fields in this order, with these defaults and
    annotations.
    """
    expected, _ = stated(f"fields({', '.join(texts)})", module)
    if dataclasses.is_dataclass(cls):
        assert [(f.name, f.init) for f in dataclasses.fields(cls)] == [
            (p.name, True) for p in expected
        ]
        defaults = {
            f.name: f.default
            for f in dataclasses.fields(cls)
            if f.default is not dataclasses.MISSING
        }
    else:
        assert list(cls._fields) == [p.name for p in expected]
        defaults = cls._field_defaults
    annotations = {
        name: text
        for base in reversed(cls.__mro__)
        for name, text in inspect.get_annotations(base).items()
    }
    for parameter in expected:
        assert is_same_default(
            parameter.default, defaults.get(parameter.name, inspect.Parameter.empty)
        )
        if parameter.annotation is not None:
            assert normal(annotations[parameter.name], module) == parameter.annotation


@pytest.mark.parametrize(("module", "name", "kind", "signature"), members())
def test_a_method_has_the_documented_kind_and_signature(
    module: str, name: str, kind: str, signature: str
) -> None:
    cls, method = getattr(module_of(module), name), signature.split("(")[0]
    attribute = inspect.getattr_static(cls, method)
    assert isinstance(attribute, METHOD_KINDS[kind])
    function = (
        attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
    )
    check_signature(inspect.unwrap(function), signature, module, f"{module}.{name}.{method}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (m, name)
        for m in SURFACE
        for name, parts in SURFACE[m].get("classes", {}).items()
        if "abstract" in parts
    ],
)
def test_a_class_has_the_documented_abstract_methods_and_no_others(module: str, name: str) -> None:
    cls, abstract = (
        getattr(module_of(module), name),
        set(SURFACE[module]["classes"][name]["abstract"]),
    )
    required = cls.__abstractmethods__ if issubclass(cls, ABC) else frozenset()
    assert required <= abstract
    # The documentation calls abstract whatever does nothing but refuse, whether or not a subclass
    # has to define it.
    least = type("Least", (cls,), dict.fromkeys(required, lambda self, *args: None))
    for method in abstract - required:
        function = getattr(least.__new__(least) if issubclass(cls, ABC) else least, method)
        with pytest.raises((NotImplementedError, CheckpointingException)):
            function(*[()] * len(inspect.signature(function).parameters))
