"""Where ``convert`` may refuse what ``validate`` does not find, and the other way round: a table of
cases and reasons.

Names are those of ``tests/support/damages.py`` (``SOURCE: WHAT``) and ``tests/hostile/cases.py``,
with shell patterns.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_IN_ANY_PICKLE = ("pickle", "pickle as object")
FOUND_BUT_CONVERTED = {
    "torch_dcp/fsdp2_dp2: a link to *": "no conversion opens a file that .metadata does not name",
    "metadata: chunks that overlap in part and agree": "a conversion compares what they have "
    "in common",
    "torch_dcp/fsdp2_dp2: a pickle beside the weights *": "no conversion opens a file that "
    ".metadata does not name",
    **dict.fromkeys(
        (
            "accelerate/*: an empty scheduler",
            "trainer/*: short weights",
        ),
        "a conversion does not need the file, and lists it as not carried",
    ),
    "1500 directories deep": "no conversion looks into directories that the checkpoint has no "
    "files in",
    "a fifo beside": "no conversion opens a file that .metadata does not name",
    "a safetensors file called by no text": "the index does not name the file",
    **dict.fromkeys(
        (
            f"{thing}: safetensors model.safetensors.index.json"
            for thing in ("fifo", "socket", "link to itself", "dangling link", "endless device")
        ),
        "shards numbered 1 to n are a complete series without their index",
    ),
    "hf/*: another small file that is cut": "no conversion to torch carries it",
    "hf/*: a CRC field behind a record": "neither torch nor a conversion reads that copy of "
    "the CRC",
    "deepspeed_universal/*: no groups": "a note says so: tensors and states are complete, only "
    "DeepSpeed needs it",
    "deepspeed_universal/*: no model file": "a note says so: tensors and states are complete, "
    "only DeepSpeed needs it",
    "* as a manifest": "only validate and --verify compare with a manifest",
    "a manifest that climbs": "only validate and --verify compare with a manifest",
    "an integrity.json that climbs": "only validate compares with Megatron's checksums",
    "* as an integrity.json": "only validate compares with Megatron's checksums",
}
REFUSED_BUT_SOUND = {
    **dict.fromkeys(
        (
            *(f"{where}: a surrogate" for where in _IN_ANY_PICKLE),
            "metadata: a key with a surrogate",
        ),
        "torch reads the name; no text of ours can hold it",
    ),
    **dict.fromkeys(
        (f"{where}: a tensor of 2^40 by strides of 0" for where in _IN_ANY_PICKLE),
        "torch makes the view; written out it has terabytes",
    ),
}


def check_agreement(name: str, *, is_refused: bool, is_found: bool) -> None:
    """Assert that a case is refused and found, or neither, unless a table says that it differs and
    why.
    """
    tables = {(False, True): FOUND_BUT_CONVERTED, (True, False): REFUSED_BUT_SOUND}
    for verdicts, table in tables.items():
        is_listed = any(fnmatchcase(name, pattern) for pattern in table)
        differs = (is_refused, is_found) == verdicts
        assert differs == is_listed, (
            f"{name}: refused {is_refused}, found {is_found}, listed {is_listed}"
        )
