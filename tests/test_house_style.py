"""What the linters cannot see: host code beside kernels is typed, and every file can be read at a sitting."""

import ast

import pytest

MAX_LINES = 700


@pytest.fixture(scope="module")
def sources(root):
    """Every Python file of the package by its path, parsed."""
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in (root / "kvscout").rglob("*.py")}


def is_kernel(function):
    """Whether a function is decorated for Triton or CuTe DSL (``@triton.jit``, ``@cute.kernel``, ...)."""
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list}
    return bool(decorators & {"triton.jit", "cute.jit", "cute.kernel", "dsl_user_op"})


def host_functions(node):
    """Every function below ``node`` that is no kernel; what a kernel nests belongs to the kernel."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_kernel(child):
                continue
            yield child
        yield from host_functions(child)


def untyped(function):
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    missing = [a.arg for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
    return missing + ["return"] * (function.returns is None)


def test_host_code_is_typed(sources):
    found = {f"{path}:{f.lineno} {f.name}": untyped(f) for path, tree in sources.items() for f in host_functions(tree)}
    assert len(found) > 50
    assert not {place: missing for place, missing in found.items() if missing}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def f(a, *b, c: int = 0, **d): pass", ["a", "b", "d", "return"]),
        ("def f(a: int) -> None: pass", []),
        ("class A:\n  def f(self) -> None: pass", []),
        ("@triton.jit\ndef f(a, B: tl.constexpr): pass", None),
        ("@triton.jit(noinline=True)\ndef f(a): pass", None),
    ],
)
def test_untyped_functions_are_seen(source, missing):
    assert [untyped(f) for f in host_functions(ast.parse(source))] == ([] if missing is None else [missing])


def test_files_can_be_read_at_a_sitting(root):
    files = [path for folder in ("kvscout", "tests", "docs") for path in (root / folder).rglob("*.py")]
    long = {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > MAX_LINES}
    assert files
    assert not long
