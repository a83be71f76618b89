"""Messages of the argument checks: which argument, what was expected, what came."""

import re
from typing import NamedTuple

import pytest
import torch

from kvscout import checks

X = torch.zeros(2, 3)

WRONG = [
    (lambda: checks.tensor("q", [1.0], ("S",), torch.float32), TypeError, "q: expected a torch.Tensor, got list"),
    (lambda: checks.tensor("q", None, ("S",), torch.float32), TypeError, "q: expected a torch.Tensor, got NoneType"),
    (
        lambda: checks.tensor("q", X, ("S", "D"), torch.int32),
        TypeError,
        "q: expected dtype torch.int32, got torch.float32",
    ),
    (
        lambda: checks.tensor("q", X, ("S", "D"), (torch.float16, torch.bfloat16)),
        TypeError,
        "q: expected dtype torch.float16 or torch.bfloat16, got torch.float32",
    ),
    (lambda: checks.tensor("q", X, ("S",), torch.float32), ValueError, "q: expected shape [S], got [2, 3]"),
    (lambda: checks.tensor("q", X, ("S", 4), torch.float32), ValueError, "q: expected shape [S, 4], got [2, 3]"),
    (lambda: checks.tensor("q", X[0, 0], ("S",), torch.float32), ValueError, "q: expected shape [S], got []"),
    (
        lambda: checks.tensor("q", X, ("S", 3), torch.float32, torch.device("meta")),
        ValueError,
        "q: expected on meta, like the other tensors, got cpu",
    ),
    (
        lambda: checks.last_dim_contiguous("w", X.T),
        ValueError,
        "w: expected a contiguous last dimension, got strides (1, 3)",
    ),
    (
        lambda: checks.rows_aligned("k", X),
        ValueError,
        "k: expected rows that start on 16-byte boundaries, "
        "got strides (3, 1) of 4-byte elements at an address that is 0 past one",
    ),
    (
        lambda: checks.rows_aligned("k", torch.zeros(2, 8)[:, 1:5]),
        ValueError,
        "k: expected rows that start on 16-byte boundaries, "
        "got strides (8, 1) of 4-byte elements at an address that is 4 past one",
    ),
    (lambda: checks.rows_aligned("k", X.T), ValueError, "k: expected a contiguous last dimension, got strides (1, 3)"),
    (
        lambda: checks.tensor("w", torch.nested.nested_tensor([X, X]), ("S", "H", "D"), torch.float32),
        TypeError,
        "w: expected a dense tensor, got a nested one",
    ),
    (
        lambda: checks.as_stored("w", torch.nested.nested_tensor([X, X])),
        TypeError,
        "w: expected a dense tensor, got a nested one",
    ),
    (
        lambda: checks.as_stored("w", X.to_sparse_csr()),
        TypeError,
        "w: expected a dense tensor, got one of layout torch.sparse_csr",
    ),
    (
        lambda: checks.as_stored("w", torch.complex(X, X).conj().imag),
        ValueError,
        "w: expected values as they are stored, got a lazily negated view; call .resolve_neg()",
    ),
    (lambda: checks.one_of("heads", 7, (8, 16)), ValueError, "heads: expected one of 8, 16, got 7"),
    (lambda: checks.integer("k", 1.0, 0), TypeError, "k: expected an int, got float"),
    (lambda: checks.integer("k", True, 0), TypeError, "k: expected an int, got bool"),
    (lambda: checks.integer("k", -1, 0), ValueError, "k: expected at least 0, got -1"),
    (lambda: checks.integer("k", 9, 1, 8), ValueError, "k: expected from 1 to 8, got 9"),
    (lambda: checks.integer("k", 0, 1, 8), ValueError, "k: expected from 1 to 8, got 0"),
]


