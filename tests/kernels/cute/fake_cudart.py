"""A CUDA runtime that launches nothing, and vectors that say they lie on its device.

With both, the host code of a compiled kernel runs on a machine without a GPU, up to the launch and what it asks for.
"""

import ctypes
import re
import subprocess

LAUNCH = """
#include <stddef.h>
struct config { unsigned grid[3], block[3]; size_t shared; void *stream, *attributes; unsigned count; };
struct config launched;
int result = 0;
int cudaLaunchKernelExC(const struct config *config, const void *kernel, void **arguments) {
    launched = *config;
    return result;
}
const char *cudaGetErrorString(int code) { return code == 719 ? "unspecified launch failure" : "another error"; }
const char *cudaGetErrorName(int code) { return "cudaErrorName"; }
"""


class Config(ctypes.Structure):
    """What a launch was asked for."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def build(library, folder, without=()):
    """Compile a runtime that has every function the library may call; all but the launch succeed and do nothing."""
    undefined = subprocess.run(["nm", "-D", "-u", library], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"\bU (cuda\w+)", undefined)) - set(re.findall(r"\b(cuda\w+)\(", LAUNCH)) - set(without)
    source, path = folder / "cudart.c", folder / "libcudart.so.99"
    source.write_text(LAUNCH + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


class _Tensor(ctypes.Structure):
    """``DLManagedTensor`` with what it holds."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Vector:
    """float32 ``[n]``, by what DLPack says on the first CUDA device."""

    CUDA, FLOAT = 2, 2

    def __init__(self, n):
        self.data, self.shape, self.strides = (ctypes.c_float * n)(), ctypes.c_int64(n), ctypes.c_int64(1)
        data, shape, strides = map(ctypes.addressof, (self.data, self.shape, self.strides))
        self.tensor = _Tensor(data, self.CUDA, 0, 1, self.FLOAT, 32, 1, shape, strides, 0, None, None)

    def __dlpack_device__(self):
        return self.CUDA, 0

    def __dlpack__(self, **options):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return capsule(ctypes.addressof(self.tensor), b"dltensor", None)
