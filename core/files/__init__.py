"""Access to files: the store that opens them, directories, mounts, bounded JSON and the sandbox.

Start at ``store``. ``ranges`` holds what is read from object stores; ``stated`` asks them for the
checksums of their objects. ``sandbox`` runs code on untrusted bytes in a confined process;
``substitute`` and ``url`` recognise what users pass by mistake instead of a weights file or a local
path.
Imports: errors, files.ranges.
"""
