"""Access to files: the store that opens them, directories, mounts, bounded JSON and the sandbox.

Start at ``store``. ``sandbox`` runs code on untrusted bytes in a process that can do no harm;
``substitute`` and ``url`` recognise what users have in place of a file of weights or a local path.
Imports: errors.
"""
