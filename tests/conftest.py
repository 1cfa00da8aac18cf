"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import tarfile
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.covering import covering_rows
from tests.support.made_once import made_once
from tests.support.rounds import LONG, SHORT

for name, n_values in (("short", SHORT), ("long", LONG)):
    hypothesis.settings.register_profile(
        name,
        deadline=None,  # a busy machine is no failure
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        max_examples=n_values,
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--long``: also the tests that are left out because the suite has a time limit."""
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the garbage collector away while modules and tests are collected, which all stay: a
    fifth of the time of a whole collection. Afterwards it comes seldom, and skips them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(100_000, 20, 100)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests unless they were asked for, of tests marked ``pairwise`` or
    ``each_value`` the combinations of parameters that add nothing to the others, and of those
    marked ``first`` all but the first cases.
    """
    if config.getoption("--long"):
        return
    products: dict[tuple[str, int], list[pytest.Item]] = {}
    left_out: set[pytest.Item] = set()
    n_cases: Counter[str] = Counter()
    for item in items:
        first = item.get_closest_marker("first")
        if item.get_closest_marker("long") is not None:
            left_out.add(item)
        elif first is not None:
            test = item.nodeid.partition("[")[0]
            n_cases[test] += 1
            if n_cases[test] > first.args[0]:
                left_out.add(item)
        elif isinstance(item, pytest.Function):
            for marker, n_together in N_TOGETHER.items():
                if item.get_closest_marker(marker) is not None:
                    test = item.nodeid.partition("[")[0]
                    products.setdefault((test, n_together), []).append(item)
    for (_, n_together), combinations in products.items():
        rows = [_values(item) for item in combinations if isinstance(item, pytest.Function)]
        chosen = covering_rows(rows, n_together=n_together)
        left_out.update(combinations[number] for number in set(range(len(rows))).difference(chosen))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


N_TOGETHER = {"each_value": 1, "pairwise": 2}
"""Marker → of how many parameters every combination of values is kept."""


def _values(item: pytest.Function) -> dict[str, Hashable]:
    """Return the values of a test's parameters; the identity of those that have no hash."""
    values: dict[str, Hashable] = {}
    for name, value in item.callspec.params.items():
        try:
            hash(value)
            values[name] = (type(value), value)  # True and 1 are two values
        except TypeError:
            values[name] = ("object", id(value))
    return values


def pytest_configure(config: pytest.Config) -> None:
    """Lets programs that the tests start die of signals, also where this run was started with them
    ignored (nohup); they show no progress unless they are told to. Chooses how many values
    hypothesis tries.
    """
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "short")
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    os.environ["CKPT_PAGER"] = ""  # a pager in a pseudo-terminal would wait for a key
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"  # no test reaches beyond this machine
    os.environ["CKPT_PROGRESS"] = "none"  # on a busy machine, any command may take long
    # Tensors are small here: threads of torch would only wait for each other, and for those of
    # other tests. torch is not imported yet.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


GOLDEN_ARCHIVE = Path(__file__).parent / "golden" / "golden.tar.xz"
ORBAX_LAYERS_ARCHIVE = GOLDEN_ARCHIVE.with_name("orbax_layers.tar.xz")
FRAMEWORKS_ARCHIVE = GOLDEN_ARCHIVE.with_name("frameworks.tar.xz")
LIGHTNING_ARCHIVE = GOLDEN_ARCHIVE.with_name("lightning.tar.xz")
DEEPSPEED_ARCHIVE = GOLDEN_ARCHIVE.with_name("deepspeed_parallel.tar.xz")
TORCHTITAN_ARCHIVE = GOLDEN_ARCHIVE.with_name("torchtitan.tar.xz")
TORCHTITAN_RUN_ARCHIVE = GOLDEN_ARCHIVE.with_name("torchtitan_run.tar.xz")
TWO_MODELS_ARCHIVE = GOLDEN_ARCHIVE.with_name("two_models.tar.xz")
DIFFUSERS_ARCHIVE = GOLDEN_ARCHIVE.with_name("diffusers.tar.xz")
LLAMA_RUNS_ARCHIVE = GOLDEN_ARCHIVE.with_name("llama_runs.tar.xz")
MEGATRON_FSDP_ARCHIVE = GOLDEN_ARCHIVE.with_name("megatron_fsdp.tar.xz")
MEGATRON_PREDICTIONS_ARCHIVE = GOLDEN_ARCHIVE.with_name("megatron_predictions.tar.xz")


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the checkpoints that other software wrote; see tests/golden/README.md. To be
    read only.

    Unpacked once per run; under pytest-xdist all workers share one.
    """
    return _unpacked(GOLDEN_ARCHIVE, "golden", tmp_path_factory)


@pytest.fixture(scope="session")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the checkpoints of training frameworks, as ``golden``. scripts/framework-tests
    names one that it has made anew.
    """
    return _made_or_unpacked("CKPT_FRAMEWORKS", FRAMEWORKS_ARCHIVE, "frameworks", tmp_path_factory)


