"""The kinds of stores that URLs name: a row each, with what messages say about it.

To add one: a row here, if obstore reads its scheme (``core.files.object_client``) and uploads go
through it or through S3's protocol (``core.files.multipart.client``).
"""

from __future__ import annotations

from collections.abc import Mapping

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class StoreKind:
    """A kind of store that a URL may name; obstore, which reads it, must know the schemes.

    Args:
        schemes: its schemes, the usual one first.
        credentials: hint for a request that was refused.
        network: hint for a store that does not answer.
        permissions: what is done → the permission that it takes, in the store's words.
        is_writable: checkpoints can be written there.
    """

    schemes: tuple[str, ...]
    credentials: str
    network: str
    permissions: Mapping[str, str]
    is_writable: bool = True

    @property
    def is_s3(self) -> bool:
        """True for S3 and what speaks its protocol."""
        return self.schemes[0] == "s3"


STORE_KINDS = (
    StoreKind(
        ("s3", "s3a"),
        "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE",
        "check the endpoint (AWS_ENDPOINT_URL, --storage-option endpoint=URL) and the proxy",
        {
            "list": "s3:ListBucket",
            "list uploads": "s3:ListBucketMultipartUploads",
            "list parts": "s3:ListMultipartUploadParts",
            "read": "s3:GetObject",
            "write": "s3:PutObject",
        },
    ),
    StoreKind(
        ("gs",),
        "check GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
        "check the network and the proxy",
        {
            "list": "storage.objects.list",
            "read": "storage.objects.get",
            "write": "storage.objects.create",
        },
    ),
    StoreKind(
        ("az", "abfs", "abfss"),
        "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run: az login",
        "check the endpoint (--storage-option endpoint=URL) and the proxy",
        {
            "list": "Storage Blob Data Reader",
            "read": "Storage Blob Data Reader",
            "write": "Storage Blob Data Contributor",
        },
    ),
    StoreKind(
        ("https", "http"),
        "check whether the address needs a login",
        "check the host and the port of the URL, and the proxy",
        {},
        is_writable=False,
    ),
)
SCHEMES = tuple(scheme for kind in STORE_KINDS for scheme in kind.schemes)
_WRITABLE = [f"{kind.schemes[0]}://" for kind in STORE_KINDS if kind.is_writable]
WRITABLE_STORES = f"{', '.join(_WRITABLE[:-1])} or {_WRITABLE[-1]}"
"""For hints: the schemes of stores to write to."""


def store_kind(scheme: str) -> StoreKind:
    """Return the kind of store that the scheme of a remote path names."""
    return next(kind for kind in STORE_KINDS if scheme in kind.schemes)
