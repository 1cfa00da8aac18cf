"""Megatron's layouts: rank-local tensors become global ones and back, metadata only.

Start at ``reshard.reshard``. ``rules`` holds ``megatron.toml``, which says how each parameter is cut; ``model`` the
sizes, stages and arguments; ``extras`` what lies beside the model; ``placement`` which tensor lies where; ``optimizer``
its three forms.
Imports: see its packages.
"""
