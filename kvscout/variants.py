"""How an op finds its implementations and picks one.

A *family* is an op's ``variants`` folder. Every file in it whose name starts with a backend (``torch_``, ``triton_``,
``cute_``) is a variant and ends in ``VARIANT = Variant(...)``. Adding a variant is adding a file: nothing registers it.
Files are imported when first needed, so that ``import kvscout`` loads neither Triton nor CuTe DSL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from . import env, tuning
from .errors import Required, UnsupportedProblem
from .kernels.cute.program import KernelUnavailable

if TYPE_CHECKING:
    from .kernels.cute.program import Program

BACKENDS = ("torch", "triton", "cute")
AUTO = "auto"


class Problem(Protocol):
    """What a variant decides on: a frozen, hashable description of a call, without its data."""

    @property
    def arch(self) -> str:
        """Architecture name from :func:`kvscout.device.arch_of`."""
        ...

    def bucket(self) -> tuning.Bucket | None:
        """What a tuned table tells apart of it (:func:`kvscout.tuning.bucket`); None where no table may be asked."""
        ...

    def __hash__(self) -> int: ...


def accepts_everything(problem: Any) -> str | None:
    """The ``refuses`` of a variant without limits."""
    return None


@dataclass(frozen=True)
class Variant:
    """One implementation of an op.

    Attributes:
        launch: ``launch(problem, config, args)`` does the work and writes into the outputs held by ``args``.
        default_config: the frozen config that ``launch`` uses for a problem when no tuned one is known.
        rank: how much this variant suits a problem; the accepting variant with the highest rank is "auto"'s choice.
            0 means never by itself. By convention torch stays below 50, Triton in 50..99, CuTe in 100..199.
        refuses: a sentence for the user why the problem is not served, or None where it is.
        space: the configs that ``verify --full`` checks and ``tune`` tries; a table's config counts where it is among
            them. Each is told from the others by its ``str``.
        lacks: a sentence why no problem at all is served here, for ``kvscout info``; ``refuses`` must say it too.
        load: ``load(problem, config)`` loads or compiles what ``launch`` will need. "auto" calls it before it settles,
            and takes another variant where it raises KernelUnavailable, which ``refuses`` must say from then on.
        programs: every CuTe DSL kernel that ``launch`` may ask for, so that ``kvscout aot`` can compile them all.
        records_grad: whether autograd would record what ``launch`` does, and must be off meanwhile. False, which saves
            microseconds a call, is for a ``launch`` whose only torch operations are views and new tensors.
        name: the file's stem, filled in by the family.
    """

    launch: Callable[[Any, Any, Any], None]
    default_config: Callable[[Any], Any]
    rank: Callable[[Any], int]
    refuses: Callable[[Any], str | None] = accepts_everything
    space: Callable[[Any], Iterable[Any]] | None = None
    lacks: Callable[[], str | None] | None = None
    load: Callable[[Any, Any], object] | None = None
    programs: Callable[[], Iterable[Program]] | None = None
    records_grad: bool = True
    name: str = ""
    summary: str = ""

    def configs(self, problem: Any) -> list[Any]:
        """Every config worth trying for ``problem``, the default one first, each once."""
        default = self.default_config(problem)
        others = [] if self.space is None else [config for config in self.space(problem) if config != default]
        return [default, *others]


class Choice(NamedTuple):
    """A variant and the config it will run with."""

    variant: Variant
    config: Any

    def launch(self, problem: Any, args: Any) -> None:
        """Run the variant on ``args``, whose first field is a tensor, on that tensor's device."""
        if self.variant.records_grad and torch.is_grad_enabled():
            with torch.no_grad():
                return self.launch(problem, args)
        device = args[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.variant.launch(problem, self.config, args)
        else:
            self.variant.launch(problem, self.config, args)


def _backend_refusal(backend: str, arch: str) -> str | None:
    """Why a whole backend cannot run on ``arch``, judged without importing it."""
    if backend == "triton" and not arch.startswith(("sm_", "gfx")) and not (arch == "cpu" and env.triton_interpret()):
        return f"Triton kernels need a GPU (or TRITON_INTERPRET=1, for tests); these tensors are on {arch}"
    if backend == "cute" and arch != "sm_90":
        return f"CuTe DSL kernels are written for sm_90 (H100, H200); this is {arch}"
    return None


def _look_for_prepared_kernels() -> None:
    """Have Triton look for kernels that were compiled ahead of time; one whose inner parts have moved does without."""
    try:
        from .kernels import triton_store
    except ImportError:
        if env.triton_aot_only():
            raise
    else:
        triton_store.install()


_OBSERVERS: list[Counter[tuple[str, str]]] = []


@contextlib.contextmanager
def observe() -> Iterator[Counter[tuple[str, str]]]:
    """Count, by op and variant, what every family chooses while the block runs."""
    chosen: Counter[tuple[str, str]] = Counter()
    _OBSERVERS.append(chosen)
    try:
        yield chosen
    finally:
        _OBSERVERS[:] = [other for other in _OBSERVERS if other is not chosen]


@dataclass(frozen=True)
class Family:
    """All variants of one op: the files of ``<package>.variants``."""

    op: str
    package: str
    _loaded: dict[str, Variant | str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """Names of all variants, torch first, then Triton, then CuTe; importing none of them."""
        folder = importlib.import_module(f"{self.package}.variants")
        found = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
        return tuple(name for backend in BACKENDS for name in found if name.startswith(backend + "_"))

    def load(self, name: str) -> Variant | str:
        """The variant called ``name``, or the sentence why it cannot be imported here (a missing dependency)."""
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    def _import(self, name: str) -> Variant | str:
        if name not in self.names:
            raise ValueError(f"variant: {self.op} has no variant {name!r}; it has {', '.join(self.names)}, and 'auto'")
        try:
            module = importlib.import_module(f"{self.package}.variants.{name}")
        except ModuleNotFoundError as missing:
            # A missing file of our own is a defect and must be seen; a missing optional dependency is a reason.
            if missing.name is None or missing.name.partition(".")[0] == __package__.partition(".")[0]:
                raise
            return f"needs the Python package {missing.name!r}, which is not installed"
        if name.startswith("triton_") and not env.triton_interpret():
            _look_for_prepared_kernels()
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        variant: Variant = module.VARIANT
        return replace(variant, name=name, summary=summary)

    def unavailable(self, name: str, arch: str) -> str | None:
        """Why ``name`` cannot run on ``arch`` whatever the problem, or None where it can."""
        refusal = self._not_importable(name, arch)
        if refusal is None:
            variant = self.load(name)
            assert isinstance(variant, Variant)
            refusal = None if variant.lacks is None else variant.lacks()
        return refusal

    def _not_importable(self, name: str, arch: str) -> str | None:
        refusal = _backend_refusal(name.partition("_")[0], arch)
        if refusal is None:
            loaded = self.load(name)
            refusal = loaded if isinstance(loaded, str) else None
        return refusal

    def refusal(self, name: str, problem: Problem) -> str | None:
        """Why ``name`` does not serve ``problem``, or None where it does."""
        refusal = self._not_importable(name, problem.arch)
        if refusal is None:
            variant = self.load(name)
            assert isinstance(variant, Variant)
            refusal = variant.refuses(problem)
        return refusal

    def serving(self, problem: Problem) -> Iterator[Variant]:
        """Every variant that serves ``problem``."""
        for name in self.names:
            if self.refusal(name, problem) is None:
                variant = self.load(name)
                assert isinstance(variant, Variant)
                yield variant

    def choose(self, problem: Problem, variant: str = AUTO) -> Choice:
        """The variant and config for ``problem``; memoised.

        An explicit ``variant`` wins over the environment, which wins over tuned tables, which win over the rule: the
        highest rank, with its default config. What was asked for by name either runs, with its default config, or
        raises: it never falls back to another variant.

        Raises:
            UnsupportedProblem: the named variant, or every variant, refuses the problem, or with KVSCOUT_AOT_ONLY the
                kernel of the variant that "auto" would take is not there.
            ValueError: there is no variant of that name.
        """
        if not isinstance(variant, str):
            raise TypeError(f"variant: expected a str, got {type(variant).__name__}")
        requested = variant
        if variant == AUTO:
            requested = env.variant_override(self.op)
            if requested != AUTO and requested not in self.names:
                raise ValueError(
                    f"{env.variant_variable(self.op)}: {self.op} has no variant {requested!r}; "
                    f"it has {', '.join(self.names)}, and 'auto'"
                )
        choice = self._choose(problem, requested)
        for chosen in _OBSERVERS:
            chosen[self.op, choice.variant.name] += 1
        return choice

    def _automatic(self, arch: str) -> Sequence[str]:
        """What "auto" looks at. On the CPU that is plain torch: interpreted Triton is for tests, and slow."""
        return [name for name in self.names if arch != "cpu" or name.startswith("torch_")]

    def candidates(self, problem: Problem) -> list[Variant]:
        """What "auto" may take for ``problem``, the rule's own choice first."""
        names = [name for name in self._automatic(problem.arch) if self.refusal(name, problem) is None]
        variants = [v for name in names if isinstance(v := self.load(name), Variant) and v.rank(problem) > 0]
        return sorted(variants, key=lambda v: -v.rank(problem))

    @functools.cached_property
    def _choose(self) -> Callable[[Problem, str], Choice]:
        @functools.lru_cache(maxsize=8192)
        def choose(problem: Problem, requested: str) -> Choice:
            if requested == AUTO and (tuned := self._tuned(problem)) is not None:
                return tuned
            while True:
                choice = self._best(problem, requested)
                variant, config = choice
                if requested != AUTO or variant.load is None:
                    return choice
                try:
                    variant.load(problem, config)
                    return choice
                except KernelUnavailable as error:
                    refusal = self.refusal(variant.name, problem)
                    if refusal is None:
                        raise
                    if not isinstance(refusal, Required):
                        warnings.warn(f"{self.op}: 'auto' does without {variant.name}: {error}", stacklevel=3)

        return choose

    def _tuned(self, problem: Problem) -> Choice | None:
        """What a tuned table has for ``problem``, or None where it has nothing that "auto" could take here."""
        entry = tuning.entry(self.op, self.package, problem)
        if entry is None:
            return None
        if entry.variant not in self._automatic(problem.arch):
            tuning.warn(f"{self.op}: {entry.variant} is tuned and not used: it is none of those that auto takes here")
            return None
        variant = self.load(entry.variant)
        if isinstance(variant, str) or self.refusal(entry.variant, problem) is not None or variant.rank(problem) <= 0:
            return None
        config = next((config for config in variant.configs(problem) if str(config) == entry.config), None)
        if config is None:
            tuning.warn(f"{self.op}: {entry.variant} is tuned and not used: {entry.config} is none of its configs here")
            return None
        try:
            if variant.load is not None:
                variant.load(problem, config)
        except KernelUnavailable as error:
            tuning.warn(f"{self.op}: {entry.variant} with {entry.config} is tuned and not used: {error}")
            return None
        return Choice(variant, config)

    def _best(self, problem: Problem, requested: str) -> Choice:
        if requested != AUTO:
            self.load(requested)
        names = self._automatic(problem.arch) if requested == AUTO else (requested,)
        refusals = {name: self.refusal(name, problem) for name in names}
        able = [name for name in names if refusals[name] is None or isinstance(refusals[name], Required)]
        variants = [v for name in able if isinstance(v := self.load(name), Variant)]
        if requested == AUTO:
            variants = [v for v in variants if v.rank(problem) > 0]
        if not variants:
            asked = self.names if requested == AUTO else (requested,)
            reasons = {name: self.refusal(name, problem) or "runs only when asked for by name" for name in asked}
            raise UnsupportedProblem(self.op, problem, requested, reasons)
        best = max(variants, key=lambda v: v.rank(problem))
        if refusal := refusals[best.name]:
            raise UnsupportedProblem(self.op, problem, requested, {best.name: refusal})
        return Choice(best, best.default_config(problem))
