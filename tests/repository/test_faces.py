"""What a plug-in or a script imports from the faces of packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

FACES = {
    "core": set(
        """
        Catalog Checkpoint CheckpointingException Format Job LazyTensor OpenCheckpoint
        Report TopologyChange __version__ open_checkpoint convert diff inspect merge
        open prune reshard validate
        """.split()
    ),
    "core.catalog": set(
        """
        Catalog Encoding Extent FileImage Fragment JoinedArray Literal PlacedArray
        PlannedArray StoredArray StoredObject TargetCatalog TargetFragment Tensor
        catalog_of_arrays literal_file whole_fragment
        """.split()
    ),
    "core.formats": {"Format", "format_called", "formats", "sniffed"},
}


@pytest.mark.parametrize("name", FACES)
def test_a_face_exports_what_is_promised(name: str) -> None:
    face = import_module(name)
    assert set(face.__all__) == FACES[name]
    assert [item for item in FACES[name] if getattr(face, item) is None] == []


def test_importing_core_imports_nothing_else_of_it() -> None:
    code = (
        "import sys, core; print(sorted(name for name in sys.modules if name.startswith('core.')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "['core.version']\n"


def test_an_unknown_name_of_core_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = import_module("core").nothing
