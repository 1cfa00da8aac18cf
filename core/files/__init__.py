"""Access to files: the store that opens them, directories, mounts, bounded JSON and the sandbox.

Start at ``store``. ``requests`` sends requests to object stores; ``ranges`` holds what is read from
them; ``stated`` asks them for the checksums of their objects. ``sandbox`` runs code on untrusted
bytes in a confined process; ``substitute`` and ``url`` recognise what users pass by mistake instead
of a weights file or a local path.
"""
