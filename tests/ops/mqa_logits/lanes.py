"""Runs device code of CuTe DSL as Python, a thread for each lane, so that its arithmetic is tested without a GPU.

Only what :mod:`kvscout.ops.mqa_logits.cute_schedule` uses is here. Integers are 32 bits wide and raise where they
overflow. Neither memory order nor which registers hold what is modelled.
"""

import builtins
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

WARP = 32


class Int32(int):
    """An int that raises where 32 bits would not hold it. It is truncated from a float, as the device does."""

    def __new__(cls, value):
        self = super().__new__(cls, value)
        if not -(2**31) <= self < 2**31:
            raise OverflowError(f"{int(self)} is no int32")
        return self


def _checked(name):
    operation = getattr(int, name)
    return lambda self, other: Int32(operation(self, int(other)))


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Int32, f"__{_name}__", _checked(f"__{_name}__"))
    setattr(Int32, f"__r{_name}__", _checked(f"__r{_name}__"))


class Vector:
    """int32 values in memory that begins at an address."""

    def __init__(self, values, address=0):
        self.values, self.address = [Int32(x) for x in values], address

    def __getitem__(self, index):
        if index < 0:
            raise IndexError(f"{int(index)} is before the first")
        return self.values[index]

    def __add__(self, count):
        return Vector(self.values[count:], self.address + 4 * count)

    @property
    def iterator(self):
        return self

    def toint(self):
        return self.address

    def align(self, size):
        assert self.address % size == 0
        return self

    def load(self):
        return self.values


class _Meeting:
    """Lanes meet here and see what each of them brought."""

    def __init__(self, count):
        self.barrier, self.brought = threading.Barrier(count, timeout=60), [None] * count

    def exchange(self, place, value):
        self.brought[place] = value
        self.barrier.wait()
        seen = list(self.brought)
        self.barrier.wait()
        return seen


_lane = threading.local()


def run(function, lanes, cta, ctas):
    """What ``function(warp, lane)`` returns for each lane of a thread block."""
    warps = [_Meeting(WARP) for _ in range(lanes // WARP)]
    block = _Meeting(lanes)

    def one(thread):
        _lane.warp, _lane.block, _lane.thread = warps[thread // WARP], block, thread
        _lane.cta, _lane.ctas = Int32(cta), Int32(ctas)
        try:
            return function(Int32(thread // WARP), Int32(thread % WARP))
        except BaseException:
            # The others must not wait for this one.
            for meeting in (*warps, block):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(lanes) as pool:
        futures = [pool.submit(one, thread) for thread in range(lanes)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def _warp(value):
    return _lane.warp.exchange(_lane.thread % WARP, value)


def _shuffle_up(value, distance, mask_and_clamp):
    assert mask_and_clamp == 0
    lane = _lane.thread % WARP
    # The first lanes get their own.
    return _warp(value)[lane - distance if lane >= distance else lane]


def _reduce(value, kind):
    return Int32({"add": sum, "min": min, "max": max}[kind](_warp(value)))


class _Constexpr:
    def __class_getitem__(cls, of):
        return of


def _modules(reciprocal):
    arch = SimpleNamespace(
        block_idx=lambda: (_lane.cta, 0, 0),
        grid_dim=lambda: (_lane.ctas, 1, 1),
        barrier=lambda barrier_id, number_of_threads: _lane.block.exchange(_lane.thread, None),
        warp_redux_sync=_reduce,
        vote_ballot_sync=lambda vote: sum(bool(x) << i for i, x in enumerate(_warp(vote))),
        popc=lambda bits: Int32(int(bits).bit_count()),
        shuffle_sync=lambda value, lane: _warp(value)[lane],
        shuffle_sync_up=_shuffle_up,
        rcp_approx=reciprocal,
    )
    cute, cutlass = ModuleType("cutlass.cute"), ModuleType("cutlass")
    vars(cute).update(
        arch=arch, jit=lambda function: function, make_layout=lambda size: size, make_tensor=lambda vector, size: vector
    )
    vars(cutlass).update(
        cute=cute,
        Int32=Int32,
        Float32=np.float32,
        Constexpr=_Constexpr,
        const_expr=lambda value: value,
        range=lambda *bounds, unroll=1: (Int32(i) for i in range(*map(int, bounds))),
        range_constexpr=range,
        select_=lambda chosen, one, other: one if chosen else other,
        min=lambda one, other: Int32(min(one, other)),
        max=lambda one, other: Int32(max(one, other)),
    )
    return {"cutlass": cutlass, "cutlass.cute": cute}


def device_code(module, reciprocal):
    """The functions of a file of device code, by name, as Python; ``reciprocal`` is the device's approximate one."""
    package = sys.modules[module.rpartition(".")[0]]
    path = Path(package.__path__[0]) / f"{module.rpartition('.')[2]}.py"
    modules = _modules(reciprocal)

    def import_(name, *arguments):
        if name in modules:
            # `import cutlass.cute as cute` takes the name from what is returned.
            return modules["cutlass"]
        return builtins.__import__(name, *arguments)

    found = {
        "__name__": module,
        "__package__": package.__name__,
        "__builtins__": {**vars(builtins), "__import__": import_},
    }
    exec(compile(path.read_text(), str(path), "exec"), found)
    return SimpleNamespace(**{name: value for name, value in found.items() if not name.startswith("__")})
