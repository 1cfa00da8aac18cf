r"""Hybrid models: the pattern with the kind of each layer and the cuts into pipeline stages.

A pattern has one symbol per layer; ``|`` ends a model chunk (chunks in the order of layers: virtual
stages outermost), ``/`` begins the layers of each multi-token prediction::

    hybrid_override_pattern = "M-M*-"          megatron-core 0.9 to 0.16
    hybrid_layer_pattern    = "M-M|M*-/MM"     since 0.17, in addition to the former

=====  =========================================  =====  ================================
 M     Mamba                                       -     MLP
 G     gated delta net                             E     experts
 \*    attention                                   D     sparse attention
=====  =========================================  =====  ================================

Source: Megatron-LM d98e8a64 ``core/models/hybrid/hybrid_layer_allocation.py``, megatron-core 0.16.1
``ssm/mamba_hybrid_layer_allocation.py``.

Not supported: several kinds in one layer (``[M-]``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from core.errors import CorruptError, UnsupportedError
from core.pickle.fields import FieldReader
from core.values import dataclass

NAMES = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that hold a pattern, the newer one first."""
SYMBOLS = {
    "M": "mixer.",
    "G": "self_attention.",
    "*": "self_attention.",
    "D": "self_attention.",
    "-": "mlp.linear_fc1.",
    "E": "mlp.experts.",
}
"""Symbol of a kind of layer → prefix of the names of some of its parameters."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """The layers of a hybrid model.

    Args:
        layers: a symbol for each layer.
        cuts: number of layers in each model chunk, or () for a pattern without cuts.
        n_predictions: number of multi-token predictions.
        prediction: a symbol for each layer of one multi-token prediction.
    """

    layers: str
    cuts: tuple[int, ...] = ()
    n_predictions: int = 0
    prediction: str = ""

    @property
    def moe_layers(self) -> frozenset[int]:
        """Numbers of the layers with experts."""
        return frozenset(number for number, symbol in enumerate(self.layers) if symbol == "E")


def parse_pattern(fields: Mapping[str, object]) -> LayerPattern | None:
    """Return the pattern in the training arguments, or None.

    Raises:
        CorruptError: the pattern is not a string, or its number of layers is not ``num_layers``.
        UnsupportedError: a symbol is unknown.
    """
    # Newer versions keep both arguments; the newer one counts.
    name = next((name for name in NAMES if fields.get(name)), None)
    if name is None:
        return None
    text = FieldReader().read_text(fields[name], f"argument {name}")
    main, *predictions = text.split("/")

    # Report an unknown kind of layer rather than a wrong number of layers.
    for symbol in text:
        if symbol not in SYMBOLS and symbol not in "|/":
            raise UnsupportedError(
                f"layers of kind {symbol!r} cannot be resharded (argument {name} is {text!r})",
                hint=f"kinds that can be resharded: {' '.join(SYMBOLS)}",
            )
    chunks = main.split("|")
    layers = "".join(chunks)
    n_layers = fields.get("num_layers")
    if n_layers not in (None, len(layers)):
        raise CorruptError(
            f"argument {name} has {len(layers)} layers, but num_layers is {n_layers}"
        )

    # A pattern without cuts leaves the distribution of layers to other arguments.
    cuts = tuple(map(len, chunks)) if len(chunks) > 1 else ()
    override = fields.get("mtp_hybrid_override_pattern")
    prediction = override if isinstance(override, str) else "".join(predictions[:1])
    return LayerPattern(layers, cuts, len(predictions), prediction)


def recut(text: str, counts: Sequence[int]) -> str:
    """Return a pattern for model chunks of ``counts`` layers.

    The result has cuts if ``text`` has them, or if the chunks are uneven.
    """
    main, *predictions = text.split("/")
    symbols = iter(main.replace("|", ""))
    chunks = ["".join(islice(symbols, count)) for count in counts]
    is_cut = "|" in main or len(set(counts)) > 1
    return "/".join([("|" if is_cut else "").join(chunks), *predictions])
