"""What a pickle may call: the list of harmless constructors, and that nothing else of known
packages passes.
"""

from __future__ import annotations

import ast
import io
import itertools
import logging
import operator
import os
import pickle
import re
import shlex
import sys
import tomllib
import types
import typing
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Optional, Union

import numpy as np
import pytest
import torch

from core.arrays.dtypes import BY_STORAGE
from core.errors import UnsafeError
from core.files.store import MemoryStore
from core.formats.torch.nested_names import uses_of_stream
from core.opening.pickled_places import MOST_PLACES
from core.pickle.call_table import constructor, packages
from core.pickle.inert import Global
from core.pickle.known_packages import is_known_package
from core.pickle.names import classify, dangerous_uses, is_foreign
from core.pickle.noted import noting_uses
from core.pickle.reader import load
from core.pickle.uses import Use
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.hostile.cases import text, torch_zip
from tests.support.broken import repacked

TABLE = Path(__file__).resolve().parents[2] / "core/pickle/calls.toml"


@cache
def rows() -> Sequence[Mapping[str, object]]:
    parsed = tomllib.loads(TABLE.read_text())
    return [*parsed["data"], *parsed["framework"]]


def uses_of(data: bytes) -> set[Use]:
    return uses_of_stream(MemoryStore({"x": data}), "x", 0, len(data))


# By enumeration


