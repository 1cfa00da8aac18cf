"""Pure arithmetic on boxes, strides, element types and checksums, without files or torch.

Start at ``box``, the half-open boxes that everything else is expressed in, and ``dtypes``, the one
table of element types. ``sharding`` cuts a tensor over ranks; ``coverage`` proves that boxes tile a
region; ``gather`` copies between strided buffers.
Imports: errors.
"""
