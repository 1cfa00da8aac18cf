"""Megatron's layouts: rank-local tensors become global ones and back, metadata only.

Start at ``reshard.reshard``. ``rules`` holds ``megatron.toml``, which says how each parameter is
cut; ``model`` the sizes, stages and arguments; ``extras`` the entries other than the model;
``placement`` the place of each tensor; ``optimizer`` its three forms.
"""
