"""The proven plan as a file that every worker reads, and who does what of it.

Start at ``file``; ``codec`` spells it without pickle, ``division`` divides it over workers and
hosts.
Imports: arrays, catalog, errors, files, formats.dcp, formats.deepspeed, formats.ocdbt,
formats.torch, formats.torch.zip, formats.zarr, plan, quantize.
"""
