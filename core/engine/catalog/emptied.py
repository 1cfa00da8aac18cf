"""Parameters that were saved while ZeRO-3 had divided them among ranks: nothing is left of them.

ZeRO-3 puts a tensor of shape [0] in the place of a parameter that is not gathered. A model or an
adapter that is saved so has these in its files, in every format.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog

EMPTIED_HINT = (
    "save the checkpoint again with its parameters gathered (with "
    "stage3_gather_16bit_weights_on_model_save, or inside GatheredParameters); or convert the "
    "run's global_stepN directory, which contains every rank's part"
)
_PARAMETERS = ("weight", "bias")


def find_emptied_parameters(catalog: Catalog) -> list[str]:
    """Return the keys of tensors of shape [0] in the places of parameters, in their order.

    A layer's weight or bias is never empty. Beside such, other floating-point tensors of that shape
    are parameters too; alone they may be empty by intent, as buffers are.
    """
    emptied = [
        key
        for key, tensor in catalog.tensors.items()
        if tensor.shape == (0,)
        and dtype_of(tensor.dtype).kind == "float"
        and not any(part.startswith("optim") for part in re.split("[./]", key))
    ]
    is_parameter = [
        name in _PARAMETERS or name.startswith("lora_")
        for name in (key.rpartition(".")[2] for key in emptied)
    ]
    return emptied if any(is_parameter) else []
