"""Convert between Hugging Face models and the global Megatron form, on metadata only.

::

    safetensors, .bin ─▶ flat keys + config.json ─ to_megatron ─▶ global per-layer form ─▶ shard …
                                                 ◀─ to_hf ─

The names are data: ``hf/tables/*.toml``, one file per family (``core.hf.family``). Sizes and
features of a model come from the training arguments (``core.hf.traits``), which
``core.hf.config_json`` converts from and to a ``config.json``. Fused tensors consist of boxes
(``core.hf.tensors.fuse``).

The family of a model follows from its ``model_type``, or from its tensors (``core.hf.detection``);
that of a Megatron model from its arguments (``core.hf.choice``). What arguments cannot express
stays with the checkpoint (``core.hf.config_json.origin``). LoRA adapters have a package
of their own (``core.hf.adapters``).

Models of torchtitan get Hugging Face's names first (``core.hf.torchtitan``).

What versions of transformers call the same tensor is in ``core.hf.tensors.spelling``, and whether
the output layer is the embedding in ``core.hf.ties``.

States of an optimizer follow their parameters (``core.hf.optimizer``).

The vision and audio towers of some composite models stay beside the text model
(``core.hf.towers``); of the others the text model alone is converted (``core.hf.text_model``).

A critic or reward model has a value head in place of its output layer (``core.hf.value_head``).

Not supported: quantized weights (they are dequantized first), other heads than these two.
"""
