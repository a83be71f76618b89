"""Messages of the argument checks: which argument, what was expected, what came."""

import re

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
    lambda: checks.one_of("heads", 8, (8, 16)),
    lambda: checks.integer("k", 1, 1, 8),
    lambda: checks.integer("k", 8, 1, 8),
    lambda: checks.integer("k", 1 << 70, 0),
]


@pytest.mark.parametrize("call", RIGHT)
def test_accepts(call):
    assert call() is None
