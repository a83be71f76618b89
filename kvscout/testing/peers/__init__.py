"""Peers: other libraries' kernels for an op, which ``bench`` times on the same inputs in the same run as our variants.

A folder an op, a file a peer; the file's name is the peer's, and it ends in ``PEER = Peer(...)``. Adding a peer is
adding a file: nothing registers it. A file imports the library that it speaks of inside its functions only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..case import Case, Prepared
from ..compare import Budget
from ..verify import Result

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """Another library's implementation of an op.

    Attributes:
        unavailable: a sentence why it cannot run on an architecture whatever the problem (its library cannot be
            imported, it has no kernel for that GPU), or None where it can.
        refuses: a sentence why it does not serve a problem, or None where it does.
        prepare: does what the library's users do once, outside the hot path, and returns the launch that is timed. The
            launch is repeatable, capturable in a CUDA graph, and returns what the library returns.
        deliver: copies what a launch returned into the case's outputs, for the case's own check.
        tolerance: how far a problem's outputs may be from float64 where the library computes with less precision than
            is asked of our variants; None where it is judged by their budget.
        distributions: what the library may be called where it is installed.
        module: what is imported of it, without a dot: tells the version where it is a plain folder on the path.
        name: the file's stem, filled in by :func:`load`.
    """

    unavailable: Callable[[str], str | None]
    refuses: Callable[[Any], str | None]
    prepare: Callable[[Prepared], Launch]
    deliver: Callable[[Prepared, Any], None]
    tolerance: Callable[[Any], Budget | None] = lambda problem: None
    distributions: Sequence[str] = ()
    module: str = ""
    name: str = ""


def names(op: str) -> tuple[str, ...]:
    """Names of an op's peers; importing none of them."""
    try:
        folder = importlib.import_module(f"{__name__}.{op}")
    except ModuleNotFoundError as missing:
        if missing.name != f"{__name__}.{op}":
            raise
        return ()
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folder.__path__)))


def load(op: str, name: str) -> Peer:
    """The peer of an op that :func:`names` lists."""
    peer: Peer = importlib.import_module(f"{__name__}.{op}.{name}").PEER
    return replace(peer, name=name)


def import_failure(module: str) -> str | None:
    """A sentence why a module cannot be imported, or None where it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        return f"needs the Python package {missing.name!r}, which is not installed"
    # A library of kernels may fail in any way where the machine is not the one that it was built for.
    except Exception as error:
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def verify_peer(case: Case, peer: Peer, prepared: Prepared, launch: Launch) -> Result:
    """Launch a peer, copy what it returned into the case's poisoned outputs, and check those as a variant's.

    The budget alone may be the peer's own, where its ``tolerance`` gives it one.

    On a GPU the result of a graph's replay is checked, since replays are timed, and only once poison has taken the
    place of what earlier launches left there.
    """
    returned = launch()
    graph = None
    if any(output.is_cuda for output in prepared.outputs.values()):
        del returned
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = launch()
        _poison(returned)
        graph.replay()
    prepared.poison()
    peer.deliver(prepared, returned)
    found = prepared.check(peer.name)
    budget = peer.tolerance(prepared.problem)
    if budget is not None:
        found = [comparison.under(budget) for comparison in found]
    return Result(case.op, case.name, peer.name, "", tuple(found))


def _poison(returned: Any) -> None:
    for tensor in returned if isinstance(returned, tuple | list) else (returned,):
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