def modules_of(package: str) -> Iterator[tuple[str, Path]]:
    """The modules of an installed package that are written in Python, by name; none is imported."""
    spec = find_spec(package)
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        for path in Path(folder).rglob("*.py"):
            parts = path.relative_to(Path(folder).parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


_DEFINED = re.compile(r"^( *)(?:async )?(class|def) (\w+)", re.MULTILINE)
_IMPORTED = re.compile(r"^(?:from [\w.]+ )?import ([\w, ]+)$", re.MULTILINE)


def names_in_source(path: Path) -> Iterator[str]:
    """Functions and classes that a module defines, methods as dotted names too, and what it
    imports.
    """
    source = path.read_text(errors="replace")
    kind = ""
    for indent, keyword, name in _DEFINED.findall(source):
        kind = name if keyword == "class" and not indent else kind if indent else ""
        yield name
        if indent and kind:
            yield f"{kind}.{name}"
    for line in _IMPORTED.findall(source):
        yield from (part.split()[-1] for part in line.split(",") if part.strip())


def callables_in_memory() -> Iterator[tuple[str, str]]:
    """Public and private callables of every module of Python, torch and numpy that is imported
    now.
    """
    for name, module in sorted(sys.modules.items()):
        top = name.partition(".")[0]
        if top in ("torch", "numpy") or top in sys.stdlib_module_names:
            if isinstance(module, types.ModuleType) and not name.startswith("__"):
                yield from (
                    (name, attribute)
                    for attribute, value in list(vars(module).items())
                    if callable(value)
                )


def listed(*, is_pattern: bool) -> set[tuple[str, str]]:
    """(module, name) of the rows that may be called, those of modules with a ``*`` or the
    others.
    """
    return {
        (str(row["module"]), name)
        for row in rows()
        if row["may"] == "call" and ("*" in str(row["module"])) == is_pattern
        for name in str(row["names"]).split()
    }


@cache
def may_be_called(module: str, name: str) -> bool:
    return classify(Global(module, name), "called") != "dangerous"


def test_no_callable_of_torch_numpy_and_python_passes_that_is_not_on_the_list(
    request: pytest.FixtureRequest,
) -> None:
    """What is imported now; with ``--long``, also what the sources of torch and numpy define."""
    names = set(callables_in_memory())
    assert len(names) > 20_000
    if request.config.getoption("--long"):
        sources = [(module, path) for top in ("torch", "numpy") for module, path in modules_of(top)]
        names |= {(module, name) for module, path in sources for name in names_in_source(path)}
    passing = {name for name in names if may_be_called(*name)} - listed(is_pattern=False)
    storages = {
        (module, name) for module, name in passing if module == "torch" and name in BY_STORAGE
    }
    bit_generators = {
        name for module, name in listed(is_pattern=True) if module == "numpy.random._*"
    }
    numpys = {
        (module, name)
        for module, name in passing
        if module.startswith("numpy.random._") and name in bit_generators
    }
    assert passing - storages - numpys == set()


def test_partial_binds_arguments_to_no_callable_that_is_not_on_the_list() -> None:
    names = {name for name in callables_in_memory() if "\n" not in name[1]}
    passing = {name for name in names if classify(Global(*name), "bound") != "dangerous"}
    called = {name for name in names if may_be_called(*name)}
    bindable = {
        (module, name)
        for module, name in names
        if (row := constructor(module, name)) and row.may_be_bound
    }
    assert len(bindable) > 100
    assert passing == called | bindable
    assert {module for module, name in bindable if not constructor_is_exact(module, name)} <= {
        module for module in sys.modules if module.startswith(("torch.nn.modules.", "torch.optim."))
    }


def constructor_is_exact(module: str, name: str) -> bool:
    return any(row["module"] == module and name in str(row["names"]).split() for row in rows())


LOOKED_AT = frozenset(
    [
        "torch.Size.__new__",
        "torch.ScriptObject.__setstate__",
        "torch.ao.nn.quantized.modules.conv._ConvNd.__setstate__",
        "torch.ao.nn.sparse.quantized.linear.LinearPackedParams.__setstate__",
        "torch.ao.quantization.qconfig.QConfig.__new__",
        "torch.ao.quantization.qconfig.QConfigDynamic.__new__",
        "torch._C._FunctionBase.__new__",
        "torch.amp.grad_scaler.GradScaler.__setstate__",
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor.__del__",
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor.__new__",
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor.__setstate__",
        "torch.distributed.device_mesh.DeviceMesh.__setstate__",
        "torch.distributed.tensor.DTensor.__new__",
        "torch.nested._internal.nested_tensor.NestedTensor.__new__",
        "torch.nn.modules.activation.LogSoftmax.__setstate__",
        "torch.nn.modules.activation.MultiheadAttention.__setstate__",
        "torch.nn.modules.activation.Softmax.__setstate__",
        "torch.nn.modules.activation.Softmin.__setstate__",
        "torch.nn.modules.container.Container.__new__",
        "torch.nn.modules.conv._ConvNd.__setstate__",
        "torch._dynamo.decorators._DimRange.__setstate__",
        "torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions.__setstate__",
        "torch.nn.modules.loss.NLLLoss2d.__new__",
        "torch.nn.modules.module._WrappedHook.__setstate__",
        "torch.nn.modules.pooling.AvgPool3d.__setstate__",
        "torch.nn.modules.rnn.RNNBase.__setstate__",
        "torch.nn.modules.transformer.TransformerDecoderLayer.__setstate__",
        "torch.nn.modules.transformer.TransformerEncoderLayer.__setstate__",
        "torch.nn.modules.upsampling.Upsample.__setstate__",
        "torch.nn.parameter.Buffer.__new__",
        "torch.nn.parameter.UninitializedBuffer.__new__",
        "torch.nn.parameter.UninitializedParameter.__new__",
        "torch.nn.utils.rnn.PackedSequence.__new__",
        "torch.optim.Adafactor.__setstate__",
        "torch.optim.adadelta.Adadelta.__setstate__",
        "torch.optim.adagrad.Adagrad.__setstate__",
        "torch.optim.adam.Adam.__setstate__",
        "torch.optim.adamax.Adamax.__setstate__",
        "torch.optim.adamw.AdamW.__setstate__",
        "torch.optim.asgd.ASGD.__setstate__",
        "torch.optim.nadam.NAdam.__setstate__",
        "torch.optim.optimizer.Optimizer.__setstate__",
        "torch.optim.radam.RAdam.__setstate__",
        "torch.optim.rmsprop.RMSprop.__setstate__",
        "torch.optim.rprop.Rprop.__setstate__",
        "torch.optim.sgd.SGD.__setstate__",
        "torch.utils.hooks.RemovableHandle.__setstate__",
    ]
)
"""What classes of torch that may be made do more than any object when they are, or when they get a
state or end.
"""


def test_what_may_be_made_is_a_class_that_only_sets_attributes() -> None:
    bases = (object, torch.Tensor, *torch.Tensor.__mro__, torch.nn.Module, torch.nn.Parameter)
    hooks: set[str] = set()
    n_classes = 0
    for module, name in callables_in_memory():
        row = constructor(module, name) if module.startswith("torch.") else None
        value = getattr(sys.modules[module], name)
        if row is None or row.may != "make" or not isinstance(value, type):
            continue
        n_classes += 1
        for hook in ("__new__", "__setstate__", "__del__"):
            owner = next((kind for kind in value.__mro__ if hook in vars(kind)), object)
            if owner not in bases and owner.__module__.startswith("torch"):
                hooks.add(f"{owner.__module__}.{owner.__qualname__}.{hook}")
    assert n_classes > 500
    assert hooks - LOOKED_AT == set()


def test_pickles_that_call_what_is_not_listed_are_dangerous_by_every_opcode(
    request: pytest.FixtureRequest,
) -> None:
    """The names in batches of many calls, through the machine itself; without ``--long``, every
    fifth.
    """
    names = [name for name in callables_in_memory() if "\n" not in name[1]]
    names = names[:: 1 if request.config.getoption("--long") else 5]
    names = [
        name
        for name in names
        if classify(Global(*name)) != "dangerous" and not may_be_called(*name)
    ]
    assert len(names) > 1000
    for start in range(0, len(names), 2000):
        batch = names[start : start + 2000]
        calls = b"".join(
            b"c%s\n%s\n)R0" % (module.encode(), name.encode()) for module, name in batch
        )
        with noting_uses() as uses:
            load(b"\x80\x03" + calls + b"N.", label="x")
        assert {use.name for use in dangerous_uses(uses)} >= {Global(*name) for name in batch}


RUN = b"ctorch.utils.collect_env\nrun\n"
ARGUMENT = text("touch owned")
NAMESPACE = b"cargparse\nNamespace\n)\x81"
CALLS = {
    "REDUCE": RUN + ARGUMENT + b"\x85R",
    "INST": b"(" + ARGUMENT + b"itorch.utils.collect_env\nrun\n",
    "INST without arguments": b"(itorch.utils.collect_env\nrun\n",
    "OBJ": b"(" + RUN + ARGUMENT + b"o",
    "NEWOBJ": RUN + ARGUMENT + b"\x85\x81",
    "NEWOBJ_EX": RUN + ARGUMENT + b"\x85}\x92",
    "a second BUILD": NAMESPACE + b"}" + text("__setstate__") + RUN + b"sb}b",
    "APPEND": NAMESPACE + b"}" + text("append") + RUN + b"sb" + ARGUMENT + b"a",
    "APPENDS": NAMESPACE + b"}" + text("extend") + RUN + b"sb(" + ARGUMENT + b"e",
    "APPENDS to an instance in the state": b"ccollections\nUserList\n)\x81}"
    + text("data")
    + NAMESPACE
    + b"}"
    + text("extend")
    + RUN
    + b"sbsb("
    + ARGUMENT
    + b"e",
    "APPENDS to entries": b"ccollections\nOrderedDict\n)R("
    + text("extend")
    + RUN
    + b"u("
    + ARGUMENT
    + b"e",
    "dict of what looks like a mapping": b"c__builtin__\ndict\n"
    + NAMESPACE
    + b"}"
    + text("keys")
    + RUN
    + b"sb\x85R",
    "a persistent id": b"(" + text("storage") + RUN + text("0") + text("cpu") + b"K\x01tQ",
    "_rebuild_from_type_v2": b"ctorch._tensor\n_rebuild_from_type_v2\n("
    + RUN
    + b"ctorch\nTensor\n"
    + ARGUMENT
    + b"\x85NtR",
    "_reconstructor": b"ccopy_reg\n_reconstructor\n(cargparse\nNamespace\n"
    + RUN
    + ARGUMENT
    + b"tR",
    "__newobj__": b"ccopy_reg\n__newobj__\n" + RUN + b"\x85R",
    "a generator": b"cnumpy.random._pickle\n__generator_ctor\n" + ARGUMENT + RUN + b"\x86R",
    "a bit generator": b"cnumpy.random._pickle\n__bit_generator_ctor\n" + RUN + b"\x85R",
    "a result": b"cargparse\nNamespace\n)R" + ARGUMENT + b"\x85R",
    "getattr": b"c__builtin__\ngetattr\nctorch.utils\ncollect_env\n"
    + text("run")
    + b"\x86R"
    + ARGUMENT
    + b"\x85R",
    "operator.getitem": b"coperator\ngetitem\ncargparse\nNamespace\n)R" + ARGUMENT + b"\x86R",
    "type": b"c__builtin__\ntype\n(" + text("X") + b")}tR",
    "a changed class": b"ctorch.nn.modules.module\nModule\n}b",
    "a changed list": b"ctorch.serialization\n_package_registry\nNa",
    "a changed dict": b"ctorch.serialization\n_storage_classes\nNNs",
    "an extension": b"\x82\x01",
    "what cannot be made": b"cmmap\nmmap\n)\x81",
    "a frozen class": b"ctransformers.training_args\nTrainingArguments\n)R",
    "bytes that torch loads and nobody sees": b"ctorch.storage\n_load_from_bytes\n]\x85R",
    "a partial that is called": b"cfunctools\npartial\n" + RUN + b"\x85R" + ARGUMENT + b"\x85R",
    "a partial": b"cfunctools\npartial\n" + RUN + b"\x85R",
    "a partial by its state": b"cfunctools\npartial\nc__builtin__\nint\n\x85R("
    + RUN
    + ARGUMENT
    + b"\x85}NtbK\x010",
    "a partial by another state": b"cfunctools\npartial\nc__builtin__\nint\n\x85R}b",
    "a partial in a partial": b"cfunctools\npartial\ncfunctools\npartial\n" + RUN + b"\x85R\x85R",
    "a partial of more": b"cfunctools\npartial\nc__builtin__\nint\n" + ARGUMENT + b"\x86R",
    "a partial that is made": b"cfunctools\npartial\n" + RUN + ARGUMENT + b"\x86\x81",
    "a partial among entries": b"c__builtin__\ndict\ncfunctools\npartial\nc__builtin__\nint\n\x85R"
    b"(c__builtin__\nint\n)}}" + text("keys") + RUN + b"stb\x85R",
    "a script object": b"ctorch\nScriptObject\n)\x81N"
    + text("__torch__.torch.classes.tensorrt.Engine")
    + b"\x86b",
    "a script object by its keywords": b"ctorch\nScriptObject\n)}\x92",
    "a script object by copyreg": b"ccopy_reg\n__newobj_ex__\n(ctorch\nScriptObject\n)}tR",
    "a data loader": b"ctorch.utils.data.dataloader\nDataLoader\n)\x81",
    "iter of a function": b"c__builtin__\niter\n" + RUN + b"N\x86R",
    "iter of an object": b"c__builtin__\niter\n" + NAMESPACE + b"\x85R",
    "a list of an endless iterator": b"c__builtin__\nlist\ncitertools\ncount\nK\x00\x85R\x85R",
    "map": b"c__builtin__\nmap\n" + RUN + b"]" + ARGUMENT + b"a\x86R",
    "reduce": b"cfunctools\nreduce\n" + RUN + b"(" + ARGUMENT + ARGUMENT + b"t\x86R",
    "reduce of objects": b"cfunctools\nreduce\ncoperator\nor_\n("
    + NAMESPACE
    + NAMESPACE
    + b"t\x86R",
    "attrgetter": b"coperator\nattrgetter\n" + text("__globals__") + b"\x85R",
    "a graph": b"ctorch.fx.graph_module\nreduce_graph_module\n)R",
}


@pytest.mark.parametrize("is_dropped", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_is_noticed(name: str, is_dropped: bool) -> None:
    data = b"\x80\x02" + CALLS[name] + (b"0N." if is_dropped else b".")
    assert dangerous_uses(uses_of(data)), name


class Reduced:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("harmless", "harmful"),
    [
        (partial(dict), partial(os.system, "id")),
        (Reduced(operator.getitem, (Union, (int, str))), Reduced(operator.getitem, ({}, 1))),
        (iter([1]), Reduced(iter, (Reduced(os.getcwd, ()),))),
    ],
    ids=["partial", "getitem", "iter"],
)
def test_what_one_call_does_is_not_taken_for_what_the_next_does(
    harmless: object, harmful: object
) -> None:
    for values in ([harmless, harmful], [harmful, harmless]):
        stream = io.BytesIO()
        torch.save({"w": torch.ones(2), "values": values}, stream)
        assert dangerous_uses(uses_of(stream.getvalue()))


def test_bytes_that_torch_loads_and_that_are_not_read_to_their_end_are_dangerous() -> None:
    """A stray value below the result: the reader here refuses it, Python's does not."""
    stray = b"\x80\x02NN."
    data = (
        b"\x80\x03ctorch.storage\n_load_from_bytes\nB"
        + len(stray).to_bytes(4, "little")
        + stray
        + b"\x85R."
    )
    assert dangerous_uses(uses_of(data))


def test_records_whose_names_differ_in_case_only_are_ambiguous(tmp_path: Path) -> None:
    """torch finds records without regard to case, and takes the later one."""
    (tmp_path / "x.pt").write_bytes(
        torch_zip(b"\x80\x02}.", **{"DATA.PKL": b"\x80\x02" + CALLS["REDUCE"] + b"."})
    )
    findings = validate(tmp_path / "x.pt", level=Level.HEADERS).findings
    assert any(
        finding.code == "CK121" and finding.severity is Severity.ERROR for finding in findings
    )


def test_a_call_in_bytes_that_torch_loads_is_noticed_at_any_depth() -> None:
    data = b"\x80\x02" + CALLS["REDUCE"] + b"."
    for depth in range(8):
        inner = b"B" + len(data).to_bytes(4, "little") + data
        data = (
            b"\x80\x03ctorch.storage\n_load_from_bytes\n"
            + inner
            + (b"\x85R0N." if depth % 2 else b"\x85R.")
        )
        assert dangerous_uses(uses_of(data)), depth


@pytest.mark.parametrize(
    "inner",
    [
        b"cposix\nsystem\n(S'id'\ntR.",
        b"(S'id'\niposix\nsystem\n.",
        b"\x80\x02N." + b"\x80\x02cposix\nsystem\n)R.",
    ],
)
def test_pickles_without_a_begin_and_behind_others_are_noticed(inner: bytes) -> None:
    assert dangerous_uses(uses_of(inner))
    assert dangerous_uses(
        uses_of(
            b"\x80\x03ctorch.storage\n_load_from_bytes\nC" + bytes([len(inner)]) + inner + b"\x85R."
        )
    )


@pytest.mark.parametrize(
    "data", [b"config\nis no pickle\n", b"\x80\x02 text", b"", b"N", bytes(100)]
)
def test_what_is_no_pickle_names_nothing(data: bytes) -> None:
    assert uses_of(data) == set()


# What real files hold


@pytest.mark.parametrize(
    ("module", "name", "how"),
    [
        ("collections", "OrderedDict", "called"),
        ("torch._utils", "_rebuild_tensor_v2", "called"),
        ("torch.nn.modules.linear", "Linear", "made"),
        ("torch.optim.adam", "Adam", "made"),
        ("numpy.random._mt19937", "MT19937", "called"),
        ("megatron.core.transformer.enums", "SomethingNew", "called"),
        ("megatron.core.transformer.transformer_config", "TransformerConfig", "made"),
        ("transformers.training_args", "TrainingArguments", "made"),
        ("transformers.models.llama.configuration_llama", "LlamaConfig", "made"),
        ("accelerate.utils.dataclasses", "DistributedType", "called"),
        ("lightning.fabric.utilities.data", "AttributeDict", "called"),
        ("omegaconf.dictconfig", "DictConfig", "made"),
        ("mmengine.logging.history_buffer", "HistoryBuffer", "made"),
        ("mmengine.logging.history_buffer", "HistoryBuffer.mean", "named"),
        ("torch.nn.functional", "relu", "named"),
        ("ultralytics.nn.tasks", "DetectionModel", "made"),
    ],
)
def test_constructors_of_real_checkpoints_are_no_finding(module: str, name: str, how: str) -> None:
    use = Use(Global(module, name), how)  # type: ignore[arg-type]
    assert not dangerous_uses([use])
    assert not is_foreign(use)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("__main__", "Config"),
        ("my_project.models", "Net"),
        ("my.system.hub", "Net"),
        ("train", "Outer.Inner"),
    ],
)
def test_what_belongs_to_the_users_own_module_is_for_the_user_to_judge(
    module: str, name: str
) -> None:
    for how in ("named", "made", "called"):
        assert is_foreign(Use(Global(module, name), how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["np.load", "os.system", "torch.load", "__class__.__init__", "helpers.run"]
)
def test_a_name_that_leads_out_of_the_users_module_is_dangerous(name: str) -> None:
    assert classify(Global("train", name), "called") == "dangerous"


def test_every_row_is_of_a_known_package_and_says_where_it_comes_from() -> None:
    for row in rows():
        module = str(row["module"])
        assert row["may"] in ("name", "make", "call")
        assert row["source"]
        top = module.partition(".")[0]
        if "*" in top:
            prefix = top.partition("*")[0]
            assert any(package.startswith(prefix) for package in packages()), module
        else:
            # This project's own package has a name that other projects use, too.
            assert is_known_package(module) or module.startswith("core.dist_checkpointing."), module
        if "*" in str(row["names"]):
            assert row["may"] == "make" or "enum" in row, (
                "a pattern of names may be made, not called"
            )


def test_a_module_that_is_only_called_like_a_known_one_is_not_on_the_list() -> None:
    assert constructor("transformer_engine_evil.x", "DType") is None
    assert constructor("tokenizers_evil", "Tokenizer") is None
    assert constructor("torch.nn.modules.linear", "linear") is None
    assert classify(Global("torch.nn.modules.linear", "Linear"), "called") == "dangerous"


def test_a_model_that_was_pickled_whole_and_random_states_have_no_finding(tmp_path: Path) -> None:
    import argparse
    import random

    layers = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(4, 2, batch_first=True), 1
    )
    model = torch.nn.Sequential(layers, torch.nn.Conv2d(1, 1, 1), torch.nn.LSTM(2, 2))
    torch.save(model, tmp_path / "model.pt")
    torch.save(model, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    state = {
        "np": np.random.get_state(),
        "generator": np.random.default_rng(0),
        "random": random.getstate(),
        "torch": torch.get_rng_state(),
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16),
        "scalar": np.float32(1),
        "w": torch.zeros(2),
    }
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "state.pkl").write_bytes(pickle.dumps(state))
    for level in Level:
        for name in ("model.pt", "legacy.pt", "state.pt"):
            findings = validate(tmp_path / name, level=level).findings
            assert [
                finding.message for finding in findings if finding.severity > Severity.NOTE
            ] == []
    data = (tmp_path / "state.pkl").read_bytes()
    assert not dangerous_uses(uses_of(data))
    assert not any(is_foreign(use) for use in uses_of(data))


