"""A `Multiplier` in CUDA C++ (`ring.cu`): as fast as the memory is read, whatever the width.

Triton has no ring whose loads take neither registers nor a barrier of the whole program, and no warps of different duties.
NVRTC and the driver's functions come with PyTorch (cuda-bindings).
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.cuda.multiply import Product
from decode_daemon.engine.cuda.quantized import Quantized

_WARPS, _THREADS = 8, 320  # these and the next two as in ring.cu: warps that multiply; all threads
_PAD, _GROUP = 64, 32
_BLOCK_ROWS = 8
SOURCES = ("instructions.cuh", "ring.cu")
_MATRICES = frozenset({"qkv", "output", "gate_up", "down", "head"})  # fields of the weights
# So many stages that a block has a multiprocessor for itself: two on one take longer than one on each. What is left of 227 KB
# is for attention's programs.
_SHARED_BYTES = 200_000


class RingError(RuntimeError):
    """The kernels cannot be compiled, loaded or launched here: the message says why."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a stage of the ring holds of a matrix: it decides the order of a sum's terms, so every width has the same."""

    lines: int  # rows: 16 or 32
    columns: int  # a multiple of 256

    def shared_bytes(self, width: int, stages: int) -> int:
        """Return the shared memory that a block takes."""
        stage = self.lines * self.columns * 2 + width * (self.columns * 2 + _PAD)
        return stages * stage + 2 * _WARPS * width * (self.lines + 4) * 4 + 2 * stages * 8


