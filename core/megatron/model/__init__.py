"""The facts that decide a model's layout: arguments, parallel sizes, stages, vocabulary.

Start at ``facts``, which ``args`` reads from the training arguments. ``topology`` names the rank
directories; ``pipeline`` and ``stages`` distribute layers; ``cut`` combines rule, shape and sizes.
"""
