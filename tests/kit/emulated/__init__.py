"""ring.cu itself, run on a CPU thread by thread: what it computes, and that it waits for all it reads."""

import ctypes
import subprocess
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import torch

from decode_daemon.engine.cuda import ring
from decode_daemon.engine.cuda.ring import Cut

_HERE = Path(__file__).parent


class _Before(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("values", ctypes.c_void_p))


class EmulatedRing:
    """Kernels of ring.cu for a CPU."""

    def __init__(self, folder: Path, kernels: Iterable[tuple[int, bool, Cut]], edit: tuple[str, str] | None = None) -> None:
        """Compile `kernels` (width, gated, cut) in `folder`; `edit` replaces a piece of ring.cu, to see that it is missed."""
        code = resources.files("decode_daemon.engine.cuda").joinpath("ring.cu").read_text()
        if edit is not None:
            assert edit[0] in code
            code = code.replace(*edit)
        text = (_HERE / "instructions.h").read_text() + code
        text += "struct Before { void* to; i64 bytes; const void* values; };\n"
        self._names = {}
        for nth, kernel in enumerate(kernels):
            self._names[kernel] = name = f"kernel_{nth}"
            text += (
                f'extern "C" const char* {name}(const Arguments* a, const Before* before, int count, int grid, u32 seed) {{\n'
                f"    emulated::run(grid, THREADS, seed, [=] {{ {ring.Ring._expression(*kernel)}(*a); }}, [=] {{\n"
                "        for (int n = 0; n < count; ++n) std::memcpy(before[n].to, before[n].values, before[n].bytes);\n"
                "    });\n    return emulated::failure;\n}\n"
            )
        source, library = folder / "ring.cpp", folder / "ring.so"
        source.write_text(text)
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True, capture_output=True, timeout=120)
        self._library = ctypes.CDLL(str(library))

    def run(
        self,
        kernel: tuple[int, bool, Cut],
        tensors: dict[str, torch.Tensor],
        late: Iterable[str],
        *,
        outputs: int,
        eps: float,
        grid: int,
        seed: int,
    ) -> str:
        """Compute one product; return what went wrong, if anything.

        `tensors` by the names of `Arguments`. What those in `late` hold is not a number until the kernel before has ended.
        """
        values = {name: tensors[name].clone() for name in late}
        for name in values:
            tensors[name].view(torch.uint8).fill_(0xFF)
        before = (_Before * len(values))(
            *(
                _Before(tensors[name].data_ptr(), value.numel() * value.element_size(), value.data_ptr())
                for name, value in values.items()
            )
        )
        names = [field[0] for field in ring._Arguments._fields_ if field[1] is ctypes.c_void_p]
        pointers = {name: tensors[name].data_ptr() for name in names if name in tensors}
        arguments = ring._Arguments(**pointers, eps=eps, inputs=tensors["x"].shape[1], outputs=outputs)
        function = getattr(self._library, self._names[kernel])
        function.restype = ctypes.c_char_p
        words: bytes = function(ctypes.byref(arguments), before, len(before), grid, seed)
        return words.decode()
