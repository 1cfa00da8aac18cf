"""A typer command with a quicker start and a help page with sections.

Help pages are written without rich, and values are converted without pydantic, which typer 0.29 imports for it: each
would double the start-up time. Options convert and check their values themselves (``parser=``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

PANELS = ("Checks", "Output", "Layout", "Content", "Engine", "Messages")
"""Sections of a help page; options without one come first."""
LAUNCH_PANELS = ("Workers", "Hosts", "Failures", "Logs")
"""Those of ``ckpt launch``."""


class Command(TyperCommand):
    """See the module's docstring. (typer takes a class here; there is no other seam.)"""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with our conversion in place of pydantic's."""
        return _quick(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; an argument that is described by several words stands as it is."""
        described = {f"[{one.metavar}]...": one.metavar for one in self.get_params(ctx) if " " in (one.metavar or "")}
        return [described.get(piece, piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, then options by section."""
        sections: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            **{name: [] for name in PANELS + LAUNCH_PANELS},
        }
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            names, text = record
            if param.param_type_name == "argument":
                sections["Arguments"].append((param.metavar or names, text))
            else:
                panel = getattr(param, "rich_help_panel", None) or "Options"
                sections[panel].append((_one_name(param, names), text))
        if sections["Messages"]:
            sections["Messages"] += sections.pop("Options")  # there is only --help
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows, col_max=24)


class Group(TyperGroup):
    """The root command, for the same reason."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As in ``Command``."""
        return _quick(super().get_params(ctx))


def _quick(params: list[Any]) -> list[Any]:
    """The parameters without pydantic; typer versions before 0.29 have none to replace."""
    for param in params:
        if hasattr(param, "_runtime_param"):
            param._runtime_param = _Conversion(param.type_descriptor)
    return params


class _Conversion:
    """Values of one parameter, converted by its ``parser`` or, for text and paths, its type.

    Args:
        descriptor: typer's description of the parameter.
    """

    def __init__(self, descriptor: Any) -> None:
        self._parser = descriptor.parameter_info.parser
        self._is_path = descriptor.annotation is Path

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The parameter's value; typer calls this with text, a list of texts, or a default."""
        is_several = param.multiple or param.nargs == -1
        if value is None:
            return () if is_several else None
        if self._parser is None:
            return Path(value) if self._is_path else value
        try:
            return [self._parser(item) for item in value] if is_several else self._parser(value)
        except BadParameter as err:
            err.param, err.ctx = param, ctx
            raise


def _one_name(param: Any, shown: str) -> str:
    """The option as the page shows it: its short name and the first long one; aliases are told in the epilogue."""
    if param.is_flag:
        return shown
    long = next(name for name in param.opts if name.startswith("--"))
    short = next((name for name in param.opts if not name.startswith("--")), None)
    return f"{f'{short}, ' if short else ''}{long} {param.metavar or ''}".rstrip()
