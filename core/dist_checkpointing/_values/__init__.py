"""Live Python values as inert trees and back, by a table of safe constructors; nothing is unpickled.

Start at ``objects``; ``constructors`` is the table, ``stand_in`` what unknown classes become.
Imports: arrays, catalog, dist_checkpointing, dist_checkpointing._engine, errors, files, formats.torch,
formats.torch.zip, pickle.
"""
