"""Files of ``torch.save``: zip, the stream before torch 1.6, bare pickles; objects beside the
tensors of other formats.

Start at ``format``, then ``tree`` (from a file to its tree and arrays) and ``zip``.
``weights_only`` and ``refused`` know what torch.load refuses; ``side_file`` keeps objects beside
formats that hold only tensors.
Imports: arrays, catalog, errors, files, formats, formats.torch.zip, pickle.
"""
