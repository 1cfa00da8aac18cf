"""Read ``hf/tables``: a family of models, with its tensor names and its configuration.

``hf/tables/llama.toml`` explains the fields of a table. ``core.hf.name_tables`` applies its rows to
a model.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from core.errors import UnsupportedError, UsageError, did_you_mean
from core.files.store import override, translate_os_errors
from core.hf.settings import Setting
from core.values import dataclass

_TABLES = Path(__file__).parent / "tables"
_FIELDS = frozenset(
    """
    model_type aliases architecture classifiers body layers inner rows_of without
    requires allows ignored absent rope detected implementation builder differs
    checked caution config mtp_names reasons inert settings switches experts fixed
    defaults first layer mtp last
    """.split()
)
SECTIONS = ("first", "layer", "mtp", "last")
"""Lists of rows in a table."""
_ROWS = tuple(f"[[{section}]]" for section in SECTIONS)
_PART = re.compile(r"^(?=\[)", re.MULTILINE)
"""The beginning of a part of a table, under a heading of its own."""
_LISTS = ("dense", "shared", "groups", "requires")
"""Fields of ``[experts]`` that are lists of names."""
_OPTIONAL_NAMES = ("num_query_groups", "kv_channels")
"""Arguments in ``[config]`` for which ``config.json`` may have no name."""
DEFAULT_IMPLEMENTATION = "transformer_engine"
"""Megatron's default for ``--transformer-impl``, since megatron-core 0.6."""
EXPERT = "{expert}"
"""Stands for the number of the expert in the names of a row."""


@dataclass(frozen=True, slots=True)
class NameRow:
    """One rule of a table; ``hf/tables/llama.toml`` explains the fields."""

    megatron: str
    fused: str | None
    also: tuple[str, ...]
    hf: tuple[str, ...]
    hf_also: tuple[str, ...]
    stacked: str | None
    entries: bool
    packed: int | None
    shape: tuple[str, ...]
    fuse: str | None
    alternate: str | None
    shift: int | None
    swap: bool
    flat: bool
    transposed: bool
    when: frozenset[str]
    tied: str | None
    twin: str | None
    source: str

    @property
    def is_of_expert(self) -> bool:
        """True if every expert has a tensor of this row."""
        return EXPERT in self.megatron


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the settings of experts in ``config.json`` (``hf/tables/llama.toml``).

    Args:
        dense: names that say which layers have no experts.
        shared: names whose product is the size of the shared experts.
        normalized: name that says whether the weights of a token's experts sum up to 1.
        scaling: name of the factor of the experts' output.
        groups: names of the number of groups, and of the number that a token may use.
        method: name that says how experts are chosen, where a family has several ways.
        ranked_by: number of experts whose scores rank a group.
        requires: features of every model with experts, where models of the family may have none.
    """

    dense: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    normalized: str | None = None
    scaling: str | None = None
    groups: tuple[str, ...] = ()
    method: str | None = None
    ranked_by: int = 2
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """The names of multi-token prediction (``hf/tables/llama.toml``).

    Args:
        count: name of the number of its layers in ``config.json``.
        module: beginning of the names beside a layer; ``{layer}`` stands for the number of the
            layer if it is counted on from the decoder's, ``{number}`` for its own.
        layer: beginning of the names within a layer.
        dense: True if its layers have no experts, even where the decoder's last one has.
    """

    count: str = "num_nextn_predict_layers"
    module: str = "model.layers.{layer}."
    layer: str = "model.layers.{layer}."
    dense: bool = False

    def count_layers(self, keys: Collection[str], *, n_layers: int) -> int:
        """Return how many layers have tensors among ``keys``, after ``n_layers`` of the decoder."""
        pattern = re.escape(self.layer)
        pattern = pattern.replace(r"\{layer\}", r"(\d{1,6})").replace(r"\{number\}", r"(\d{1,6})")
        layers = {int(match[1]) for key in keys if (match := re.match(pattern, key)) is not None}
        if "{layer}" in self.layer:
            return len({layer for layer in layers if layer >= n_layers})
        return len(layers)


@dataclass(frozen=True, slots=True)
class Family:
    """The table of one family; ``hf/tables/llama.toml`` explains the fields."""

    model_type: str
    aliases: tuple[str, ...]
    architecture: str
    classifiers: tuple[str, ...]
    bodies: tuple[str, ...]
    layers: str
    inner: int | None
    requires: frozenset[str]
    allows: frozenset[str]
    ignored: tuple[re.Pattern[str], ...]
    absent: tuple[str, ...]
    defaults: Mapping[str, object]
    config: Mapping[str, tuple[str, ...]]
    switches: Mapping[str, str]
    experts: ExpertNames
    settings: Mapping[str, Setting]
    rope: frozenset[str]
    fixed_args: Mapping[str, object]
    fixed_config: Mapping[str, object]
    reasons: Mapping[str, str]
    inert: Mapping[str, str]
    is_detected: bool
    mtp_names: PredictionNames
    implementation: str
    builder: str | None
    differs: str | None
    checked: str
    caution: str | None
    rows: Mapping[str, tuple[NameRow, ...]]

    @property
    def first(self) -> tuple[NameRow, ...]:
        """The rows before the layers."""
        return self.rows["first"]

    @property
    def layer(self) -> tuple[NameRow, ...]:
        """The rows of a layer."""
        return self.rows["layer"]

    @property
    def mtp(self) -> tuple[NameRow, ...]:
        """The rows of a layer of multi-token prediction beside those of a layer."""
        return self.rows["mtp"]

    @property
    def last(self) -> tuple[NameRow, ...]:
        """The rows after the layers."""
        return self.rows["last"]

    @property
    def body(self) -> str:
        """The prefix of all names except the head's, as it is written."""
        return self.bodies[0]

    @property
    def head(self) -> str:
        """The name of the output layer of a model whose embeddings are not shared."""
        rows = (row for row in self.last if row.megatron == "output_layer.weight")
        return next((row.hf[0] for row in rows), "lm_head.weight")

    def notes(self) -> Iterator[str]:
        """Yield what a user must know about weights that go to Megatron or come from it."""
        if self.caution is not None:
            yield f"{self.model_type}: {self.caution}"
        if self.differs is not None:
            yield f"Megatron computes {self.model_type} models differently: {self.differs}"

    def misfits(self, features: frozenset[str]) -> list[str]:
        """Return the features that only the model or only the family has.

        Returns:
            [] if the model is of this family.
        """
        requires = self.requires | (set(self.experts.requires) if "moe" in features else set())
        return sorted((features - requires - self.allows) | (requires - features))


