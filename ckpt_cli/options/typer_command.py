"""Typer commands that start faster and have two help pages, a short and a complete one.

Help pages are written without rich, and values are converted without pydantic, which typer 0.29
imports for that: each would double the start-up time. Instead, every option that needs more than
text, a path or a flag has a ``parser=``, which converts and checks its values.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import BadParameter, Context, Exit, Option
from typer.core import TyperCommand, TyperGroup

from ckpt_cli.screen.terminal import screen_of
from core.errors import UsageError, did_you_mean
from core.files.remote_path import location_of

if TYPE_CHECKING:
    from ckpt_cli.screen.help_page import HelpPage, Section

PANELS = (
    "Options",
    "Merge",
    "Checks",
    "Output",
    "Layout",
    "Content",
    "Engine",
    "Messages",
    "Workers",
    "Hosts",
    "Failures",
    "Logs",
)
"""Sections of help pages, in their order; options without one are in the first."""

_GIVEN_WORDS: ContextVar[tuple[str, ...]] = ContextVar("given_words", default=())


def given_words() -> tuple[str, ...]:
    """Return the words of the command line that is being parsed, ``ckpt`` and COMMAND first."""
    return _GIVEN_WORDS.get()


class _Pages:
    """The two help pages of a command: the short one of ``--help``, and all of ``--help-all``.

    typer takes a class for a command and offers no other way to change its behaviour.
    """

    def get_params(self: Any, ctx: Any) -> list[Any]:
        """Return the parameters, converted by their own parsers instead of pydantic."""
        return _without_pydantic(super().get_params(ctx))  # type: ignore[misc]

    def get_help(self: Any, ctx: Any) -> str:
        """Return the short page for stdout; typer calls this method for ``--help``."""
        screen = screen_of(sys.stdout)
        ctx.color = screen.has_color  # or typer removes the colours that FORCE_COLOR asks for
        return short_page(self, ctx).text(screen)


class Command(_Pages, TyperCommand):
    """A subcommand of ``ckpt``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's own words, and keep them for ``given_words``."""
        _GIVEN_WORDS.set((*ctx.command_path.split(), *args))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line.

        A metavar of several words gets no brackets, one with "…" no further dots.
        """
        # typer writes a required argument as "{METAVAR}", a repeatable one as "[METAVAR]...".
        metavars = {}
        for metavar in (param.metavar or "" for param in self.get_params(ctx)):
            metavars[f"{{{metavar}}}"] = metavar
            if "…" in metavar:
                metavars[f"{{{metavar}}}..."] = metavar
                metavars[f"[{metavar}]..."] = metavar if " " in metavar else f"[{metavar}]"
        return [metavars.get(piece, piece) for piece in super().collect_usage_pieces(ctx)]


class Group(_Pages, TyperGroup):
    """The root command ``ckpt``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return name, command and arguments of the command that the first word names.

        Raises:
            UsageError: there is no such command; the hint is the one that was probably meant.
        """
        from ckpt_cli.screen.other_tools import COMMAND_HINTS

        name = args[0].lower().replace("_", "-")
        if name not in self.commands and not name.startswith("-"):
            hint = COMMAND_HINTS.get(name) or did_you_mean(name, self.commands)
            raise UsageError(
                f"no such command: {args[0] or repr('')}", hint=hint or "see ckpt --help"
            )
        return super().resolve_command(ctx, args)


def short_page(command: Any, ctx: Any) -> HelpPage:
    """Return the page of ``--help``: examples and the options used most."""
    from ckpt_cli.options.short_help import SHORT_HELP, documentation_of
    from ckpt_cli.screen.help_page import HelpPage, Section

    name = _name_of(command)
    short_help = SHORT_HELP[name]
    params = {long: param for param in command.get_params(ctx) for long in param.opts}
    options = [params[option] for option in (*short_help.options, "--help")]
    sections = [
        *_argument_sections(command, ctx),
        *_command_sections(command),
        Section("Options", [_row(param, ctx) for param in options]),
    ]
    every_option = "ckpt COMMAND --help-all" if name == "ckpt" else f"ckpt {name} --help-all"
    return HelpPage(
        ctx.command_path,
        command.collect_usage_pieces(ctx),
        _paragraphs(command.help),
        short_help.examples,
        sections,
        (),
        (
            *([("Errors", "ckpt explain CODE, 'TEXT' or PATH")] if name == "ckpt" else ()),
            ("All options", every_option),
            ("Documentation", documentation_of(name)),
        ),
    )


def full_page(command: Any, ctx: Any) -> HelpPage:
    """Return the page of ``--help-all``: every option, by section."""
    from ckpt_cli.options.short_help import documentation_of
    from ckpt_cli.screen.help_page import HelpPage, Section

    panels: dict[str, list[tuple[str, str]]] = {name: [] for name in PANELS}
    for param in command.get_params(ctx):
        if param.param_type_name == "option" and not param.hidden:
            panel = getattr(param, "rich_help_panel", None) or "Options"
            panels[panel].append(_row(param, ctx))
    # Options without a section (--help) join the last one; inspect has no sections.
    if panels["Messages"]:
        panels["Messages"] += panels.pop("Options")
    sections = [
        *_argument_sections(command, ctx),
        *_command_sections(command),
        *(Section(heading, rows) for heading, rows in panels.items() if rows),
    ]
    return HelpPage(
        ctx.command_path,
        command.collect_usage_pieces(ctx),
        _paragraphs(command.help),
        (),
        sections,
        _paragraphs(command.epilog),
        (("Documentation", documentation_of(_name_of(command))),),
    )


def show_all_options(ctx: Context, is_given: bool) -> None:
    """Print the complete help page and exit, if ``--help-all`` is given."""
    if is_given and not ctx.resilient_parsing:
        print(full_page(ctx.command, ctx).text(screen_of(sys.stdout)))
        raise Exit


HELP_ALL = Option(
    "--help-all",
    is_eager=True,
    callback=show_all_options,
    show_default=False,
    help="Show all options and exit.",
)
"""The option ``--help-all`` of every command."""


def _name_of(command: Any) -> str:
    """Return the key of a command in ``SHORT_HELP``."""
    return command.name or "ckpt"


def _paragraphs(text: str | None) -> list[str]:
    """Return the paragraphs of a docstring or an epilogue."""
    return [part for part in (text or "").split("\n\n") if part.strip()]


def _argument_sections(command: Any, ctx: Any) -> list[Section]:
    """Return the section of the arguments, or none for a command without arguments."""
    from ckpt_cli.screen.help_page import Section

    params = [param for param in command.get_params(ctx) if param.param_type_name == "argument"]
    rows = [(param.metavar, param.get_help_record(ctx)[1]) for param in params]
    return [Section("Arguments", rows)] if rows else []


def _command_sections(command: Any) -> list[Section]:
    """Return the section of the subcommands, or none for a command without any."""
    from ckpt_cli.screen.help_page import Section

    commands = getattr(command, "commands", {})
    rows = [(name, child.short_help) for name, child in commands.items() if not child.hidden]
    return [Section("Commands", rows)] if rows else []


def _row(param: Any, ctx: Any) -> tuple[str, str]:
    """Return an option's short name, first long name and metavar without its aliases, and its text.

    The epilogue of a full page mentions the aliases.
    """
    all_names, text = param.get_help_record(ctx)
    if param.is_flag:
        return all_names, text
    long = next(name for name in param.opts if name.startswith("--"))
    short = next((name for name in param.opts if not name.startswith("--")), None)
    return f"{f'{short}, ' if short else ''}{long} {param.metavar or ''}".rstrip(), text


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
        self._is_path = descriptor.annotation in (Path, list[Path])

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text, a list of texts or a default; typer calls this method by its name.

        Raises:
            UsageError: the parser refuses a text; the error names the option.
        """
        is_repeatable = param.multiple or param.nargs == -1
        if value is None:
            return () if is_repeatable else None
        parse = self._parser or (location_of if self._is_path else None)
        if parse is None:
            return value
        try:
            return [parse(item) for item in value] if is_repeatable else parse(value)
        except (UsageError, BadParameter) as err:
            if self._parser is None:
                raise  # the message names the URL
            name = next((name for name in param.opts if name.startswith("--")), param.metavar)
            raise UsageError(
                f"invalid value for '{name}': {err.message}",
                hint=getattr(err, "hint", None) or f"see {ctx.command_path} --help",
            ) from err
