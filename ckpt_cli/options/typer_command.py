"""A typer command that starts faster and groups its options into sections on the help page.

Help pages are written without rich, and values are converted without pydantic, which typer 0.29
imports for that: each would double the start-up time. Instead, every option that needs more than
text, a path or a flag has a ``parser=``, which converts and checks its values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from core.errors import UsageError

PANELS = ("Checks", "Output", "Layout", "Content", "Engine", "Messages")
"""Sections of a help page; options without one come first."""
LAUNCH_PANELS = ("Workers", "Hosts", "Failures", "Logs")
"""Sections of the help page of ``ckpt launch``."""


class Command(TyperCommand):
    """A subcommand of ``ckpt``.

    typer takes a class here and offers no other way to change its behaviour.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, converted by their own parsers instead of pydantic."""
        return _without_pydantic(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line.

        A metavar of several words gets no brackets and dots.
        """
        # click writes every repeatable argument as "[METAVAR]..."; ours contain their own "…".
        metavars = {
            f"[{p.metavar}]...": p.metavar for p in self.get_params(ctx) if " " in (p.metavar or "")
        }
        return [metavars.get(piece, piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by section."""
        # Collect the rows of every section in the order of the page.
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
                sections[panel].append((_shown_names(param, names), text))
        # Options without a section (only --help) join the last one; inspect has no sections.
        if sections["Messages"]:
            sections["Messages"] += sections.pop("Options")
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows, col_max=24)


class Group(TyperGroup):
    """The root command ``ckpt``, which also starts without pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, converted by their own parsers instead of pydantic."""
        return _without_pydantic(super().get_params(ctx))


def _without_pydantic(params: list[Any]) -> list[Any]:
    """Return the parameters with pydantic's conversion replaced.

    Versions of typer before 0.29 have none to replace.
    """
    for param in params:
        if hasattr(param, "_runtime_param"):
            param._runtime_param = _ValueConverter(param.type_descriptor)
    return params


class _ValueConverter:
    """Converts the values of one parameter with its ``parser`` or, for text and paths, by its type.

    Args:
        descriptor: typer's description of the parameter.
    """

    def __init__(self, descriptor: Any) -> None:
        self._parser = descriptor.parameter_info.parser
        self._is_path = descriptor.annotation is Path

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text, a list of texts or a default; typer calls this method by its name.

        Raises:
            UsageError: the parser refuses a text; the error names the option.
        """
        is_repeatable = param.multiple or param.nargs == -1
        if value is None:
            return () if is_repeatable else None
        if self._parser is None:
            return Path(value) if self._is_path else value
        try:
            return [self._parser(item) for item in value] if is_repeatable else self._parser(value)
        except (UsageError, BadParameter) as err:
            name = next((name for name in param.opts if name.startswith("--")), param.metavar)
            raise UsageError(
                f"invalid value for '{name}': {err.message}",
                hint=getattr(err, "hint", None) or f"see {ctx.command_path} --help",
            ) from err


def _shown_names(param: Any, all_names: str) -> str:
    """Return an option's short name, first long name and metavar, without its aliases.

    The epilogue of a help page mentions the aliases.
    """
    if param.is_flag:
        return all_names
    long = next(name for name in param.opts if name.startswith("--"))
    short = next((name for name in param.opts if not name.startswith("--")), None)
    return f"{f'{short}, ' if short else ''}{long} {param.metavar or ''}".rstrip()
