"""What messages tell users to say exists, can be parsed, and works.

Every text of ``core`` and ``ckpt_cli`` that names a command or an option is collected from the
source. A command must be one of ``ckpt``'s; an option must exist on the command that is named with
it, or on some command if none is named; a value behind it must be one that the option takes. Other
programs' options stand in an explicit table.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from ckpt_cli.app import app, main, parse_command
from ckpt_cli.options.typer_command import Group
from ckpt_cli.options.worker import USAGE
from core.arrays.dtypes import dtype_of
from core.engine.changes.quantize import KINDS
from core.formats.registry import format_called
from core.verbs.checks.finding import codes

ROOT = Path(__file__).resolve().parents[2]
HOLE = "\N{REPLACEMENT CHARACTER}"
"""Stands for what an f-string fills in."""
DECLARATIONS = re.compile(r"(^|/)(options/[a-z_]+|other_tools)\.py$")
"""Where names of options are declared, ours and those of other programs that are answered."""
OPTION = re.compile(r"(?<![\w/.-])--([a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)(?![\w-]*\*)")
COMMAND = re.compile(rf"\bckpt ([a-z][a-z-]*|{HOLE})((?: [^,;:()\"`{HOLE}]*)?)")
PROSE = frozenset(
    {
        "wrote",
        "runs",
        "read",
        "ignores",
        "converts",
        "uses",
        "recognizes",
        "supports",
        "found",
        "is",
        "writes",
        "reads",
        "command",
        "needs",
        "as",
        "report",
        "does",
        "knows",
        "can",
        "cannot",
        "checkpoint",
        "also",
        "carries",
        "could",
        "has",
        "named",
        "removes",
        "replaces",
        "was",
        "would",
    }
)
"""Words that follow the program's name in sentences about it."""
FOREIGN: Mapping[str, str] = {
    "bucket": "aws",
    "prefix": "aws",
    "no-load-rng": "Megatron-LM",
    "override-opt_param-scheduler": "Megatron-LM",
    "use-distributed-optimizer": "Megatron-LM",
    "no-load-optim": "Megatron-LM",
    "verify-integrity": "Megatron-LM",
    "fp8-param-gather": "Megatron-LM",
    "moe-grouped-gemm": "Megatron-LM",
    "moe-router-num-groups": "Megatron-LM",
    "no-bias-gelu-fusion": "Megatron-LM",
    "no-use-layer-wise-param-layout": "Megatron-LM",
    "use-precision-aware-optimizer": "Megatron-LM",
    "bf16": "Megatron-LM",
    "fp16": "Megatron-LM",
    "moe-use-legacy-grouped-gemm": "Megatron-LM",
    "load": "Megatron-LM",
    "ckpt-format": "Megatron-LM",
    "use-megatron-fsdp": "Megatron-LM",
    "decoder": "Megatron-LM: --decoder-first-pipeline-num-layers and --decoder-last-…",
    "standalone-embedding-stage": "Megatron-LM",
    "schedules-method": "MindSpeed",
    "num-layers-per-virtual-pipeline-stage": "Megatron-LM",
    "num-virtual-stages-per-pipeline-rank": "Megatron-LM",
    "dist-ckpt-optim-fully-reshardable": "Megatron-LM",
    "convert_to_full_state": "neuronx-distributed",
    "load-format": "vLLM, SGLang",
    "local-dir": "hf download",
    "recursive": "gcloud storage rsync, azcopy copy",
}
"""Options of other programs that messages name → whose they are."""
PROGRAM = frozenset({"version", "install-completion", "show-completion"})
"""Options of ``ckpt`` itself, before any command."""
WORKER = frozenset(OPTION.findall(USAGE))
"""Options of ``python -m ckpt_cli.worker``, which is no command of ``ckpt``."""


OTHER_PROGRAMS = (
    "core/version.py",
    "ckpt_cli/worker.py",
    "ckpt_cli/workers/device.py",
    "ckpt_cli/completion/shell.py",
    "core/verbs/convert/report/checkpoint_args.py",
)
"""Modules whose texts are a program's of its own, another program's, or lines for a shell."""


@dataclass(frozen=True)
class Text:
    """A string of the source.

    Args:
        place: file and line.
        value: it, with ``HOLE`` for what an f-string fills in.
    """

    place: str
    value: str


