"""The version of megatron-core that is to load rank files, and what depends on it.

::

    since    param groups that a rank lists                              TP above the query groups
             those of its own parameters, in the order of these          no
    0.14     followed by empty ones, of which other ranks have           no
             parameters
    0.16     all, in one order; ``default_config`` marks those           yes
             with the usual learning rate

Since 0.17 there is no legacy GroupedMLP (``experts.weight1``). Since 0.19 the convolution of
Mamba's mixers is a parameter of these, ``conv1d_weight``.

Megatron loads the states of a file's first group into its own first group: with another order, or
with a group too many or too few, it fails or trains with states of other parameters.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1 ``core/optimizer/__init__.py``
``_get_param_groups``, ``core/transformer/transformer_config.py``; that 0.14 was the first to list
empty groups, and 0.19 the first with ``conv1d_weight``, their tags in Megatron-LM.
tests/real_megatron loads what is written for 0.12 and 0.16 into 0.12.1 and 0.16.1.

Not supported: versions before 0.12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass  # noqa: TID251 (values in order)

from core.errors import UnsupportedError, UsageError

OPTION = "--megatron-version"
_TEXT = re.compile(r"(\d{1,4})\.(\d{1,4})(\.\d+\w*)?")


@dataclass(frozen=True, slots=True, order=True)
class MegatronVersion:
    """A version of megatron-core; the third number has no influence on checkpoints."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def lists_empty_groups(self) -> bool:
        """True if a rank lists param groups of which it has no parameter."""
        return self >= MegatronVersion(0, 14)

    @property
    def sorts_groups(self) -> bool:
        """True if all ranks list their param groups in one order."""
        return self >= MegatronVersion(0, 16)

    @property
    def shares_query_groups(self) -> bool:
        """True if several TP ranks may have one query group."""
        return self >= MegatronVersion(0, 16)

    @property
    def has_grouped_mlp(self) -> bool:
        """True if experts may be the legacy GroupedMLP: all experts of a rank in one parameter."""
        return self < MegatronVersion(0, 17)

    @property
    def has_direct_convolution(self) -> bool:
        """True if the convolution of Mamba's mixers is conv1d_weight, not conv1d.weight."""
        return self >= MegatronVersion(0, 19)

    @property
    def has_layout_strings(self) -> bool:
        """True if a string may define the distribution of layers over pipeline stages."""
        return self > MegatronVersion(0, 12)

    def check_sizes(self, *, tp: int, n_groups: int, has_layout: bool) -> None:
        """Raise for sizes that this version cannot run.

        Args:
            tp: tensor parallel size of the destination.
            n_groups: number of the model's query groups.
            has_layout: a layout string distributes the layers.

        Raises:
            UnsupportedError: the sizes need a newer version.
        """
        if tp > n_groups and not self.shares_query_groups:
            raise UnsupportedError(
                f"megatron-core {self} cannot load TP {tp}, because the model has only {n_groups} "
                "query groups; 0.16 and later can",
                hint=f"use --tp-new {n_groups} or less, or {OPTION} 0.16",
            )
        if has_layout and not self.has_layout_strings:
            raise UnsupportedError(
                f"megatron-core {self} does not support pipeline_model_parallel_layout",
                hint="omit --pipeline-model-parallel-layout, change --pp-new if the layout is the "
                f"source's, or use {OPTION} with a newer version",
            )


def parse_version(text: str) -> MegatronVersion:
    """Parse a version of megatron-core such as ``0.16`` or ``0.16.1``.

    Raises:
        UsageError: the text is not a version, or the version is before 0.12.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{OPTION}: {text!r} is not a version of megatron-core",
            hint="pass a version such as 0.16",
        )
    version = MegatronVersion(int(match[1]), int(match[2]))
    if version < MegatronVersion(0, 12):
        raise UsageError(f"{OPTION}: megatron-core {version} is not supported; 0.12 and later are")
    return version