class _Families(Mapping[str, Family]):
    """The families of ``hf/tables``, each in a file of its name, which is read when it is used.

    A family's rows are parsed apart from its other fields, by which it is chosen.
    """

    def __init__(self) -> None:
        self._names = [path.stem for path in sorted(_TABLES.glob("*.toml"))]
        self._parsed: dict[str, Family] = {}

    @override
    def __getitem__(self, name: str) -> Family:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._parsed:
            parts = _PART.split(_text_of(name))
            head = "".join(part for part in parts if not part.startswith(_ROWS))
            self._parsed[name] = _parse_family(
                tomllib.loads(head),
                _RowsBySection(lambda section: _section_of(_table_of(name), section)),
            )
        return self._parsed[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)


class _RowsBySection(Mapping[str, tuple[NameRow, ...]]):
    """The rows of a table by section, each parsed when it is used.

    Args:
        read: returns the entries of a section.
    """

    def __init__(self, read: Callable[[str], list[Mapping[str, Any]]]) -> None:
        self._read = read
        self._parsed: dict[str, tuple[NameRow, ...]] = {}

    @override
    def __getitem__(self, section: str) -> tuple[NameRow, ...]:
        if section not in SECTIONS:
            raise KeyError(section)
        if section not in self._parsed:
            self._parsed[section] = tuple(map(_parse_row, self._read(section)))
        return self._parsed[section]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(SECTIONS)

    @override
    def __len__(self) -> int:
        return len(SECTIONS)


@cache
def families() -> Mapping[str, Family]:
    """Return every supported family by its ``model_type``."""
    return _Families()


@cache
def _text_of(name: str) -> str:
    """Return the content of a file of ``hf/tables``."""
    path = _TABLES / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"rows_of refers to the table {name!r}, which does not exist")
    return path.read_text(encoding="utf-8")


