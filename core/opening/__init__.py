"""Turn a path into a store, a format and a catalog, and a catalog into its other forms.

Start at ``open.open_checkpoint``. ``unrecognised`` explains why a path is not a checkpoint, and
which one was meant; ``other_software`` names what other programs wrote; ``source_files`` lists the
files without tensors; ``canonical`` builds the form that does not depend on format and layout;
``target`` divides a catalog into the arrays of a destination.
"""
