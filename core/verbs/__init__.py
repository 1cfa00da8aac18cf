"""What a user asks for, a package each; ``core.api.verbs`` and ``ckpt_cli.commands`` call them.

Start at ``convert``, which ``reshard`` is a case of and ``merge`` computes tensors for. ``inspect``
and ``pictures`` describe, ``checks`` look for damage and ``validate`` runs them, ``diff`` compares,
``forecast`` says what a job will take, ``prune`` removes, and ``explain`` knows what messages mean.
"""
