"""``ckpt launch``: the workers of one or many hosts, run by PyTorch's elastic agent.

Start at ``run``; ``agent`` asks torch, ``failure`` makes one error of many, ``guard`` bounds every wait.
Imports: core, host, options, screen, workers.
"""
