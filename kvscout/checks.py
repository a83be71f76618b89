"""Argument checks whose messages name the argument, what was expected and what came."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

import torch

Args = TypeVar("Args", bound=tuple[torch.Tensor | None, ...])
Settings = TypeVarTuple("Settings")
Problem = TypeVar("Problem")

# Alignment, in bytes, that vector loads of the kernels ask of FP8 rows.
ROW_ALIGNMENT = 16

FLOAT32_MAX = torch.finfo(torch.float32).max

# Layouts that a check remembers, of a few KB each; one more, and it starts afresh.
MAX_LAYOUTS = 1024


def once_per_layout(
    *aligned: str,
) -> Callable[[Callable[[Args, *Settings], Problem]], Callable[[Args, *Settings], Problem]]:
    """Make ``check(args, *settings)`` run once per layout, and remember what it returned: most calls repeat a layout.

    A layout is all that ``check`` may look at: of each tensor of the named tuple ``args`` its type, dtype, shape,
    strides, device and torch layout, or that it is None; of float32 ones, which may be the imaginary part of a
    conjugate tensor, whether the negative bit is set; the settings and their types; and, of the fields named
    ``aligned``, the address modulo :data:`ROW_ALIGNMENT`. A failure is not remembered: the next such call raises it
    again.
    """
    float32 = torch.float32

    def decorate(check: Callable[[Args, *Settings], Problem]) -> Callable[[Args, *Settings], Problem]:
        remembered: dict[object, Problem] = {}

        @functools.wraps(check)
        def checked(args: Args, *settings: *Settings) -> Problem:
            layout: tuple[object, ...] | None
            try:
                # Every call comes through here: a list that grows takes less time than comprehensions.
                parts: list[object] = [*settings, *map(type, settings)]
                for x in args:
                    if x is None:
                        parts.append(None)
                    else:
                        dtype = x.dtype
                        parts += type(x), dtype, x.shape, x.stride(), x.device, x.layout
                        parts.append(dtype is float32 and x.is_neg())
                for name in aligned:
                    parts.append(getattr(args, name).data_ptr() % ROW_ALIGNMENT)
                layout = tuple(parts)
                problem = remembered.get(layout)
            except Exception:
                # Not a tensor, or one without strides or memory, or symbolic sizes: it is for the check to say so.
                layout = problem = None
            if problem is None:
                problem = check(args, *settings)
                if layout is not None:
                    if len(remembered) >= MAX_LAYOUTS:
                        remembered.clear()
                    remembered[layout] = problem
            return problem

        return checked

    return decorate


def tensor(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, shape and device of one argument, and that it is :func:`as_stored`.

    Args:
        name: the argument's name, as the user wrote it.
        value: what the user passed.
        shape: one entry per dimension: an int that must match, or a letter for a free size.
        dtypes: the dtype, or the dtypes, that are accepted.
        device: where it must live; None accepts any.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device, or a lazily negated view.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    accepted = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if value.dtype not in accepted:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, accepted))}, got {value.dtype}")
    # A compiler cannot look; the call that it makes an op of does.
    if not torch.compiler.is_compiling():
        as_stored(name, value)
    if not _is_shape(value.shape, shape):
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected on {device}, like the other tensors, got {value.device}")


def _is_shape(given: torch.Size, shape: Sequence[int | str]) -> bool:
    if len(given) != len(shape):
        return False
    for size, wanted in zip(given, shape, strict=True):  # noqa: SIM110 (a generator would take three times as long)
        if isinstance(wanted, int) and size != wanted:
            return False
    return True


def as_stored(name: str, value: torch.Tensor) -> None:
    """Check that a tensor's values are what lies in memory at its strides, which is all that a kernel sees."""
    if value.layout is not torch.strided or value.is_nested:
        layout = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {layout}")
    if value.is_neg():
        raise ValueError(f"{name}: expected values as they are stored, got a lazily negated view; call .resolve_neg()")


def last_dim_contiguous(name: str, value: torch.Tensor) -> None:
    """Check that neighbours in the last dimension are neighbours in memory."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tuple(value.stride())}")


def rows_aligned(name: str, value: torch.Tensor) -> None:
    """Check a contiguous last dimension, and rows that all start on a 16-byte boundary."""
    last_dim_contiguous(name, value)
    size = value.element_size()
    strides = [s for n, s in zip(value.shape[:-1], value.stride()[:-1], strict=True) if n > 1]
    if value.data_ptr() % ROW_ALIGNMENT or any(stride * size % ROW_ALIGNMENT for stride in strides):
        raise ValueError(
            f"{name}: expected rows that start on {ROW_ALIGNMENT}-byte boundaries, got strides {tuple(value.stride())} "
            f"of {size}-byte elements at an address that is {value.data_ptr() % ROW_ALIGNMENT} past one"
        )


def rows_apart(name: str, value: torch.Tensor) -> None:
    """Check a contiguous last dimension, and rows that do not overlap: what an output ``[S, N]`` needs."""
    last_dim_contiguous(name, value)
    if value.shape[0] > 1 and value.stride(0) < value.shape[1]:
        raise ValueError(
            f"{name}: expected rows at least {value.shape[1]} elements apart, got strides {tuple(value.stride())}"
        )


def elements_apart(name: str, value: torch.Tensor) -> None:
    """Check that no two elements share memory, which an output needs."""
    if value.is_contiguous():
        return
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise ValueError(f"{name}: expected elements that do not overlap, got strides {tuple(value.stride())}")
            reach += stride * (size - 1)


def number(name: str, value: object) -> None:
    """Check a number that float32 holds: neither NaN nor infinite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise ValueError(f"{name}: expected a finite number within float32's range, got {value}")


def boolean(name: str, value: object) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


NOT_SIZES = (float, bool, torch.Tensor)
"""What may equal a size or a word without being one."""


def one_of(name: str, value: object, accepted: Sequence[object]) -> None:
    """Check that a size or a word is among the accepted ones."""
    if isinstance(value, NOT_SIZES) or value not in accepted:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, accepted))}, got {value}")


def integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check an int (not a bool) in ``[low, high]``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")
