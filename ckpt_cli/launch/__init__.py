"""``ckpt launch``: runs the workers of one or many hosts with PyTorch's elastic agent.

Start at ``run``; ``agent`` calls torch, ``failure`` chooses the error to report, ``guard`` bounds
every wait.
"""