def prepared_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


def quantized_model() -> torch.nn.Module:
    """A model whose convolution and linear layer torch.ao quantized, their weights packed in
    C++.
    """
    from torch.ao import quantization

    layers = (torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(
        quantization.QuantStub(), *layers, quantization.DeQuantStub()
    ).eval()
    model.qconfig = quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.prepare(model, inplace=True)
    model(torch.randn(1, 1, 2, 2))
    quantization.convert(model, inplace=True)
    return model


def schedulers() -> list[object]:
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    kinds = [
        kind
        for kind in SchedulerType
        if not {"restart", "min_lr", "stable"} & set(kind.value.split("_"))
    ]
    return [
        get_scheduler(kind, prepared_optimizer(), 1, 4)
        for kind in kinds
        if "min_lr" not in kind.value
    ]


def cache() -> object:
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
    return cache


def advanced(iterator: Iterator[object]) -> Iterator[object]:
    next(iterator)
    return iterator


SAVED: dict[str, Callable[[], object]] = {
    "partials": lambda: [
        partial(torch.nn.functional.gelu, approximate="tanh"),
        partial(torch.nn.LayerNorm, eps=1e-6),
        partial(torch.optim.AdamW, lr=0.1),
        partial(torch.nn.init.trunc_normal_, std=0.02),
        partial(torch.sum, dim=1),
        partial(dict, a=1),
        partial(partial(round, ndigits=1), 2),
        defaultdict(partial(defaultdict, int)),
    ],
    "loggers": lambda: [
        logging.getLogger("a.b"),
        logging.getLogger(),
        logging.LoggerAdapter(logging.getLogger("x"), {}),
    ],
    "a quantized model": quantized_model,
    "a dynamically quantized model": lambda: torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2)), dtype=torch.qint8
    ),
    "a cache": cache,
    "schedulers of transformers": schedulers,
    "a scheduler": lambda: torch.optim.lr_scheduler.LambdaLR(
        prepared_optimizer(), partial(pow, 0.5)
    ),
    "polynomials": lambda: [
        np.polynomial.Polynomial([1, 2]),
        np.polynomial.Chebyshev([1, 2]),
        np.polynomial.HermiteE([1, 2]),
        np.poly1d([1, 2]),
    ],
    "iterators": lambda: [
        iter([1, 2]),
        advanced(iter((1, 2))),
        iter({1: 2}),
        iter(range(3)),
        reversed([1, 2]),
        enumerate(["a"]),
        zip([1], "a", strict=False),
        itertools.count(1, 2),
        advanced(itertools.cycle([1, 2])),
        itertools.chain([1], [2]),
        advanced(itertools.islice([1, 2], 2)),
        itertools.repeat(1),
        iter(deque([1])),
    ],
    "annotations": lambda: [
        Optional[int],  # noqa: UP045
        Union[int, str],  # noqa: UP007
        int | None,
        list[int] | None,
        torch.Tensor | None,
        Callable[[int], str],
        Literal["a"],
        typing.Callable[[int], str],
        typing.Dict[str, typing.Any],  # noqa: UP006
    ],
    "exceptions": lambda: [OSError(2, "x"), FileNotFoundError("x")],
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of torch.ao.quantization
@pytest.mark.parametrize("name", SAVED)
def test_what_people_save_beside_weights_calls_nothing_dangerous(name: str, tmp_path: Path) -> None:
    torch.save({"saved": SAVED[name](), "w": torch.zeros(2)}, tmp_path / "x.pt")
    uses = uses_of((tmp_path / "x.pt").read_bytes())
    assert dangerous_uses(uses) == set()
    assert not any(is_foreign(use) for use in uses)
    if (
        "quantized" not in name
    ):  # tensors of that kind in an object are not copied, which is an error of its own
        run(Job(src=tmp_path / "x.pt", dst=tmp_path / "y.pt", to="torch"))
        assert dangerous_uses(uses_of((tmp_path / "y.pt").read_bytes())) == set()


