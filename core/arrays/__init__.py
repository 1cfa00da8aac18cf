"""Pure arithmetic on boxes, strides, element types and checksums, without files or torch.

Start at ``box``, whose half-open boxes all other modules use, and ``dtypes``, the table of element
types. ``sharding`` cuts a tensor over ranks; ``coverage`` proves that boxes tile a region;
``gather`` copies between strided buffers.
"""
