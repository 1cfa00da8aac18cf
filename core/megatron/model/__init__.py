"""The facts about a model on which its layout depends: arguments, parallel sizes, stages,
vocabulary.

Start at ``facts``, which ``args`` makes of the training arguments. ``topology`` names the rank
directories; ``pipeline`` and ``stages`` distribute layers; ``cut`` puts rule, shape and sizes
together.
Imports: arrays, catalog, errors, megatron.rules, pickle.
"""