@cache
def _table_of(name: str) -> Mapping[str, Any]:
    """Return the table in a file of ``hf/tables``."""
    return tomllib.loads(_text_of(name))


def find_family(model_type: object) -> Family | None:
    """Return the family of a model type, which may be one of its aliases; None if there is none."""
    if not isinstance(model_type, str):
        return None
    if model_type in families():
        return families()[model_type]
    # Parse only the tables that mention it.
    for name in families():
        if f'"{model_type}"' in _text_of(name) and model_type in families()[name].aliases:
            return families()[name]
    return None


def family_of(model_type: object) -> Family:
    """Return the family of a model type.

    Raises:
        UnsupportedError: the model type is not supported.
    """
    family = find_family(model_type)
    if family is not None:
        return family
    raise UnsupportedError(
        f"models of type {str(model_type)[:80]!r} are not supported",
        hint=f"supported types: {', '.join(families())}",
    )


def family_called(model_type: str) -> Family:
    """Return the family of a model type that a user named.

    Raises:
        UsageError: the model type is not supported.
    """
    try:
        return family_of(model_type)
    except UnsupportedError as err:
        names = [
            name for family in families().values() for name in (family.model_type, *family.aliases)
        ]
        raise UsageError(err.message, hint=did_you_mean(model_type, names) or err.hint) from None


def read_family(path: Path) -> Family:
    """Read the file that describes a user's own family.

    Raises:
        UsageError: the file is not the table of a family.
        CheckpointingException: the file cannot be read.
    """
    with translate_os_errors(str(path), doing="read"):
        data = path.read_bytes()
    return parse_family(data, file=str(path))


def parse_family(data: bytes, *, file: str) -> Family:
    """Parse the table of a user's own family.

    Args:
        data: content of a TOML file with the fields of ``hf/tables/llama.toml``.
        file: name of the file, for errors.

    Raises:
        UsageError: the file is not such a table.
    """
    try:
        table = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise UsageError(f"--family: the file is not valid TOML: {err}", file=file) from None
    for name in sorted(set(table) - _FIELDS):
        raise UsageError(
            f"--family: a family table has no field {name!r}",
            file=file,
            hint=did_you_mean(name, sorted(_FIELDS)) or f"fields: {', '.join(sorted(_FIELDS))}",
        )
    try:
        rows = _RowsBySection(lambda section: _section_of(table, section))
        if not rows["first"]:
            raise ValueError("the table has neither an embedding ([[first]]) nor rows_of")
        return _parse_family(table, {**rows})
    except KeyError as err:
        raise UsageError(f"--family: the field {err} is missing", file=file) from None
    except (AttributeError, TypeError, ValueError, re.error) as err:
        raise UsageError(f"--family: {err}", file=file) from None


def _parse_family(table: Mapping[str, Any], rows: Mapping[str, tuple[NameRow, ...]]) -> Family:
    """Build the family from a table and its rows.

    Raises:
        AttributeError, KeyError, TypeError, ValueError, re.error: it is malformed.
    """
    _check_values(table)
    return Family(
        model_type=table["model_type"],
        aliases=tuple(table.get("aliases", ())),
        architecture=table["architecture"],
        classifiers=tuple(table.get("classifiers", ())),
        bodies=_texts(table.get("body", "model.")),
        layers=table.get("layers", "layers."),
        inner=table.get("inner"),
        requires=frozenset(table["requires"]),
        allows=frozenset(table["allows"]),
        ignored=tuple(map(re.compile, table.get("ignored", ()))),
        absent=tuple(table.get("absent", ())),
        defaults=table.get("defaults", {}),
        config={name: _texts(value) for name, value in table["config"].items()},
        switches=table.get("switches", {}),
        experts=_parse_experts(table.get("experts", {})),
        settings={
            name: Setting(item["name"], item["as"], item.get("every"), item.get("written"))
            for name, item in table.get("settings", {}).items()
        },
        rope=frozenset(table.get("rope", ("linear", "llama3", "yarn"))),
        fixed_args=table["fixed"]["args"],
        fixed_config=table["fixed"]["config"],
        reasons=table.get("reasons", {}),
        inert=table.get("inert", {}),
        is_detected=table.get("detected", True),
        mtp_names=PredictionNames(**table.get("mtp_names", {})),
        implementation=table.get("implementation", DEFAULT_IMPLEMENTATION),
        builder=table.get("builder"),
        differs=table.get("differs"),
        checked=table.get("checked", _checked_with(table)),
        caution=table.get("caution"),
        rows=rows,
    )


