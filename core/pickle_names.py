"""Which names in a pickle are known to be harmless, which are known to be attacks.

Nothing is ever looked up or called, so this is not what keeps a reader safe: it is what ``ckpt`` says about a file.
"known" names stand in checkpoints that real software wrote; "dangerous" ones run commands, read files or load code
when another program unpickles the file.

Source: SAFETY.md 2.1 (names in real files), gold/FINDINGS.md 6; the deny-list follows the modules that picklescan,
fickling and modelscan name, which is never complete: everything else is "unknown".
"""

from __future__ import annotations

from typing import Literal

from core.dtypes import BY_STORAGE, DTYPES
from core.inert import Global, walk

Verdict = Literal["known", "unknown", "dangerous"]


def classify(found: Global) -> Verdict:
    """What is known of a name."""
    module, name = found.module, found.name
    if (module, name) in _KNOWN_PAIRS:
        return "known"
    head, _, attribute = name.partition(".")
    if attribute and "." not in attribute and (module, head) in _KNOWN_ENUMS and attribute.isupper():
        return "known"
    parts = [*module.split("."), *name.split(".")]
    if parts[0] in _DANGEROUS_MODULES or any(part in _DANGEROUS_PARTS for part in parts[1:]):
        return "dangerous"
    if (module, head) in _DANGEROUS_PAIRS or any(part.startswith("__") and part.endswith("__") for part in parts):
        return "dangerous"
    return "unknown"


def globals_of(tree: object) -> set[Global]:
    """Every name in an inert tree."""
    return {node for node in walk(tree) if type(node) is Global}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(table: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((module, name) for module, names in table.items() for name in names.split())


_KNOWN_ENUMS = _pairs(
    {
        "megatron.core.enums": "ModelType Fp8Recipe Fp4Recipe",
        "megatron.model.enums": "ModelType AttnMaskType AttnType LayerType",
        "megatron.core.transformer.enums": (
            "AttnBackend AttnMaskType AttnType LayerType ModelType CudaGraphScope CudaGraphModule "
            "InferenceCudaGraphScope"
        ),
        "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
        "signal": "Signals",
        "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
        "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.planner": "WriteItemType",
    }
)

_KNOWN_PAIRS = _KNOWN_ENUMS | _pairs(
    {
        "_codecs": "encode",
        "argparse": "Namespace",
        "types": "SimpleNamespace",
        "collections": "OrderedDict defaultdict deque Counter",
        "builtins": "object set frozenset bytes bytearray complex slice range dict list tuple int float str bool",
        "_operator": "or_",
        "copyreg": "_reconstructor __newobj__ __newobj_ex__",
        "datetime": "datetime date time timedelta timezone",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "uuid": "UUID",
        "random": "Random",
        "_io": "BytesIO",
        "io": "BytesIO",
        "pathlib": "PosixPath PurePosixPath WindowsPath PureWindowsPath Path",
        "pathlib._local": "PosixPath PurePosixPath WindowsPath PureWindowsPath Path",
        "numpy": "ndarray dtype bool_ float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "numpy.dtypes": (
            "Float64DType Float32DType Float16DType Int64DType Int32DType Int16DType Int8DType UInt64DType UInt32DType "
            "UInt16DType UInt8DType BoolDType"
        ),
        "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
        "torch": (
            "Size Tensor device Generator per_tensor_affine per_channel_affine strided sparse_coo sparse_csr "
            "contiguous_format channels_last preserve_format"
        ),
        "torch._C": "Generator _VariableFunctions",
        "torch._utils": (
            "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
            "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage _rebuild_nested_tensor "
            "_rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor"
        ),
        "torch._tensor": "_rebuild_from_type_v2 Tensor",
        "torch.nn.parameter": "Parameter Buffer",
        "torch.storage": "UntypedStorage TypedStorage _TypedStorage _UntypedStorage",
        "torch.serialization": "_get_layout",
        "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties ShardedTensorMetadata",
        "torch.distributed._shard.metadata": "ShardMetadata",
        "torch.distributed.checkpoint.metadata": (
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex "
            "StorageMeta"
        ),
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "torch.distributed.checkpoint._hf_utils": "_HFStorageInfo",
        "torch.distributed.checkpoint.hf_storage": "_HFStorageInfo",
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem TensorWriteData BytesIOWriteData",
        "torch.distributed.tensor": "DTensor",
        "torch.distributed.tensor._dtensor_spec": "DTensorSpec TensorMeta ShardOrderEntry",
        "torch.distributed.tensor.placement_types": "Shard Replicate Partial _StridedShard",
        "torch.distributed._tensor.placement_types": "Shard Replicate Partial _Partial DTensorSpec TensorMeta",
        "torch.distributed._tensor.api": "DTensor",
        "torch.distributed.device_mesh": "DeviceMesh",
        "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
        "megatron.core.optimizer": "OptimizerConfig",
        "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.utils.tensor_fragment": "fragment_address",
        "torch.distributed.fsdp": "ShardingStrategy",
        "torch.distributed.fsdp.api": "ShardingStrategy",
        "transformers.training_args": "TrainingArguments",
    }
)
_KNOWN_PAIRS |= {("torch", name) for name in (*DTYPES, *BY_STORAGE)}

_DANGEROUS_MODULES = _words(
    """
    os posix nt ntpath posixpath sys subprocess _posixsubprocess commands popen2 pty shutil socket _socket ssl runpy
    importlib imp zipimport pkgutil code codeop ctypes _ctypes cffi pickle _pickle cPickle dill cloudpickle joblib
    marshal shelve webbrowser platform pdb bdb timeit cProfile profile trace tracemalloc asyncio _asyncio
    multiprocessing concurrent threading _thread operator _operator inspect gc atexit tempfile glob fileinput linecache
    urllib http httplib ftplib smtplib telnetlib poplib imaplib nntplib xmlrpc socketserver requests httpx aiohttp
    logging distutils setuptools pip pydoc doctest unittest pytest test venv ensurepip sysconfig site idlelib lib2to3
    turtledemo ast symtable dis types signal resource fcntl mmap sqlite3 dbm nturl2path antigravity rlcompleter readline
    uu_decode this wsgiref crypt mailbox mailcap msilib winreg _winreg _winapi msvcrt pipes select selectors
    """
)
_DANGEROUS_PARTS = _words(
    """
    os posix sys subprocess system popen spawn execv execve eval exec compile __import__ import_module __builtins__
    __globals__ __subclasses__ __getattribute__ builtins shutil socket runpy ctypes cpp_extension hub
    """
)
_DANGEROUS_PAIRS = _pairs(
    {
        "builtins": (
            "eval exec compile open input __import__ getattr setattr delattr globals locals vars dir breakpoint "
            "memoryview exit quit help apply execfile file map filter classmethod staticmethod property type super"
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
    }
)
