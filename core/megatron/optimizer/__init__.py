"""Megatron's optimizers: groups, entries, and the proof that a state belongs to its parameter.

Start at ``form``, which recognises the form of a stored optimizer. Three packages read and write
them: ``numbered`` (FP32 and Float16 in rank files), ``flat`` (distrib_optim.pt) and ``sharded``
(torch_dist, zarr). ``proof`` compares master weights with weights, ``rank_state`` contains the
values that pass between the packages, and ``reshard_target`` describes the destination.
"""
