"""Read DCP directories: their metadata, and the catalog made of it.

Start at ``stored_metadata`` and ``catalog``. ``data_files`` compares the files with the metadata.
"""