@cache
def texts() -> tuple[Text, ...]:
    """Return every string of the program that names a command or an option; no docstrings."""
    collected = []
    for path in [
        *sorted((ROOT / "core").rglob("*.py")),
        *sorted((ROOT / "ckpt_cli").rglob("*.py")),
    ]:
        place = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        if "--" not in source and "ckpt " not in source:
            continue
        for line, value in strings_of(ast.parse(source)):
            is_declared = DECLARATIONS.search(place) and re.fullmatch(
                r"-\S+(?:,? -\S+)*(?: \S+)?", value
            )
            if (OPTION.search(value) or COMMAND.search(value)) and not is_declared:
                collected.append(Text(f"{place}:{line}", value))
    return tuple(collected)


def strings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, value) of the strings of a module; statements that are only a string are
    documentation.
    """
    nodes = list(ast.walk(tree))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            ]
            yield node.lineno, "".join(parts)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield node.lineno, node.value


@cache
def params_of() -> dict[str, dict[str, Any]]:
    """Return the options of each command: name without dashes → typer's parameter."""
    group = get_command(app)
    assert isinstance(group, Group)
    return {"help": {}} | {
        name: {
            option.lstrip("-"): param
            for param in command.params
            for option in (*param.opts, *param.secondary_opts)
        }
        | {"help": None, "help-all": None}
        for name, command in group.commands.items()
    }


def verbs_with(option: str) -> list[str]:
    return [verb for verb, params in params_of().items() if option.replace("_", "-") in params]


def named_verbs(text: str) -> Iterator[tuple[str, str]]:
    """Yield (command, the words after it) for each command of ours that a text names."""
    for verb, rest in COMMAND.findall(text):
        if verb not in PROSE and verb != HOLE:
            yield verb, rest


def test_texts_are_collected_from_all_over_the_program() -> None:
    places = {text.place.partition(":")[0] for text in texts()}
    assert len(places) > 90
    assert any("with --no-optim" in text.value for text in texts())
    assert any(text.value == "list the keys with: ckpt inspect SRC --flat" for text in texts())


def test_commands_and_options_in_messages_exist() -> None:
    problems = [problem for text in texts() for problem in missing_names(text)]
    assert problems == []


def missing_names(text: Text) -> Iterator[str]:
    """Yield what is wrong with the names of commands and options in a text."""
    if text.place.startswith(OTHER_PROGRAMS):
        return
    for verb, rest in named_verbs(text.value):
        if verb not in params_of():
            yield f"{text.place}: there is no command ckpt {verb}"
            continue
        for option in OPTION.findall(rest.partition(" -- ")[0] if verb == "launch" else rest):
            if option not in params_of()[verb]:
                yield f"{text.place}: ckpt {verb} has no option --{option}"
    for option in OPTION.findall(text.value):
        if not (verbs_with(option) or option in WORKER or option in FOREIGN or option in PROGRAM):
            yield f"{text.place}: no command has --{option}"


VALUES: Mapping[str, str] = {
    "to": "dcp",
    "format": "json",
    "names": "hf",
    "dtype": "bf16",
    "dequantize": "bf16",
    "quantize": "block",
    "rename": "a=b",
    "tie": "a=b",
    "untie": "a=b",
    "max-shard-size": "1GB",
    "memory": "1GB",
    "plan-for": "tp=2",
    "nnodes": "1:2",
    "rdzv-conf": "timeout=5",
    "rdzv-backend": "c10d",
    "megatron-version": "0.16",
    "transformer-impl": "local",
    "unknown": "refuse",
    "ignore": "CK1",
    "experts": "sequential",
    "storage-option": "region=x",
}
"""Values of options, where a message names none or a placeholder."""
CHECKED_VALUES: Mapping[str, Callable[[str], object]] = {
    "to": lambda value: format_called(value).lay_out or pytest.fail(f"{value} is not written"),
    "dequantize": dtype_of,
    "dtype": lambda value: dtype_of(value.rpartition("=")[2]),
    "quantize": lambda value: (*KINDS, "none").index(value.rpartition("=")[2]),
}
"""Options whose values the engine looks at, after parsing."""
TAKES_WORDS = frozenset(
    {*CHECKED_VALUES, "rng", "on-replica-mismatch", "unknown", "names", "device", "backend", "bind"}
)
SENTENCES = re.compile(
    r"a|alone|and|at|does|for|go|has|have|in|is|makes|needs|or|out|stay|the|what|where|with|would"
)
"""Words that follow an option in a sentence, and are no value of it."""


