"""What a conversion tells its user: what is not carried, what to do next.

Start at ``dropped`` (entries that are not carried, by reason) and ``load_line`` (the line that
loads the result). ``lightning`` proposes options for PyTorch Lightning's checkpoints.
"""