def cut_for(outputs: int, processors: int, *, gated: bool) -> Cut:
    """Return the cut for a matrix that gives `outputs`: 32 KB a stage, of 32 rows unless tiles of 16 are shared more evenly."""

    def rounds(lines: int) -> int:
        """Return the rows of the multiprocessor that has most."""
        rows = lines // 2 if gated else lines
        return -(-outputs // (rows * processors)) * rows

    tiles = -(-outputs // (16 if gated else 32))
    return Cut(32, 512) if rounds(32) <= rounds(16) and tiles >= 0.9 * processors else Cut(16, 1024)


def pack(matrix: torch.Tensor, cut: Cut, *, gated: bool) -> torch.Tensor:
    """Return `matrix` [outputs, inputs] in the order in which `ring.cu` reads it, with rows of zeros for the last tile's rest.

    A tile's rows (with `gated`, of the first and of the second half as many) lie together, of them the columns of a stage, and
    of those each 8 rows and 32 columns. Memory beside it and the result: another matrix if rows are missing, else none.
    """
    inputs = matrix.shape[1]
    halves = matrix.chunk(2) if gated else (matrix,)
    rows = cut.lines // len(halves)
    tiles = -(-halves[0].shape[0] // rows)
    if short := tiles * rows - halves[0].shape[0]:
        halves = tuple(torch.cat([half, half.new_zeros(short, inputs)]) for half in halves)
    packed = matrix.new_empty(tiles, cut.lines * inputs)
    for start in range(0, inputs, cut.columns):
        columns = min(cut.columns, inputs - start)
        stage = packed[:, start * cut.lines : (start + columns) * cut.lines]
        blocks = stage.view(tiles, len(halves), rows // _BLOCK_ROWS, columns // _GROUP, _BLOCK_ROWS, _GROUP)
        for nth, half in enumerate(halves):
            part = half[:, start : start + columns].view(tiles, rows // _BLOCK_ROWS, _BLOCK_ROWS, columns // _GROUP, _GROUP)
            blocks[:, nth].copy_(part.transpose(2, 3))
    return packed.view(-1, inputs)


def unusable(config: LlamaConfig, device: torch.device) -> str | None:
    """Return why products of this shape cannot go through a ring on `device`, None when they can."""
    rows = {"hidden_size": config.hidden, "heads times head_dim": config.heads * config.head_dim}
    for name, inputs in (rows | {"intermediate_size": config.intermediate}).items():
        if inputs % _GROUP:
            return f"{name} is {inputs}, no multiple of {_GROUP}"
    try:
        _bindings()
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}): install what PyTorch's CUDA build asks for"
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED_BYTES)  # PyTorch 2.6
    if room < _SHARED_BYTES:
        return f"a block may have {room} bytes of shared memory, and the ring takes up to {_SHARED_BYTES}"
    return None


class _Arguments(ctypes.Structure):
    """`Arguments` of ring.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "weight", "addend", "squares", "gain", "scaled")),
        *((name, ctypes.c_void_p) for name in ("next_squares", "peaks")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("inputs", "outputs")),
    )


@dataclass(frozen=True, slots=True)
class _Kernel:
    function: Any  # of the driver
    shared_bytes: int


class Ring:
    """The `Multiplier` of one GPU."""

    name = "ring"
    x_dtype = torch.bfloat16

    def __init__(self, device: torch.device, eps: float, *, overlap: bool) -> None:
        """Compile a first kernel for `device`; the others follow when they are first launched, half a second each.

        `overlap` as in `Step`. Raises RingError, or another RuntimeError where NVRTC cannot be loaded.
        """
        self._driver, _ = _bindings()
        self._device, self._eps = device, eps
        properties = torch.cuda.get_device_properties(device)
        self._processors = properties.multi_processor_count
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._kernels: dict[tuple[int, bool, Cut], _Kernel] = {}
        self._beside: set[int] = set()
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._attributes = [attribute] if overlap else []
        compiled(self._architecture, self._expression(1, False, Cut(32, 512)))

    def packed(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a matrix as `ring.cu` reads it, a copy; see `Multiplier.packed`."""
        if field not in _MATRICES:
            return tensor
        gated = field == "gate_up"
        outputs = tensor.shape[0] // 2 if gated else tensor.shape[0]
        return pack(tensor, cut_for(outputs, self._processors, gated=gated), gated=gated)

    def cut(self, outputs: int) -> tuple[int, int]:
        """Return rows and columns of a stage; see `Multiplier.cut`."""
        cut = cut_for(outputs, self._processors, gated=False)
        return cut.lines, cut.columns

    def queue(self, width: int, product: Product) -> None:
        """Queue a product; see `Multiplier.queue`. The first of a kind cannot be captured in a graph. Raises RingError."""
        assert not isinstance(product.weight, Quantized)
        outputs, inputs, norm = product.out.shape[1], product.x.shape[1], product.next_norm
        cut = cut_for(outputs, self._processors, gated=product.gated)
        kernel = self._kernel(width, product.gated, cut)
        addend = product.bias if norm is None else product.out
        gain, scaled, squares = (norm.gain, norm.scaled, norm.squares) if norm else (None, None, None)
        tensors = (product.out, product.x, product.weight, addend, product.squares, gain, scaled, squares, product.peaks)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        arguments = _Arguments(*pointers, self._eps, inputs, outputs)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = self._driver.CUlaunchConfig()
        config.gridDimX = min(-(-outputs // (cut.lines // 2 if product.gated else cut.lines)), self._processors)
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = _THREADS, kernel.shared_bytes
        config.hStream = torch.cuda.current_stream(self._device).cuda_stream
        config.attrs, config.numAttrs = self._attributes, len(self._attributes)
        launched = self._driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(parameters), 0)
        _done(launched, f"launching a product of {width} rows, {inputs} inputs and {outputs} outputs")

    def beside(self, launched: Any) -> None:
        """Have a kernel of Triton's divide a multiprocessor's memory as these do, so that it can hold both at a time."""
        if launched.function not in self._beside:
            self._prefer_shared(self._driver.CUfunction(launched.function))
            self._beside.add(launched.function)

    def _kernel(self, width: int, gated: bool, cut: Cut) -> _Kernel:
        if (width, gated, cut) not in self._kernels:
            self._kernels[width, gated, cut] = self._loaded(width, gated, cut)
        return self._kernels[width, gated, cut]

    def _loaded(self, width: int, gated: bool, cut: Cut) -> _Kernel:
        expression, (_, size) = self._expression(width, gated, cut), self._stages(cut, width)
        image, name = compiled(self._architecture, expression)
        module = _done(self._driver.cuModuleLoadData(image), f"loading {expression}")
        function = _done(self._driver.cuModuleGetFunction(module, name), f"finding {expression}")
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        allowed = self._driver.cuFuncSetAttribute(function, attribute, size)
        _done(allowed, f"giving {expression} {size} bytes of shared memory")
        self._prefer_shared(function)
        return _Kernel(function, size)

    @staticmethod
    def _stages(cut: Cut, width: int) -> tuple[int, int]:
        """Return how many stages there are, and the shared memory that a block takes with them."""
        stages = 2
        while cut.shared_bytes(width, stages + 1) <= _SHARED_BYTES:
            stages += 1
        return stages, cut.shared_bytes(width, stages)

    @classmethod
    def _expression(cls, width: int, gated: bool, cut: Cut) -> str:
        """Return a kernel's name in C++."""
        return f"product<{width}, {str(gated).lower()}, {cut.lines}, {cut.columns}, {cls._stages(cut, width)[0]}>"

    def _prefer_shared(self, function: Any) -> None:
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _done(self._driver.cuFuncSetAttribute(function, attribute, 100), "dividing a multiprocessor's memory")


@cache
def compiled(architecture: str, expression: str, more: str = "") -> tuple[bytes, bytes]:
    """Return machine code with the kernel that `expression` names, and its name there; `more` code is for tests.

    Raises RingError with the compiler's words.
    """
    _, nvrtc = _bindings()
    source = "".join(resources.files(__package__).joinpath(name).read_text() for name in SOURCES) + more
    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"ring.cu", 0, None, None), "beginning ring.cu")
    try:
        _done(nvrtc.nvrtcAddNameExpression(program, expression.encode()), f"asking for {expression}")
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            said = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program), "reading NVRTC's log"))
            _done(nvrtc.nvrtcGetProgramLog(program, said), "reading NVRTC's log")
            raise RingError(f"ring.cu does not compile for {architecture}: {said.decode().strip()}")
        image = bytearray(_done(nvrtc.nvrtcGetCUBINSize(program), "reading machine code"))
        _done(nvrtc.nvrtcGetCUBIN(program, image), "reading machine code")
        return bytes(image), _done(nvrtc.nvrtcGetLoweredName(program, expression.encode()), f"finding {expression}")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _done(result: tuple[Any, ...], doing: str) -> Any:
    """Return what a call of the driver or of NVRTC gave; raises RingError when `doing` that failed."""
    status, *values = result
    if int(status) != 0:
        raise RingError(f"{doing} failed with {status.name}: the engine needs the driver and the NVRTC that PyTorch asks for")
    return values[0] if values else None


@cache
def _bindings() -> tuple[Any, Any]:
    """Return the driver's and NVRTC's bindings; raises ImportError."""
    from cuda.bindings import driver, nvrtc  # type: ignore[import-untyped]

    return driver, nvrtc