@pytest.mark.parametrize(("call", "kind", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_message(call, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call()


RIGHT = [
    lambda: checks.tensor("q", X, ("S", 3), (torch.int32, torch.float32), torch.device("cpu")),
    lambda: checks.tensor("q", torch.zeros(0, 3), ("S", 3), torch.float32),
    lambda: checks.tensor("q", torch.zeros(()), (), torch.float32),
    lambda: checks.last_dim_contiguous("w", X[:, :1].T.T),
    lambda: checks.last_dim_contiguous("w", X.T[:, :1]),
    lambda: checks.rows_aligned("k", torch.zeros(4, 8)[::2, 4:]),
    # A dimension of one element has no stride that matters.
    lambda: checks.rows_aligned("k", torch.zeros(4, 3)[:1]),
    lambda: checks.as_stored("w", X.T),
    lambda: checks.as_stored("w", torch.complex(X, X).conj().imag.resolve_neg()),
    lambda: checks.one_of("heads", 8, (8, 16)),
    lambda: checks.integer("k", 1, 1, 8),
    lambda: checks.integer("k", 8, 1, 8),
    lambda: checks.integer("k", 1 << 70, 0),
]


@pytest.mark.parametrize("call", RIGHT)
def test_accepts(call):
    assert call() is None


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor | None = None


BYTES = torch.zeros(64, dtype=torch.uint8)
PAIR = Pair(BYTES[:32], BYTES[:32])

OTHER_LAYOUTS = {
    "dtype": (Pair(BYTES[:32].view(torch.int8), PAIR.b), True),
    "shape": (Pair(BYTES[:31], PAIR.b), True),
    "strides": (Pair(PAIR.a, BYTES[::2]), True),
    "device": (Pair(PAIR.a, torch.empty(32, dtype=torch.uint8, device="meta")), True),
    "type": (Pair(PAIR.a, torch.nn.Parameter(PAIR.b, requires_grad=False)), True),
    "none": (Pair(PAIR.a), True),
    "address": (Pair(BYTES[8:40], PAIR.b), True),
    "setting": (PAIR, False),
    "type of a setting": (PAIR, 1),
}


class TestOncePerLayout:
    @pytest.fixture
    def seen(self):
        return []

    @pytest.fixture
    def check(self, seen):
        """A check that notes its calls, and whose first tensor must be one of bytes and not empty."""

        @checks.once_per_layout("a")
        def check(args, setting):
            seen.append((args, setting))
            checks.tensor("a", args.a, ("N",), (torch.uint8, torch.int8))
            checks.integer("a: size N", args.a.shape[0], 1)
            return f"problem {len(seen)}"

        return check

    def test_a_layout_is_checked_once(self, check, seen):
        assert check(PAIR, True) == check(Pair(torch.ones_like(PAIR.a), PAIR.b), True) == "problem 1"
        # The check looks at the address of the first tensor alone.
        assert check(Pair(PAIR.a, BYTES[1:33]), True) == "problem 1"
        assert len(seen) == 1

    @pytest.mark.parametrize(("args", "setting"), OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
    def test_another_layout_is_checked(self, check, seen, args, setting):
        check(PAIR, True)
        assert check(args, setting) == check(args, setting) == "problem 2"
        assert seen[1] == (args, setting)
        assert check(PAIR, True) == "problem 1"

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (Pair([1]), "a: expected a torch.Tensor, got list"),
            (Pair(None), "a: expected a torch.Tensor, got NoneType"),
            (Pair(BYTES.float()), "a: expected dtype torch.uint8 or torch.int8, got torch.float32"),
            (Pair(BYTES[:0]), "a: size N: expected at least 1, got 0"),
        ],
    )
    def test_a_failure_is_the_check_s_own_every_time(self, check, args, message):
        check(PAIR, True)
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$") as raised:
                check(args, True)
            assert raised.value.__context__ is None

    def test_what_has_no_layout_is_always_checked(self, check, seen):
        for args, setting in ((PAIR, []), (Pair(PAIR.a, "b"), True)):
            seen.clear()
            check(args, setting)
            check(args, setting)
            assert len(seen) == 2

    def test_a_sparse_tensor_is_not_taken_for_a_dense_one(self, check):
        check(PAIR, True)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"^a: expected a dense tensor, got one of layout torch.sparse_coo"):
                check(Pair(PAIR.a.to_sparse(), PAIR.b), True)

    def test_a_lazily_negated_view_is_another_layout(self, check, seen):
        floats = torch.ones(8)
        check(Pair(PAIR.a, floats), True)
        check(Pair(PAIR.a, torch._neg_view(floats)), True)
        check(Pair(PAIR.a, floats), True)
        assert [args.b.is_neg() for args, _ in seen] == [False, True]

    def test_memory_is_bounded(self, check, monkeypatch):
        monkeypatch.setattr(checks, "MAX_LAYOUTS", 2)
        assert [check(Pair(BYTES[:n]), True) for n in (1, 2, 1, 3, 3, 1)] == [
            "problem 1", "problem 2", "problem 1", "problem 3", "problem 3", "problem 4",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "strides", "apart"),
    [
        ((3, 4), (4, 1), True), ((3, 4), (1, 3), True), ((3, 4), (9, 2), True), ((1, 4), (0, 1), True),
        ((0, 4), (0, 1), True),
        ((3, 4), (0, 1), False), ((3, 4), (3, 1), False), ((2, 3, 4), (4, 4, 1), False), ((2, 3, 4), (12, 4, 1), True),
    ],
)  # fmt: skip
def test_elements_apart(shape, strides, apart):
    value = torch.zeros(64).as_strided(shape, strides)
    if apart:
        checks.elements_apart("out", value)
    else:
        with pytest.raises(ValueError, match=r"^out: expected elements that do not overlap, got strides"):
            checks.elements_apart("out", value)