@pytest.fixture(scope="session")
def lightning_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the checkpoints of Lightning, as ``frameworks``."""
    return _made_or_unpacked("CKPT_LIGHTNING", LIGHTNING_ARCHIVE, "lightning", tmp_path_factory)


@pytest.fixture(scope="session")
def deepspeed_parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of DeepSpeed's checkpoints with experts and model-parallel ranks, as
    ``frameworks``.
    """
    return _made_or_unpacked(
        "CKPT_DEEPSPEED", DEEPSPEED_ARCHIVE, "deepspeed_parallel", tmp_path_factory
    )


@pytest.fixture(scope="session")
def torchtitan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the models of torchtitan, as ``frameworks``, and of what its adapters make of
    them.
    """
    return _made_or_unpacked("CKPT_TORCHTITAN", TORCHTITAN_ARCHIVE, "torchtitan", tmp_path_factory)


@pytest.fixture(scope="session")
def torchtitan_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of a Llama with torchtitan, as ``golden``."""
    return _unpacked(TORCHTITAN_RUN_ARCHIVE, "torchtitan_run", tmp_path_factory) / "run"


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the pipelines of diffusers, as ``frameworks``."""
    return _made_or_unpacked("CKPT_DIFFUSERS", DIFFUSERS_ARCHIVE, "diffusers", tmp_path_factory)


@pytest.fixture(scope="session")
def orbax_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tree whose layers Orbax stacked along axis 1, as ``frameworks``."""
    return _made_or_unpacked(
        "CKPT_ORBAX_LAYERS", ORBAX_LAYERS_ARCHIVE, "orbax_layers", tmp_path_factory
    )


@pytest.fixture(scope="session")
def megatron_fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the checkpoints of Megatron-FSDP, as ``frameworks``."""
    return _made_or_unpacked(
        "CKPT_MEGATRON_FSDP", MEGATRON_FSDP_ARCHIVE, "megatron_fsdp", tmp_path_factory
    )


@pytest.fixture(scope="session")
def megatron_predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model with multi-token prediction and tied embeddings, as ``golden``."""
    return _unpacked(MEGATRON_PREDICTIONS_ARCHIVE, "megatron_predictions", tmp_path_factory)


@pytest.fixture(scope="session")
def llama_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of runs of a Llama with DeepSpeed and FSDP2, as ``frameworks``."""
    return _made_or_unpacked("CKPT_LLAMA_RUNS", LLAMA_RUNS_ARCHIVE, "llama_runs", tmp_path_factory)


@pytest.fixture(scope="session")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a state of accelerate with two models, as ``frameworks``."""
    made_anew = os.environ.get("CKPT_FRAMEWORKS")
    if made_anew:
        return Path(made_anew) / "accelerate" / "two_models"
    return _unpacked(TWO_MODELS_ARCHIVE, "accelerate", tmp_path_factory) / "two_models"


def _made_or_unpacked(
    variable: str, archive_path: Path, name: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the directory that an environment variable names, or that of an archive."""
    made_anew = os.environ.get(variable)
    return Path(made_anew) if made_anew else _unpacked(archive_path, name, tmp_path_factory)


def _unpacked(archive_path: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack an archive into a folder of this run, unless it is there."""

    def unpack(folder: Path) -> None:
        with tarfile.open(archive_path) as archive:
            if hasattr(
                tarfile, "data_filter"
            ):  # since Python 3.11.4; the archive is our own either way
                archive.extractall(folder, filter="data")
            else:
                archive.extractall(folder)

    return made_once(name, unpack, tmp_path_factory)


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parent.parent
