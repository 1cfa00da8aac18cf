"""CK820–CK824: the tensors are those of a manifest, or of another checkpoint, in any format and layout (--against).

They are compared by fingerprint (``core.fingerprint.definition``), which is made of every byte of the checkpoint that
is examined; of the other one, where it has a manifest with fingerprints, no data are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.checks.watch import Watch
from core.errors import CheckpointingException, WorkerError
from core.fingerprint.definition import Fingerprint
from core.fingerprint.kernel import fastest_products
from core.manifest.fingerprint_feeds import ArrayFeeds, Feeds
from core.manifest.fingerprint_read import read_fingerprints
from core.manifest.fingerprint_share import readable_fingerprints
from core.opening.canonical import Canonical, canonical_of
from core.team.agreement import require_agreement
from core.team.protocol import Figures, is_lead

_DEFAULT_THREADS = 2
_OTHER = "see what differs: ckpt diff A B"

UNREAD = Code("CK820", Severity.ERROR, "a tensor has no fingerprint", "mend what else is reported of it")
MISSING = Code("CK821", Severity.ERROR, "a tensor of the other checkpoint is missing", _OTHER)
EXTRA = Code("CK822", Severity.WARNING, "a tensor that the other checkpoint does not have", _OTHER)
OTHER_KIND = Code("CK823", Severity.ERROR, "a tensor has another dtype or shape", _OTHER)
DIFFERENT = Code("CK824", Severity.ERROR, "a tensor holds other values", _OTHER)

CODES = (UNREAD, MISSING, EXTRA, OTHER_KIND, DIFFERENT)


def watch(subject: Subject) -> Watch:
    """The elements of all tensors, if there is something to compare with."""
    form = subject.canonical
    if subject.against is None or form is None or subject.catalog is None:
        return Watch()
    stack = ExitStack()
    products = stack.enter_context(fastest_products(sum(subject.files.values()), subject.device))
    feeds = Feeds(form.catalog, subject.catalog.stored_arrays().values(), products)
    return Watch(observers=(ArrayFeeds(feeds, stack),))


def read_together(subject: Subject) -> tuple[Figures, ...]:
    """Makes the fingerprints that the scan does not make with all ranks of a team, before the check asks for them.

    Returns:
        What the workers did, at the lead.

    Raises:
        WorkerError: a rank failed.
    """
    team = subject.team
    if subject.against is None:
        return ()
    try:
        form = require_agreement(team, lambda: _form(subject), lambda found: found is None, subject=str(subject.path))
        fed = _fed(subject)
    except WorkerError:
        raise
    except CheckpointingException:
        return ()  # on all ranks alike, and the check says it
    if form is None:
        return ()
    if not is_lead(team):
        _let_go(subject)
    keys = [key for key in form.catalog.tensors if key in subject.against.fingerprints and key not in fed]
    made = readable_fingerprints(
        form.catalog,
        subject.store,
        keys,
        threads=subject.threads or _DEFAULT_THREADS,
        memory_bytes=subject.memory_bytes,
        team=team,
        device=subject.device,
    )
    subject.shared = made.fingerprints
    return made.figures


def against(subject: Subject) -> Iterator[Finding]:
    """Every tensor has the dtype, the shape and the fingerprint that it should have."""
    if subject.against is None:
        return
    try:
        form = _form(subject)
    except CheckpointingException as err:
        form = None
        yield UNREAD.finding(f"nothing can be compared: {err.message}", file=err.file, key=err.key)
    if form is None:
        return
    wanted = subject.against.fingerprints
    common = [key for key in form.catalog.tensors if key in wanted]
    if wanted and not common:
        yield MISSING.finding(
            f"no tensor has a name in common with {subject.against.label}",
            expected=next(iter(wanted)),
            found=next(iter(form.catalog.tensors), "no tensor"),
            hint="names of Megatron and of Hugging Face differ: convert one of them, or use ckpt diff",
        )
        return
    yield from _names(subject, form)
    found, unread = _found(subject, form, common)
    subject.n_compared = len(found)
    yield from unread
    for key in common:
        if key in found:
            yield from _compared(key, wanted[key], found[key], subject.against.label)


def _form(subject: Subject) -> Canonical | None:
    """The canonical form of all files: at the lowest level the subject's is of a sample."""
    if subject.level == Level.METADATA and subject.format is not None and subject.format.sample is not None:
        return canonical_of(subject.format.read(subject.store), subject.store, rules=subject.rules)
    return subject.canonical


def _names(subject: Subject, form: Canonical) -> Iterator[Finding]:
    assert subject.against is not None
    tensors, wanted = form.catalog.tensors, subject.against.fingerprints
    for key, other in wanted.items():
        if key not in tensors:
            yield MISSING.finding(f"{subject.against.label} has it", key=key, expected=_kind(other), found="nothing")
    for key, meta in tensors.items():
        if key not in wanted:
            kind = _kind(Fingerprint(meta.dtype, meta.shape, ""))
            yield EXTRA.finding(f"{subject.against.label} does not have it", key=key, expected="nothing", found=kind)


def _found(subject: Subject, form: Canonical, keys: list[str]) -> tuple[dict[str, Fingerprint], list[Finding]]:
    """Fingerprints of tensors, and what is wrong with those that have none."""
    found = _fed(subject)
    _let_go(subject)
    rest = [key for key in keys if key not in found]
    try:
        return found | _read(subject, form, rest), []
    except CheckpointingException:
        problems = []
    for key in rest:  # one by one, so that the others are compared all the same
        try:
            found |= _read(subject, form, [key])
        except CheckpointingException as err:
            problems.append(UNREAD.finding(err.message, file=err.file, key=key, rank=err.rank, span=err.span))
    return found, problems


def _fed(subject: Subject) -> dict[str, Fingerprint]:
    """The fingerprints that the scan has made."""
    found: dict[str, Fingerprint] = {}
    for observer in _observers(subject):
        found |= observer.feeds.fingerprints()
    return found


def _let_go(subject: Subject) -> None:
    """Frees what the observers of the scan hold."""
    for observer in _observers(subject):
        observer.resources.close()


def _observers(subject: Subject) -> list[ArrayFeeds]:
    if subject.level != Level.DEEP:
        return []
    observers = subject.deep.watches["content.fingerprints"].observers
    return [observer for observer in observers if isinstance(observer, ArrayFeeds)]


def _read(subject: Subject, form: Canonical, keys: list[str]) -> dict[str, Fingerprint]:
    """Fingerprints of tensors, read now if a team has not made them before."""
    threads = subject.threads or _DEFAULT_THREADS
    found = {key: subject.shared[key] for key in keys if key in subject.shared}
    rest = [key for key in keys if key not in found]
    if rest:
        found |= read_fingerprints(
            form.catalog, subject.store, rest, threads=threads, memory_bytes=subject.memory_bytes, device=subject.device
        )
    return found


def _compared(key: str, wanted: Fingerprint, found: Fingerprint, label: str) -> Iterator[Finding]:
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        yield OTHER_KIND.finding(f"in {label} it is another", key=key, expected=_kind(wanted), found=_kind(found))
    elif wanted.text != found.text:
        yield DIFFERENT.finding(
            f"its fingerprint is not that of {label}",
            key=key,
            expected=f"{wanted.text[:16]}…",
            found=f"{found.text[:16]}…",
        )


def _kind(one: Fingerprint) -> str:
    return f"{one.dtype} of shape {list(one.shape)}"


CHECKS = (Check(against),)