def test_a_graph_that_torch_would_compile_is_dangerous(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    torch.save({"graph": graph, "w": torch.zeros(2)}, tmp_path / "x.pt")
    assert Global("torch.fx.graph_module", "reduce_graph_module") in {
        use.name for use in dangerous_uses(uses_of((tmp_path / "x.pt").read_bytes()))
    }


def calling_places() -> dict[str, tuple[dict[str, object], str]]:
    """Trees in which something is called where the reader makes no object of it → where, by file
    and key.
    """
    noted = torch.nn.Parameter(torch.zeros(2))
    noted.calls = map(len, [[1]])  # type: ignore[attr-defined]
    with_state = OrderedDict(w=torch.zeros(2))
    with_state._metadata = {"": map(len, [[1]])}  # type: ignore[attr-defined]
    return {
        "an attribute of a tensor": ({"a": {"p": noted}, "w": torch.zeros(2)}, "a.p"),
        "a key": ({"b": {map(len, [[1]]): 1}, "w": torch.zeros(2)}, "b.<builtins.map>"),
        "the state of a container": (with_state, ""),
        "the state of a container below": ({"model": with_state, "v": torch.zeros(2)}, ""),
    }


@pytest.mark.parametrize("name", calling_places())
def test_what_is_called_beside_the_entries_is_refused_by_its_place_and_can_be_left_out(
    name: str, tmp_path: Path
) -> None:
    tree, key = calling_places()[name]
    torch.save(tree, tmp_path / "x.pt")
    job = Job(src=tmp_path / "x.pt", dst=tmp_path / "y.pt", to="torch")
    with pytest.raises(UnsafeError, match="builtins.map") as caught:
        run(job)
    assert caught.value.file == "x.pt"
    assert caught.value.key == (key or None)
    if key:
        assert f"--exclude {shlex.quote(key)}" in str(caught.value)
        run(replace(job, exclude=(key,)))
        assert dangerous_uses(uses_of((tmp_path / "y.pt").read_bytes())) == set()
    else:
        assert "_metadata" in str(caught.value)
        with pytest.raises(
            UnsafeError, match="builtins.map"
        ):  # the container stays when its entries go
            run(replace(job, exclude=("model" if "model" in tree else "w",)))


def test_what_a_pickle_calls_and_drops_is_refused_whatever_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(
        torch_zip(b"\x80\x02" + CALLS["REDUCE"] + b"0}" + text("s") + b"K\x01s.")
    )
    with pytest.raises(UnsafeError, match="discards the result"):
        run(Job(src=tmp_path / "x.pt", dst=tmp_path / "y.pt", to="torch", exclude=("s",)))


def test_leaving_one_call_out_does_not_excuse_another_that_is_dropped(tmp_path: Path) -> None:
    tree, key = calling_places()["a key"]
    torch.save(tree, tmp_path / "x.pt")
    repacked(
        tmp_path / "x.pt", "data.pkl", lambda data: data[:2] + CALLS["REDUCE"] + b"0" + data[2:]
    )
    job = Job(src=tmp_path / "x.pt", dst=tmp_path / "y.pt", to="torch")
    with pytest.raises(UnsafeError, match="--exclude"):
        run(job)
    with pytest.raises(UnsafeError, match="discards the result"):
        run(replace(job, exclude=(key,)))


def test_more_calls_than_are_listed_are_not_excused_by_those_that_are(tmp_path: Path) -> None:
    module_state = OrderedDict(w=torch.zeros(2))
    module_state._metadata = {"": map(len, [[1]])}  # type: ignore[attr-defined]
    tree = {f"a{number}": {map(len, [[1]]): 1} for number in range(MOST_PLACES)} | {
        "z": module_state
    }
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(UnsafeError, match="builtins.map"):
        run(Job(src=tmp_path / "x.pt", dst=tmp_path / "y.pt", to="torch", exclude=("a*",)))


def test_a_partial_of_the_users_own_function_is_for_the_user_to_judge() -> None:
    uses = uses_of(b"\x80\x02cfunctools\npartial\ncmy_project\nloss\n\x85R.")
    assert not dangerous_uses(uses)
    assert {use.name.module for use in uses if is_foreign(use)} == {"my_project"}


def test_no_container_around_a_pickle_hides_a_call() -> None:
    inner = b"\x80\x02" + CALLS["REDUCE"] + b"."
    assert dangerous_uses(uses_of(torch_zip(inner)))
    assert dangerous_uses(uses_of(inner))
    assert dangerous_uses(uses_of(b"\x80\x02B" + len(inner).to_bytes(4, "little") + inner + b"."))


def test_no_text_of_the_program_advises_to_load_without_weights_only(repo_dir: Path) -> None:
    sources = [
        path for folder in ("core", "ckpt_cli") for path in (repo_dir / folder).rglob("*.py")
    ]
    texts = [
        (path.name, node.value)
        for path in sources
        if "weights_only" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(sources) > 500 and len(texts) > 100
    assert [entry for entry in texts if "weights_only=False" in entry[1]] == []
