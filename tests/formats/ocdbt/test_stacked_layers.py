"""Layers that a program in JAX stacked along axis 1 go apart, and together again.

``tests/golden/frameworks/orbax_layers.py`` says which values Orbax saved.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from core.errors import UsageError
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, run
from tests.support.materialize import tensor_bytes

N_LAYERS = 4


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(path)
    catalog = checkpoint.catalog
    return {
        key: tensor_bytes(catalog, checkpoint.store, key).view("<f4").reshape(tensor.shape)
        for key, tensor in catalog.tensors.items()
    }


def test_every_layer_has_the_values_that_orbax_saved(orbax_layers: Path, tmp_path: Path) -> None:
    source, apart, back = orbax_layers / "maxtext", tmp_path / "apart", tmp_path / "back"
    stacked = arrays_of(source)
    for number, (key, value) in enumerate(sorted(stacked.items())):
        assert (value.ravel() == 1000 * number + np.arange(value.size)).all(), key

    # The wanted layers by numpy alone.
    wanted = {}
    for key, value in stacked.items():
        head, layers, tail = key.partition(".layers.")
        if not layers:
            wanted[key] = value
        for n in range(N_LAYERS) if layers else ():
            wanted[f"{head}.layers.{n}.{tail}"] = value[:, n]
    run(Job(src=source, dst=apart, to="dcp", unstack_layers=(), layer_axis=1, fsync=False))
    arrays = arrays_of(apart)
    assert arrays.keys() == wanted.keys()
    for key, value in wanted.items():
        assert arrays[key].shape == value.shape and (arrays[key] == value).all(), key

    # The layers are items of torch now, whose positions are found late.
    run(Job(src=apart, dst=back, to="orbax", stack_layers=True, layer_axis=1, fsync=False))
    again = arrays_of(back)
    assert again.keys() == stacked.keys()
    assert all((again[key] == value).all() for key, value in stacked.items())
    twice = tmp_path / "twice"
    run(Job(src=apart, dst=tmp_path / "dcp", to="dcp", stack_layers=True, layer_axis=1))
    run(Job(src=tmp_path / "dcp", dst=twice, to="torch", unstack_layers=(), layer_axis=1))
    assert all((value == wanted[key]).all() for key, value in arrays_of(twice).items())


def test_the_wrong_axis_is_refused_before_anything_is_written(
    orbax_layers: Path, tmp_path: Path
) -> None:
    job = Job(src=orbax_layers / "maxtext", dst=tmp_path / "out", to="torch", unstack_layers=())
    with pytest.raises(UsageError, match=r"has 8 layers, but this tensor has 12") as caught:
        run(job)
    assert "--layer-axis" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []
