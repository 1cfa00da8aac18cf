"""Checksums that object stores state about their objects, to find damage without reading.

Start at ``lookup``. obstore does not return them: S3 is asked through boto3, the stores of Google
and Azure by a signed URL.
"""
