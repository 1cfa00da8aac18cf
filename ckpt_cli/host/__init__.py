"""The host of this process: its cores, its launcher's environment, its workers' result files.

Start at ``rank_env``, which knows torchrun, Slurm and MPI.
"""
