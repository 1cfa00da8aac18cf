"""Pure arithmetic on boxes, strides, element types and checksums: integers and buffers in, the same out.

Start at ``box``, the half-open boxes that everything else is said in, and ``dtypes``, the one table of element types.
``sharding`` cuts a tensor over ranks; ``coverage`` proves that boxes tile a region; ``gather`` copies between strided
buffers.
Imports: errors.
"""
