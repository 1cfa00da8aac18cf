"""Multipart uploads: objects that are sent in parts and are invisible until they are finished.

Start at ``protocol``; ``client`` chooses. ``s3`` sends parts in any order and continues uploads of
other processes, through boto3; ``ordered`` sends them in order, through obstore, to every store.
"""
