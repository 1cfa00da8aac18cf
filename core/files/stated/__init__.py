"""Checksums that object stores state about their objects, to find damage without reading.

Start at ``lookup``. obstore does not return them: ``s3`` asks through boto3, ``signed`` asks the
stores of Google and Azure by a signed URL.
"""
