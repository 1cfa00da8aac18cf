"""Options that several commands share; each declares them in its own panel."""

from __future__ import annotations

from typing import Any

from ckpt_cli.options.declaration import CONTENT, ENGINE, LAYOUT, MESSAGES, OPTIONS, Panel
from ckpt_cli.options.shared.progress import FORMS
from ckpt_cli.options.shared.values import one_of, parse_size, whole_number


def iteration_option(panel: Panel) -> Any:
    """Declare ``--iteration``."""
    return panel.option(
        "--iteration N",
        "Iteration to read, in a training root. [the tracker's, else the newest]",
        parser=whole_number(0),
    )


def threads_option(
    text: str = "Number of reading threads. [one per core]", panel: Panel = ENGINE
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
    default = "[a quarter of the machine's, at least 512MiB]"
    return panel.option("--memory SIZE", f"{text} {default}", parser=parse_size)


def report_option(text: str, panel: Panel = OPTIONS) -> Any:
    """Declare ``--report`` of a command that writes a report in HTML only.

    Args:
        text: help text: the content of the report.
    """
    return panel.option("--report FILE", text)


def rules_option() -> Any:
    """Declare ``--rules``."""
    return LAYOUT.option("--rules FILE.toml", "Extra layout rules, tried before the built-in ones.")


def no_optim_flag() -> Any:
    """Declare ``--no-optim``."""
    return CONTENT.flag("--no-optim", "Drop the optimizer state.")


def missing_chunks_option(panel: Panel) -> Any:
    """Declare ``--missing-chunks``."""
    return panel.option(
        "--missing-chunks fill|error",
        "Missing zarr chunks: use the fill value if their writer omits such chunks, or fail. "
        "[fill]",
        parser=one_of("fill", "error"),
    )


def storage_option(panel: Panel = MESSAGES) -> Any:
    """Declare ``--storage-option``, for commands that read URLs."""
    return panel.option(
        "--storage-option KEY=VALUE",
        "Setting of the object store of a URL, such as endpoint=URL or region=NAME; repeatable.",
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
    return panel.flag("--no-pager", "Print a long page at once, not through a pager.")


def debug_flag(panel: Panel = MESSAGES) -> Any:
    """Declare ``--debug``."""
    return panel.flag("--debug", "Print a traceback on errors.")