def _check_values(table: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that is not of the kind that its field needs."""
    for name in ("model_type", "architecture", "layers"):
        if not isinstance(table.get(name, ""), str):
            raise ValueError(f"{name} is {repr(table[name])[:80]}, not a string")
    inner = table.get("inner", 1)
    if type(inner) is not int or inner < 1:
        raise ValueError(f"inner is {repr(inner)[:80]}, not a positive number")
    if not _texts(table.get("body", "model.")):
        raise ValueError("body is an empty list")
    for name, value in table["config"].items():
        if not _texts(value) and name not in _OPTIONAL_NAMES:
            raise ValueError(
                f"{name} in [config] is an empty list; only {' and '.join(_OPTIONAL_NAMES)} may be "
                "empty"
            )


def _parse_experts(table: Mapping[str, Any]) -> ExpertNames:
    """Build the names for experts from a table's section."""
    lists = {name: _texts(table[name]) for name in _LISTS if name in table}
    return ExpertNames(**{**table, **lists})


def _checked_with(table: Mapping[str, Any]) -> str:
    """Return what the tests compare the logits of a family with, if its table does not say it."""
    model = "megatron-core's model"
    if table.get("builder") is not None:
        return f"{model}, with the builder's modules written for the test"
    if "latent" in table["requires"]:
        return f"{model}, with a plain softmax for its attention core"
    return model


def _section_of(table: Mapping[str, Any], section: str) -> list[Mapping[str, Any]]:
    """Return the rows in a section of a table, with those of the family that it is based on.

    A row replaces the rows with the same ``megatron``, or follows the one that its ``after`` names;
    the rows in ``without`` are left out.

    Raises:
        ValueError: a row has no place, or there is no such family.
    """
    own = list(table.get(section, ()))
    if "rows_of" not in table:
        return own
    without = table.get("without", ())
    result = [
        row
        for row in _section_of(_table_of(table["rows_of"]), section)
        if row["megatron"] not in without
    ]
    if not result:
        return own
    for row in own:
        place = row.get("after", row["megatron"])
        places = [index for index, other in enumerate(result) if other["megatron"] == place]
        if not places:
            raise ValueError(f"{section} has no row named {place}")
        if "after" in row:
            added = {name: value for name, value in row.items() if name != "after"}
            result.insert(places[-1] + 1, added)
        else:
            result[places[0] : places[-1] + 1] = [row]
    return result


def _parse_row(row: Mapping[str, Any]) -> NameRow:
    """Build a rule from an entry of a table.

    Raises:
        ValueError: the entry is malformed, which only an edited package can cause.
    """
    unknown = set(row) - set(NameRow.__slots__)
    if unknown:
        raise ValueError(f"a row has unknown fields: {', '.join(sorted(unknown))}")
    result = NameRow(
        megatron=row["megatron"],
        fused=row.get("fused"),
        also=_texts(row.get("also", ())),
        hf=_texts(row["hf"]),
        hf_also=_texts(row.get("hf_also", ())),
        stacked=row.get("stacked"),
        entries=row.get("entries", False),
        packed=row.get("packed"),
        shape=_texts(row["shape"]),
        fuse=row.get("fuse"),
        alternate=row.get("alternate"),
        shift=row.get("shift"),
        swap=row.get("swap", False),
        flat=row.get("flat", False),
        transposed=row.get("transposed", False),
        when=frozenset(row.get("when", ())),
        tied=row.get("tied"),
        twin=row.get("twin"),
        source=row["source"],
    )
    if len(result.hf) != len(result.shape) or (result.fuse is None) != (len(result.hf) == 1):
        raise ValueError(
            f"the row of {result.megatron} must have one shape per name, and `fuse` if it has "
            "several names"
        )
    return result


def _texts(value: object) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value)  # type: ignore[attr-defined]
