"""CK607: other files next to the weights that Python would unpickle or NumPy would load.

NumPy's object arrays, joblib files and compressed pickles are inspected as far as Python's standard
library allows (``core.formats.torch.other_pickles``), whatever their names;
``core.verbs.checks.metadata.unsafe`` judges their calls. Files of the checkpoint itself are
inspected by other checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.values import n_text
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

NOT_INSPECTED = get_code("CK607")


def report_uninspected(subject: Subject) -> Iterator[Finding]:
    """Report files with a pickle that is too large, or packed in an unsupported way (CK607)."""
    for (file, key), content in subject.other_pickles.items():
        if content.unread:
            n_more = len(content.unread) - 1
            suffix = f" (and {n_text(n_more, 'more part')})" if n_more else ""
            message = f"not inspected: {content.unread[0][:200]}{suffix}"
            yield NOT_INSPECTED.finding(message, file=file, key=key)


CHECKS = (Check(report_uninspected, Level.DEEP),)
