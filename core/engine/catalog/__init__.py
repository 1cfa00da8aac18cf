"""The metadata of checkpoints: tensors, boxes, arrays in files; and files to write.

Start at ``catalog``; ``stored`` defines arrays in a file, with their encodings, and arrays without
a position yet. ``file_image`` describes an output file before it has data, and ``planned_store``
reads such files like any checkpoint.
"""