def test_options_in_messages_parse_with_the_values_that_are_named() -> None:
    n_lines = 0
    parsed = set()
    for text in texts():
        for line in lines_of(text):
            n_lines += 1
            if tuple(line) in parsed:
                continue  # another text says the same
            parsed.add(tuple(line))
            try:
                assert callable(parse_command(line))
            except Exception as err:
                pytest.fail(f"{text.place}: {' '.join(line)}: {err}")
    assert n_lines > 400


def lines_of(text: Text) -> Iterator[list[str]]:
    """Yield a command line for every option that a text names."""
    verbs = [verb for verb, _ in named_verbs(text.value)]
    for match in OPTION.finditer(text.value):
        option = match[1].replace("_", "-")
        verb = next(
            iter([verb for verb in verbs if option in params_of()[verb]] or verbs_with(option)),
            None,
        )
        param = None if verb is None else params_of()[verb][option]
        if verb is None or param is None:
            continue  # another program's, or --help
        word = re.match(r"[ =]'?([\w.*=-]+)", text.value[match.end() :])
        value = (
            None if param.is_flag else value_of(option, word[1].rstrip(".") if word else "", param)
        )
        named = [f"--{option}", *([] if value is None else [value])]
        if value is not None and option in CHECKED_VALUES:
            CHECKED_VALUES[option](value)
        yield (
            [verb, *named, "validate", "a"]
            if verb == "launch"
            else [verb, *["a"] * (1 + (verb == "diff")), *named]
        )


def value_of(option: str, word: str, param: Any) -> str:
    """Return the value that a text names for an option, or a sample where that is a placeholder or
    no value.
    """
    is_value = (
        bool(word)
        and HOLE not in word
        and word.upper() != word
        and SENTENCES.fullmatch(word) is None
    )
    if (is_value and option in TAKES_WORDS) or re.fullmatch(r"\d[\w.]*", word):
        return word
    return VALUES.get(option) or (
        param.metavar.rpartition("|")[2] if "|" in (param.metavar or "") else "1"
    )


@dataclass(frozen=True)
class Refusal:
    """A command that is refused, and the part of its hint that makes it work.

    Args:
        words: the command line; ``SRC``, ``DST`` and ``FOLDER`` stand for paths.
        advice: words of the message that are to be added.
        source: the checkpoint, in tests/golden, or the name of one that is made.
        replaces: word of the line that the advice takes the place of; None to append it.
    """

    words: str
    advice: str
    source: str
    replaces: str | None = None


REFUSALS = (
    Refusal("reshard SRC DST --tp 2", "--tp-new 2", "mcore_legacy/dense_gqa/tp2_pp2"),
    Refusal("reshard SRC DST", "--tp-new 4 --pp-new 2", "mcore_legacy/dense_gqa/tp2_pp2"),
    Refusal(
        "convert SRC DST --to safetensor",
        "safetensors",
        "torch_dcp/tp2_only",
        replaces="safetensor",
    ),
    Refusal("convert SRC DST --to deepspeed_universal", "--no-optim", "torch_dcp/fsdp2_dp2"),
    Refusal(
        "convert SRC DST --to deepspeed_universal",
        "--dtype float32",
        "mcore_legacy/dense_gqa/tp2_pp2",
    ),
    Refusal(
        "convert SRC DST --to dcp --tp-new 2",
        "--to megatron",
        "mcore_legacy/dense_gqa/tp2_pp2",
        "--to dcp",
    ),
    Refusal("convert SRC DST --to dcp", "--drop-unknown", "unknown class"),
    Refusal("convert SRC DST --to dcp", "--exclude", "sparse"),
    Refusal("convert SRC DST --to torch", "--exclude s", "an object that calls"),
    Refusal("convert SRC DST --to torch", "--exclude s", "a tensor's attribute that calls"),
    Refusal("convert SRC DST --to megatron", "--dequantize bf16", "float8"),
    Refusal("convert SRC DST --to dcp", "FOLDER/last.ckpt", "loose", "SRC"),
    Refusal(
        "validate SRC --ignore CK199", "ckpt validate --list-checks", "torch_dcp/tp2_only", "*"
    ),
    Refusal("inspect SRC no.such", "ckpt inspect SRC --flat", "torch_dcp/tp2_only", "*"),
    Refusal("inspect SRC", "iter_0000010", "tracker", "SRC"),
    Refusal("convert SRC DST --to dcp", "--force", "existing"),
    Refusal("manifest SRC", "--force", "manifest"),
    Refusal("manifest SRC", "ckpt validate", "manifest", "manifest"),
)
COMPLETED = {"--exclude": "--exclude s", "iter_0000010": "SRC/iter_0000010"}
"""Advice whose value the message names in another sentence."""


