"""Declare the options of a command as the fields of a dataclass.

::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PruneOptions:
        root: Path = argument("ROOT", "Training root.", default=Path())
        keep_last: int | None = OUTPUT.option("--keep-last N", "Keep the newest N.", parser=int)
        yes: bool = OUTPUT.flag("-y, --yes", "Do not ask.")

A declaration names an option as its help page shows it. A command takes one such dataclass, or two;
``accepts`` turns them into the signature that typer reads. Words of long options may be separated
with ``-`` or ``_``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, field, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

from typer import Argument, Option

from ckpt_cli.options.shared.progress import FORMS
from ckpt_cli.options.shared.storage import parse_storage_options
from ckpt_cli.options.shared.values import one_of, parse_memory, whole_number
from ckpt_cli.options.typer_command import HELP_ALL, PANELS, given_words
from core.files.remote_path import RemotePath, is_remote
from core.files.url import refuse_url
from core.values import dataclass

Result = TypeVar("Result")
_DECLARED = "declared"
"""The entry of a field's metadata that holds typer's option or argument."""
_ANNOTATED: Any = Annotated
"""``Any`` for the type checker: the annotations below are built at run time."""
_CHECKPOINTS = frozenset(
    "src dst path paths subject a b against output add_delta lora root".split()
)
"""Fields whose paths may be URLs: they name checkpoints."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A section of a help page, which declares the options below its heading."""

    title: str

    def __post_init__(self) -> None:
        assert self.title in PANELS, f"help pages have no place for {self.title}"

    def option(
        self,
        names: str,
        text: str,
        *,
        parser: Callable[[str], object] | None = None,
        default: object = None,
        envvar: str | None = None,
        hidden: bool = False,
    ) -> Any:
        """Declare an option with a value, as the default of a field.

        Args:
            names: its names and the name of its value: ``-o, --output DST``. Repeatable if the type
                of the field is a list.
            text: the help text, with the default in brackets.
            parser: converts and checks the value; None keeps the text, or makes a path of it if the
                field is a ``Path``.
            default: what the field is if the option is not given.
            envvar: environment variable that replaces an option that is not given.
            hidden: no help page shows it.
        """
        *others, last = names.split(", ")
        name, _, metavar = last.partition(" ")
        declared = Option(
            *others,
            name,
            metavar=metavar or None,
            parser=parser,
            envvar=envvar,
            hidden=hidden,
            rich_help_panel=self.title,
            show_default=False,
            show_envvar=False,
            help=text,
        )
        return field(default=default, metadata={_DECLARED: declared})

    def flag(self, names: str, text: str, *, default: bool | None = False) -> Any:
        """Declare an option without a value; ``--tree/--flat`` has a name for either answer."""
        return self.option(names, text, default=default)


MERGE = Panel("Merge")
CHECKS = Panel("Checks")
OUTPUT = Panel("Output")
LAYOUT = Panel("Layout")
CONTENT = Panel("Content")
ENGINE = Panel("Engine")
MESSAGES = Panel("Messages")
WORKERS = Panel("Workers")
HOSTS = Panel("Hosts")
FAILURES = Panel("Failures")
LOGS = Panel("Logs")
OPTIONS = Panel("Options")
"""The only section of the commands with few options."""


def argument(
    metavar: str,
    text: str,
    *,
    parser: Callable[[str], object] | None = None,
    default: object = MISSING,
) -> Any:
    """Declare an argument, as the default of a field; it is required without a default."""
    declared = Argument(metavar=metavar, parser=parser, help=text)
    return field(default=default, metadata={_DECLARED: declared})


# Options that several commands share, each in the panel that the command gives.


def iteration_option(panel: Panel) -> Any:
    """Declare ``--iteration``."""
    return panel.option(
        "--iteration N",
        "Iteration to read from a training root. [tracked or newest]",
        parser=whole_number(0),
    )


def threads_option(
    text: str = "Number of reader threads. [one per core]", panel: Panel = ENGINE
) -> Any:
    """Declare ``--threads``.

    Args:
        text: help text: what the threads do, and their default number.
    """
    return panel.option("-j, --threads N", text, parser=whole_number(1, 64))


def memory_option(panel: Panel = ENGINE, *, text: str = "Memory limit.") -> Any:
    """Declare ``--memory``.

    Args:
        text: help text: what the limit is of; the default is added.
    """
    default = "[a quarter of the machine's memory, at least 512MiB]"
    return panel.option("--memory SIZE", f"{text} {default}", parser=parse_memory)


def report_option(text: str, panel: Panel = OPTIONS) -> Any:
    """Declare ``--report`` of a command that writes a report in HTML only.

    Args:
        text: help text: the content of the report.
    """
    return panel.option("--report FILE", text)


def rules_option() -> Any:
    """Declare ``--rules``."""
    return LAYOUT.option(
        "--rules FILE.toml", "Extra layout rules, tried before the built-in rules."
    )


def no_optim_flag() -> Any:
    """Declare ``--no-optim``."""
    return CONTENT.flag("--no-optim", "Drop the optimizer state.")


