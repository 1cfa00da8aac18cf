"""An opened checkpoint as a mapping of lazy tensors.

::

    with core.open("runs/llama") as checkpoint:
        tensor = checkpoint["decoder.layers.3.mlp.linear_fc2.weight"]   # nothing is read yet
        tensor[0:8].numpy()                                            # 8 rows, from all ranks
        checkpoint.named("hf")["model.layers.3.mlp.down_proj.weight"]  # Hugging Face's names

Not supported: optimizer states under Hugging Face's names, which do not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

import core.api.verbs  # noqa: F401 # whose arguments messages name
from core.api.arguments import naming_arguments
from core.api.tensor import LazyTensor
from core.arrays.box import full_box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.engine.changes.select import without_optimizer
from core.engine.plan.box_reader import BoxReader, TensorReader
from core.errors import UnsupportedError, UsageError
from core.files.remote_path import location_of
from core.hf.family import read_family
from core.hf.names import is_hf
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.megatron.model.args import fields_of
from core.megatron.rules.tables import load_rules
from core.opening.canonical import canonical
from core.opening.open import Checkpoint, open_checkpoint
from core.opening.source_files import config_of_source
from core.values import Brief, bytes_text, list_facts, shown_briefly
from core.verbs.inspect.summary import parallel_sizes

RANKS = ("global", "local")
NAMES = ("hf", "megatron")
_MAX_COMPARED = 10_000
"""Maximum number of names to look through for similar ones, which takes 10 µs each."""


@naming_arguments()
def open(
    path: str | os.PathLike[str],
    *,
    iteration: int | None = None,
    ranks: str = "global",
    rules: str | os.PathLike[str] | None = None,
) -> OpenCheckpoint:
    """Open a checkpoint of any format as a mapping from names to lazy tensors.

    Only metadata are read. Code in the checkpoint is never run.

    Args:
        path: a checkpoint directory, one file of it, or a training root that holds iterations.
        iteration: which iteration of a training root; None for the one that its tracker names, or
            else the newest.
        ranks: ``global`` joins the shards of a Megatron run to whole tensors, one per layer and
            expert and without vocabulary padding; ``local`` gives the tensors of each rank file as
            they are stored. Other formats store global tensors, for which both are the same.
        rules: a TOML file with additional layout rules for Megatron parameters.

    Raises:
        UsageError: the path or the iteration does not exist, or ``ranks`` has any other value.
        UnsupportedError: no format recognises the checkpoint, or no rule knows its tensors.
        CheckpointingException: the metadata are damaged or incomplete.
    """
    if ranks not in RANKS:
        raise UsageError(f"ranks={ranks!r} is not one of: {', '.join(RANKS)}")
    source = open_checkpoint(location_of(path), iteration=iteration)
    try:
        catalog, notes = source.catalog, source.notes
        if ranks == "global":
            table = load_rules(None if rules is None else Path(rules))
            form = canonical(source, rules=table)
            # An optimizer that is not understood leaves the model readable: that is only a note.
            if form.failure is not None:
                if not form.is_global:
                    raise form.failure
                notes = (*notes, form.failure.sentence)
            catalog = form.catalog
        return OpenCheckpoint(source, catalog, notes=(*notes, *catalog.notes))
    except BaseException:
        source.store.close()
        raise


@shown_briefly
class OpenCheckpoint(Mapping[str, LazyTensor]):
    """The tensors of an opened checkpoint by name; a context manager that closes its files.

    Tensors may be read from several threads.

    Attributes:
        path: the directory or file of the checkpoint, after descending from a training root.
        format: name of its format, as for ``ckpt convert --to``.
        iteration: training iteration; None if none is recorded.
        parallel: sizes of the run that wrote it, by name (``tp``, ``pp`` …); {} if unknown.
        args: training arguments by name; {} if none are stored. Values that are not plain Python
            values, such as enums and dtypes, are strings.
        notes: what a reader should know, such as which iteration was chosen.
    """

    def __init__(
        self,
        source: Checkpoint,
        catalog: Catalog,
        *,
        notes: tuple[str, ...],
        closed: Event | None = None,
    ) -> None:
        self._source = source
        self._catalog = catalog
        self._reader = BoxReader(catalog, source.store)
        self._closed = closed or Event()  # shared by all views of one opened checkpoint
        self.path = source.path
        self.format = source.format.name
        self.iteration = source.iteration
        self.parallel: dict[str, int] = parallel_sizes(source.catalog)
        self.args: dict[str, object] = {}
        with suppress(UnsupportedError):  # raised if no arguments are stored
            self.args = {name: _plain(value) for name, value in fields_of(catalog.args).items()}
        self.notes = tuple(dict.fromkeys(notes))

    @naming_arguments()
    def named(
        self,
        names: str,
        *,
        model_type: str | None = None,
        family: str | os.PathLike[str] | None = None,
    ) -> OpenCheckpoint:
        """Return the weights of the model under the names of Hugging Face or of Megatron.

        Fused tensors are taken apart, or joined, when they are read. The optimizer is not included.
        Closing either checkpoint closes both.

        Args:
            names: ``hf`` or ``megatron``.
            model_type: the Hugging Face family, such as ``llama``; None for the one that the
                training arguments describe.
            family: a TOML file that describes a model family of your own, as ``--family`` does, in
                place of ``model_type``.

        Raises:
            UsageError: ``names`` has another value, the checkpoint was opened with
                ``ranks="local"``, or the file of ``family`` is not such a table.
            UnsupportedError: the model is of no supported family.
            CheckpointingException: tensors are missing, or shapes contradict the arguments.
        """
        if names not in NAMES:
            raise UsageError(f"names={names!r} is not one of: {', '.join(NAMES)}")
        if self._catalog.is_rank_local:
            raise UsageError(
                "named() renames global tensors, but this checkpoint was opened as the shards "
                "of single ranks",
                file=str(self.path),
                hint="open the checkpoint without ranks='local'",
            )
        table = None if family is None else read_family(Path(family))
        catalog = without_optimizer(self._catalog).catalog
        config = config_of_source(self._source)
        comes_from_hf = catalog.facet(MegatronModel) is None and is_hf(catalog, config)
        if names == "hf":
            if not comes_from_hf and catalog.facet(HuggingFaceModel) is None:
                catalog = to_hf(catalog, model_type=model_type, family=table)
        elif comes_from_hf:
            assert config is not None, "is_hf() is true only with a config.json"
            catalog = to_megatron(catalog, config, family=table)
        elif catalog.facet(MegatronModel) is None:
            raise UnsupportedError(
                "ckpt cannot rename the tensors, which have neither Megatron names nor Hugging "
                "Face names with a config.json",
                file=str(self.path),
                hint="read the tensors under their stored names, without named()",
            )
        notes = (*self.notes, *catalog.notes)
        return OpenCheckpoint(self._source, catalog, notes=notes, closed=self._closed)

    def close(self) -> None:
        """Close the files; afterwards no tensor can be read."""
        self._closed.set()
        self._source.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def brief(self) -> Brief:
        """Return what is shown of the checkpoint."""
        n_bytes = sum(tensor.n_bytes for tensor in self._catalog.tensors.values())
        facts = [("tensors", f"{len(self):,}, {bytes_text(n_bytes)}")]
        if self.iteration is not None:
            facts.append(("iteration", str(self.iteration)))
        if self.parallel:
            sizes = " · ".join(f"{name.upper()} {size}" for name, size in self.parallel.items())
            facts.append(("parallel", sizes))
        facts += [*list_facts("names", self), *list_facts("note", self.notes)]
        return Brief(f"{self.format} checkpoint {self.path}", facts)

    def __len__(self) -> int:
        return len(self._catalog.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._catalog.tensors  # without looking for similar names

    def __getitem__(self, key: str) -> LazyTensor:
        """Return a tensor without reading it.

        Raises:
            KeyError: the checkpoint has no tensor of this name; the message lists similar ones.
        """
        tensor = self._catalog.tensors.get(key)
        if tensor is None:
            few = self._catalog.tensors if len(self) <= _MAX_COMPARED else ()
            similar = get_close_matches(str(key), few, n=3)
            raise KeyError(f"{key} (similar: {', '.join(similar)})" if similar else key)
        return LazyTensor(key, self._catalog, lambda: self._open(key), full_box(tensor.shape))

    def _open(self, key: str) -> TensorReader:
        """Return access to the bytes of a tensor.

        Raises:
            UsageError: the checkpoint is closed.
            CheckpointingException: no files cover the tensor, or they contradict each other.
        """
        if self._closed.is_set():
            raise UsageError(
                "the checkpoint is closed",
                key=key,
                file=str(self.path),
                hint="read tensors inside the with block",
            )
        return self._reader.tensor(key)


def _plain(value: object) -> object:
    """Return a stored value as plain Python; what only a pickle can express becomes a string."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value).removeprefix("torch.")
