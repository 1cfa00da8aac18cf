"""Where bytes live: the store that files are opened through, directories, mounts, bounded JSON, the sandbox.

Start at ``store``. ``sandbox`` runs code on untrusted bytes in a process that can do no harm; ``substitute`` and
``url`` say what lies where a file was expected.
Imports: errors.
"""
