"""The host of this process: its cores, the environment that launchers set, the result files of
workers.

Start at ``rank_env``, which knows torchrun, Slurm and MPI.
Imports: core.
"""