@pytest.fixture
def made(golden: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Returns a checkpoint by its name in ``REFUSALS``."""

    def make(name: str) -> Path:
        path = tmp_path / "source"
        if (golden / name).exists():
            shutil.copytree(golden / name, path)
        elif name in ("unknown class", "sparse"):
            path = tmp_path / "x.pt"
            more = {"o": Thing()} if name == "unknown class" else {"s": torch.eye(3).to_sparse()}
            torch.save({"w": torch.ones(2), **more}, path)
        elif name in ("an object that calls", "a tensor's attribute that calls"):
            path = tmp_path / "x.pt"
            noted = torch.nn.Parameter(torch.ones(2))
            noted.calls = map(len, [[1]])  # type: ignore[attr-defined]
            torch.save(
                {"w": torch.ones(2), "s": noted if "attribute" in name else noted.calls}, path
            )
        elif name == "loose":
            path.mkdir()
            torch.save({"w": torch.ones(2)}, path / "last.ckpt")
        elif name == "float8":
            source = golden / "hf/llama/safetensors_single"
            assert (
                main(["convert", str(source), str(path), "--to", "hf", "--quantize", "block", "-q"])
                == 0
            )
        elif name == "tracker":
            shutil.copytree(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", path)
            (path / "latest_checkpointed_iteration.txt").write_text("99")
        else:
            shutil.copytree(golden / "torch_dcp/tp2_only", path)
            if name == "existing":
                shutil.copytree(golden / "torch_dcp/tp2_only", tmp_path / "out")
            if name == "manifest":
                assert main(["manifest", str(path), "-q"]) == 0
        return path

    return make


class Thing:
    """A class that nobody else knows."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "refusal", REFUSALS, ids=lambda refusal: f"{refusal.words} → {refusal.advice}"
)
def test_taking_the_hint_of_a_refusal_works(
    refusal: Refusal,
    made: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = made(refusal.source)
    paths = {"SRC": str(source), "DST": str(tmp_path / "out"), "FOLDER": str(source)}

    def filled(text: str) -> list[str]:
        for name, path in paths.items():
            text = text.replace(name, path)
        return text.split()

    assert main(filled(refusal.words)) != 0
    err = capsys.readouterr().err
    advice = " ".join(filled(refusal.advice))
    assert (
        advice.lower() in err.replace(f"{tmp_path}/out", "DST").lower()
        or refusal.advice.lower() in err.lower()
    )
    line = refusal.words
    advice = COMPLETED.get(refusal.advice, refusal.advice).removeprefix("ckpt ")
    if refusal.replaces == "*":
        line = advice
    elif refusal.replaces is None:
        line = f"{line} {advice}"
    else:
        line = re.sub(rf"(?<!\S){re.escape(refusal.replaces)}(?!\S)", advice, line)
    assert main(filled(line)) == 0, capsys.readouterr().err


def test_no_hint_serves_many_causes() -> None:
    """A hint that fits every finding helps with none of them."""
    counts = Counter(code.hint for code in codes().values())
    assert max(counts.values()) <= 7, counts.most_common(1)


@pytest.mark.parametrize("words", ["--weights-only", ""])
def test_an_object_that_contains_itself_is_left_out_by_its_name(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As OmegaConf's, whose parts refer to the whole. No hint leads back to another's refusal."""
    thing = Thing()
    thing.parent = thing  # type: ignore[attr-defined]
    torch.save({"w": torch.ones(2), "cfg": thing}, tmp_path / "a.pt")
    line = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), *words.split()]
    assert main(line) == (4 if words else 0)
    output = "".join(capsys.readouterr())
    assert "--exclude cfg" in output
    assert "use --weights-only to set them aside" not in output
    assert main([*line, "--weights-only", "--exclude", "cfg", "--force"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("weights_only=True)")
    assert torch.load(tmp_path / "b.pt", weights_only=True).keys() == {"w"}
