"""CK820–CK824: compare the tensors with a manifest or another checkpoint (``--against``).

Tensors are compared by fingerprint (``core.engine.fingerprint.definition``), which covers all their
bytes. The data of the other checkpoint is read only if it has no manifest with fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from shlex import quote
from typing import TYPE_CHECKING

from core.engine.team.protocol import Figures, is_lead
from core.errors import CheckpointingException, WorkerError
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.engine.fingerprint.definition import Fingerprint
    from core.opening.canonical import Canonical
    from core.publish.manifest.fingerprint_feeds import ArrayFeeds
    from core.verbs.checks.watch import Watch

_DEFAULT_THREADS = 2

UNREAD = get_code("CK820")
MISSING = get_code("CK821")
EXTRA = get_code("CK822")
OTHER_KIND = get_code("CK823")
DIFFERENT = get_code("CK824")


def watch(subject: Subject) -> Watch:
    """Request the elements of all tensors if ``--against`` is given."""
    from core.engine.fingerprint.kernel import fastest_products
    from core.publish.manifest.fingerprint_feeds import ArrayFeeds, Feeds
    from core.verbs.checks.watch import Watch

    form = subject.canonical
    if subject.against is None or form is None or subject.catalog is None:
        return Watch()
    stack = ExitStack()
    products = stack.enter_context(fastest_products(sum(subject.files.values()), subject.device))
    feeds = Feeds(form.catalog, subject.catalog.stored_arrays().values(), products)
    return Watch(observers=(ArrayFeeds(feeds, stack),))


def read_together(subject: Subject) -> tuple[Figures, ...]:
    """Compute the fingerprints that the scan did not compute, on all ranks of a team.

    They are stored in ``subject.shared`` for the check.

    Returns:
        The work of each rank, on the lead.

    Raises:
        WorkerError: a rank failed, or the ranks see different data.
    """
    from core.engine.team.agreement import require_agreement
    from core.publish.manifest.fingerprint_share import readable_fingerprints

    team = subject.team
    if subject.against is None:
        return ()
    # Agree on the canonical form. If no rank can build it, the check reports the reason.
    try:
        form = require_agreement(
            team,
            lambda: _canonical_form(subject),
            lambda canonical: canonical is None,
            subject=str(subject.path),
        )
        scanned = _scanned_fingerprints(subject)
    except WorkerError:
        raise
    except CheckpointingException:
        return ()
    if form is None:
        return ()
    # Only the lead runs the check; the others can free the memory of the scan.
    if not is_lead(team):
        _release_observers(subject)
    keys = [
        key
        for key in form.catalog.tensors
        if key in subject.against.fingerprints and key not in scanned
    ]
    result = readable_fingerprints(
        form.catalog,
        subject.store,
        keys,
        threads=subject.threads or _DEFAULT_THREADS,
        memory_bytes=subject.memory_bytes,
        team=team,
        device=subject.device,
    )
    subject.shared = result.fingerprints
    return result.figures


def compare_with_reference(subject: Subject) -> Iterator[Finding]:
    """Check that every tensor has the expected dtype, shape and fingerprint (CK820–CK824)."""
    if subject.against is None:
        return
    try:
        form = _canonical_form(subject)
    except CheckpointingException as err:
        form = None
        yield UNREAD.finding(
            f"the fingerprints cannot be compared: {err.message}", file=err.file, key=err.key
        )
    if form is None:
        return
    expected, label = subject.against.fingerprints, subject.against.label
    other = subject.against.path
    command = f"{'OTHER' if other is None else quote(str(other))} {quote(str(subject.root))}"
    # Without a common name, every tensor would be missing or surplus. Report the likely reason
    # instead, as one finding.
    common = [key for key in form.catalog.tensors if key in expected]
    if expected and not common:
        # The fingerprint of a fused tensor does not follow from those of its parts, so that only
        # diff, which reads the bytes, can compare across a conversion of names.
        yield MISSING.finding(
            f"nothing was compared, because no tensor name is also in {label}",
            expected=next(iter(expected)),
            found=next(iter(form.catalog.tensors), "no tensor"),
            hint="if one checkpoint was converted from the other and its tensors were renamed, "
            f"compare both under the same names: ckpt diff {command}",
        )
        return
    # Compare the names, then the fingerprints of the common tensors.
    if other is None:
        hint = "to see what differs, run ckpt diff with the checkpoint that the manifest describes"
    else:
        hint = f"to see what differs: ckpt diff {command}"
    yield from _compare_names(subject, form, hint)
    fingerprints, problems = _collect_fingerprints(subject, form, common)
    subject.n_compared = len(fingerprints)
    yield from problems
    for key in common:
        if key not in fingerprints:
            continue  # one of the problems
        wanted, actual = expected[key], fingerprints[key]
        if (wanted.dtype, wanted.shape) != (actual.dtype, actual.shape):
            yield OTHER_KIND.finding(
                f"the dtype or shape does not match {label}",
                key=key,
                expected=_type_text(wanted),
                found=_type_text(actual),
                hint=hint,
            )
        elif wanted.text != actual.text:
            yield DIFFERENT.finding(
                f"the fingerprint does not match {label}",
                key=key,
                expected=f"{wanted.text[:16]}…",
                found=f"{actual.text[:16]}…",
                hint=hint,
            )


def _canonical_form(subject: Subject) -> Canonical | None:
    """Return the canonical form of all files; None if the checkpoint cannot be read."""
    from core.opening.canonical import canonical_of

    format = subject.format
    # At the lowest level, the subject's own canonical form covers only a sample of the files.
    if subject.level == Level.METADATA and format is not None and format.sample is not None:
        return canonical_of(format.read(subject.store), subject.store, rules=subject.rules)
    return subject.canonical


def _compare_names(subject: Subject, form: Canonical, hint: str) -> Iterator[Finding]:
    """Report tensors that only one of the checkpoints has."""
    from core.engine.fingerprint.definition import Fingerprint

    assert subject.against is not None
    tensors, expected = form.catalog.tensors, subject.against.fingerprints
    for key, other in expected.items():
        if key not in tensors:
            yield MISSING.finding(
                f"the tensor is only in {subject.against.label}",
                key=key,
                expected=_type_text(other),
                found="nothing",
                hint=hint,
            )
    for key, tensor in tensors.items():
        if key not in expected:
            kind = _type_text(Fingerprint(tensor.dtype, tensor.shape, ""))
            yield EXTRA.finding(
                f"the tensor is not in {subject.against.label}",
                key=key,
                expected="nothing",
                found=kind,
                hint=hint,
            )


def _collect_fingerprints(
    subject: Subject, form: Canonical, keys: list[str]
) -> tuple[dict[str, Fingerprint], list[Finding]]:
    """Return the fingerprints of tensors, and findings about those that cannot be read."""
    fingerprints = _scanned_fingerprints(subject)
    _release_observers(subject)
    missing = [key for key in keys if key not in fingerprints]
    try:
        return fingerprints | _read_missing(subject, form, missing), []
    except CheckpointingException:
        problems = []
    # Read the tensors one by one, so that a damaged one does not hide the others.
    for key in missing:
        try:
            fingerprints |= _read_missing(subject, form, [key])
        except CheckpointingException as err:
            problems.append(
                UNREAD.finding(err.message, file=err.file, key=key, rank=err.rank, span=err.span)
            )
    return fingerprints, problems


def _scanned_fingerprints(subject: Subject) -> dict[str, Fingerprint]:
    """Return the fingerprints that the scan computed."""
    fingerprints: dict[str, Fingerprint] = {}
    for observer in _observers(subject):
        fingerprints |= observer.feeds.fingerprints()
    return fingerprints


def _release_observers(subject: Subject) -> None:
    """Free the memory that the observers of the scan hold."""
    for observer in _observers(subject):
        observer.resources.close()


def _observers(subject: Subject) -> list[ArrayFeeds]:
    """Return the observers of the scan that compute fingerprints; [] without a scan."""
    from core.publish.manifest.fingerprint_feeds import ArrayFeeds

    if subject.level != Level.DEEP:
        return []
    observers = subject.byte_scan.watches["content.fingerprints"].observers
    return [observer for observer in observers if isinstance(observer, ArrayFeeds)]


def _read_missing(subject: Subject, form: Canonical, keys: list[str]) -> dict[str, Fingerprint]:
    """Return fingerprints of tensors, computing those that the team has not computed."""
    from core.publish.manifest.fingerprint_read import read_fingerprints

    threads = subject.threads or _DEFAULT_THREADS
    fingerprints = {key: subject.shared[key] for key in keys if key in subject.shared}
    missing = [key for key in keys if key not in fingerprints]
    if missing:
        subject.store.on_open = None  # from here on bytes are counted, not files
        fingerprints |= read_fingerprints(
            form.catalog,
            subject.store,
            missing,
            threads=threads,
            memory_bytes=subject.memory_bytes,
            progress=subject.progress,
            device=subject.device,
        )
    return fingerprints


def _type_text(fingerprint: Fingerprint) -> str:
    """Format the dtype and shape of a tensor."""
    return f"{fingerprint.dtype} of shape {list(fingerprint.shape)}"


CHECKS = (Check(compare_with_reference),)
