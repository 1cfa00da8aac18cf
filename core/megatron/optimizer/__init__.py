"""Megatron's optimizers: groups, entries, and the proof that a state belongs to its parameter.

Start at ``form``, which tells the three forms apart: ``numbered`` (FP32 and Float16), ``flat``
(distrib_optim.pt) and ``sharded`` (torch_dist, zarr). ``proof`` compares masters with weights;
``rank_state`` holds the values that pass between them, ``reshard_target`` says what the result is
to be.
Imports: arrays, catalog, changes, errors, files, megatron.extras, megatron.model,
megatron.placement, megatron.rules, pickle.
"""
