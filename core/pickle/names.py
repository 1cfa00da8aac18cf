"""Judge a name in a pickle by what it is and by what the pickle does with it.

The safety of the reader does not depend on these verdicts, because it never looks up or calls a
name. They are what ``ckpt`` reports about a file that other programs would unpickle.

- ``known``: a constructor of plain data (``pickle/calls.toml``), which conversions keep.
- ``unknown``: harmless to load or only mentioned, but not understood by conversions; or of an
  unknown module (``known_packages``), which only its user can judge.
- ``dangerous``: a callable of a known package that is called and is not on the list of harmless
  callables, and any name that runs commands, reads files or loads code. The list of such names
  follows the modules that picklescan, fickling and modelscan list. No such list is ever complete,
  so it does not decide what may be called.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from core.pickle.call_table import constructor
from core.pickle.inert import Global, walk
from core.pickle.uses import How, Use

Verdict = Literal["known", "unknown", "dangerous"]


_SCRIPT = "__torch__"
"""The module of TorchScript's own classes, which Python never imports."""


def judge(use: Use) -> Verdict:
    """Return the verdict on one use of a name."""
    return classify(use.name, use.how)


@lru_cache(maxsize=1 << 16)
def classify(name: Global, how: How = "named") -> Verdict:
    """Return the verdict on a name.

    Args:
        how: what the pickle does with the name; by default it only mentions it.
    """
    from core.pickle.known_packages import is_known_package

    if how == "unread":
        return "dangerous"
    if name.module.partition(".")[0] == _SCRIPT:
        return "unknown"
    # The table comes before the list of attacks: it lists harmless names of dangerous modules.
    verdict = _verdict_of_table(name, how)
    if verdict is not None:
        return verdict
    if _is_known_attack(name):
        return "dangerous"
    if how == "named":
        return "unknown"
    # A call: callables of known packages would be in the table if they were harmless.
    if how == "changed" or is_known_package(name.module):
        return "dangerous"
    # A dotted name may lead through another module (``tools.os.system``) unless it passes classes.
    *heads, _ = name.name.split(".")
    is_in_class = all(part.lstrip("_")[:1].isupper() for part in heads)
    return "unknown" if is_in_class else "dangerous"


def _verdict_of_table(name: Global, how: How) -> Verdict | None:
    """Return the verdict on a use that the table of constructors permits; None for any other."""
    permissions = constructor(name.module, name.name)
    if permissions is not None and permissions.allows(how):
        return "known" if permissions.is_data else "unknown"
    # A member of an enumeration, such as ``Color.RED``.
    enum_name, _, member = name.name.partition(".")
    if how == "named" and member.isupper() and "." not in member:
        enum = constructor(name.module, enum_name)
        return "known" if enum is not None and enum.is_enum else None
    return None


def is_foreign(use: Use) -> bool:
    """Return whether only the user can judge a use: not dangerous, but of an unknown module."""
    from core.pickle.known_packages import is_known_package

    return not is_known_package(use.name.module) and judge(use) == "unknown"


def dangerous_uses(uses: Iterable[Use]) -> set[Use]:
    """Return the uses that make a pickle dangerous to load."""
    return {use for use in uses if judge(use) == "dangerous"}


def globals_of(tree: object) -> set[Global]:
    """Return the names of all classes and functions in an inert tree."""
    return {node for node in walk(tree) if type(node) is Global}


def _is_known_attack(name: Global) -> bool:
    """Return whether a name has no legitimate use in a pickle, not even to be mentioned."""
    from core.pickle.known_packages import is_known_package

    modules = name.module.split(".")
    parts = name.name.split(".")
    # Modules inside a known package count too: ``package.os`` may be the module ``os``.
    inner = modules[1:] if is_known_package(name.module) else []
    if modules[0] in _DANGEROUS_MODULES or any(
        part in _DANGEROUS_PARTS for part in (*inner, *parts)
    ):
        return True
    # Special methods and attributes lead out of any class; only the module ``__main__`` is usual.
    own_modules = modules[1:] if modules[0] == "__main__" else modules
    is_special = any(
        part.startswith("__") and part.endswith("__") for part in (*own_modules, *parts)
    )
    return is_special or (name.module, parts[0]) in _DANGEROUS_PAIRS


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DANGEROUS_MODULES = _words(
    """
    os posix nt ntpath posixpath sys subprocess _posixsubprocess commands popen2 pty shutil
    socket _socket ssl runpy importlib imp zipimport pkgutil code codeop ctypes _ctypes cffi
    pickle _pickle cPickle dill cloudpickle joblib marshal shelve webbrowser platform pdb bdb
    timeit cProfile profile trace tracemalloc asyncio _asyncio multiprocessing concurrent
    threading _thread operator _operator inspect gc atexit tempfile glob fileinput linecache
    urllib http httplib ftplib smtplib telnetlib poplib imaplib nntplib xmlrpc socketserver
    requests httpx aiohttp logging distutils setuptools pip pydoc doctest unittest pytest test
    venv ensurepip sysconfig site idlelib lib2to3 turtledemo ast symtable dis types signal
    resource fcntl mmap sqlite3 dbm nturl2path antigravity rlcompleter readline uu_decode this
    wsgiref crypt mailbox mailcap msilib winreg _winreg _winapi msvcrt pipes select selectors
    """
)
_DANGEROUS_PARTS = _words(
    """
    os posix sys subprocess system popen spawn execv execve eval exec compile __import__
    import_module __builtins__ __globals__ __subclasses__ __getattribute__ builtins shutil
    socket runpy ctypes cpp_extension hub
    """
)
_DANGEROUS_PAIRS = frozenset(
    (module, name)
    for module, names in {
        "builtins": (
            "eval exec compile open input __import__ getattr setattr delattr globals locals vars "
            "dir breakpoint memoryview exit quit help apply execfile file map filter classmethod "
            "staticmethod property type super"
        ),
        "functools": "partial partialmethod reduce",
        "io": "open open_code FileIO TextIOWrapper",
        "_io": "open open_code FileIO TextIOWrapper",
        "codecs": "open",
        "copyreg": "add_extension pickle",
        "torch": "load save compile classes ops",
        "torch.serialization": "load save",
        "torch.jit": "load CompilationUnit",
        "torch.package": "PackageImporter",
        "numpy": "load fromfile memmap genfromtxt loadtxt save savetxt",
        "numpy.testing._private.utils": "runstring",
        "numpy.f2py": "compile",
        "pandas": "read_pickle eval",
        "collections": "namedtuple",
    }.items()
    for name in names.split()
)
