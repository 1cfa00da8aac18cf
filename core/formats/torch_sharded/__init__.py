"""Files of ``torch.save`` that the ranks of one job wrote, with DTensors or ShardedTensors in them.

Start at ``format``. ``names`` finds the files that belong together, ``rank_file`` and
``local_part`` parse the tensors, ``mesh_cut`` computes which boxes a rank holds, ``merge`` joins
the files of the ranks.
"""