def missing_chunks_option(panel: Panel) -> Any:
    """Declare ``--missing-chunks``."""
    return panel.option(
        "--missing-chunks fill|error",
        "For missing Zarr chunks: use the fill value if the writer omits such chunks, or fail. "
        "[fill]",
        parser=one_of("fill", "error"),
    )


def storage_option(panel: Panel = MESSAGES) -> Any:
    """Declare ``--storage-option``, for commands that read URLs."""
    return panel.option(
        "--storage-option KEY=VALUE",
        "Object store setting for URLs, such as endpoint=URL or region=NAME; repeatable.",
    )


def progress_option(
    panel: Panel = MESSAGES,
    text: str = "Progress on stderr: a bar, lines for a log, or none. "
    "[auto: bar on a terminal, else log]",
) -> Any:
    """Declare ``--progress``, for commands that take long."""
    return panel.option(f"--progress {'|'.join(FORMS)}", text, parser=one_of(*FORMS))


def json_flag(panel: Panel = MESSAGES) -> Any:
    """Declare ``--json``."""
    return panel.flag("--json", "Print one JSON object.")


def no_pager_flag(panel: Panel = MESSAGES) -> Any:
    """Declare ``--no-pager``."""
    return panel.flag("--no-pager", "Print long output directly, without a pager.")


def debug_flag(panel: Panel = MESSAGES) -> Any:
    """Declare ``--debug``."""
    return panel.flag("--debug", "Print a traceback on errors.")


WORDS = "words"
"""The field of a command's options that is not an option: the words of the command line."""


class _LazyCommand(Generic[Result]):
    """A typer command that calls a function with values of option classes.

    typer asks for the signature when it makes the command, which imports the classes; of all the
    commands only the one that runs is made.

    Args:
        body: the function, which takes a value of each class.
        classes: module below ``ckpt_cli.options`` and name of each class, with a dot between.
        without: names of fields that keep their defaults and are no options of this command.
    """

    def __init__(
        self, body: Callable[..., Result], classes: Sequence[str], *, without: Collection[str]
    ) -> None:
        self._body, self._classes, self._without = body, classes, without
        # typer reads a command's name and help text from the function itself, and its annotations
        # before those of the signature.
        self.__name__, self.__doc__ = body.__name__, body.__doc__
        self.__annotations__: dict[str, object] = {}

    @cached_property
    def _hints(self) -> dict[type, dict[str, object]]:
        """The annotations of the fields of each class."""
        hints = {}
        for name in self._classes:
            module_name, _, class_name = name.partition(".")
            kind = getattr(import_module(f"ckpt_cli.options.{module_name}"), class_name)
            hints[kind] = get_type_hints(kind)
        return hints

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature that typer reads: a keyword for each option."""
        # Of two fields with one name, the first is the option; its value is that of both.
        parameters: dict[str, inspect.Parameter] = {}
        for kind, hints in self._hints.items():
            for option in fields(kind):
                if option.name == WORDS or option.name in self._without:
                    continue
                default = inspect.Parameter.empty if option.default is MISSING else option.default
                annotation = _ANNOTATED[hints[option.name], option.metadata[_DECLARED]]
                parameter = _keyword(option.name, annotation, default=default)
                parameters.setdefault(option.name, parameter)
        parameters["help_all"] = _keyword("help_all", Annotated[bool, HELP_ALL], default=False)
        return inspect.Signature([*parameters.values()])

    def __call__(self, *, help_all: bool = False, **values: Any) -> Result:
        """Call the function; ``help_all`` is False, as its callback prints the page and exits."""
        # Checkpoints to read may be URLs. Everything else is local, and is refused here: for
        # Python, Path("s3://bucket/x") is a local path.
        urls: list[RemotePath] = []
        for name, value in values.items():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if is_remote(item) and name in _CHECKPOINTS:
                    urls.append(item)
                elif isinstance(item, Path):
                    refuse_url(item)
        texts = values.get("storage_option") or ()
        if "storage_option" in values and (urls or texts):
            from core.files.object_client import limit_requests, set_storage_options

            set_storage_options(parse_storage_options(texts, schemes={u.scheme for u in urls}))
            limit_requests(values.get("threads"))
        values[WORDS] = given_words()
        return self._body(
            *(
                kind(**{name: values[name] for name in hints if name in values})
                for kind, hints in self._hints.items()
            )
        )


def _keyword(name: str, annotation: object, *, default: object) -> inspect.Parameter:
    """Return a keyword-only parameter of a signature."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def accepts(
    *classes: str, without: Collection[str] = ()
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator that turns a function of values of option classes into a typer command.

    Args:
        classes: dataclasses of declarations, as names below ``ckpt_cli.options``, such as
            ``diff.DiffOptions``; they are imported when the command is used. The function takes a
            value of each.
        without: names of fields that keep their defaults and are no options of this command.
    """
    return lambda body: _LazyCommand(body, classes, without=without)
