"""A decoder that is small in every way, and a job of it that selects: 8 pages of tokens, 4 of them at a time."""

import pytest
import torch

from kvscout.demo.job import Settings, run
from kvscout.demo.model import Decoder, Shape

SHAPE = Shape(num_layers=2, hidden=32, mlp=48, num_heads=4, num_kv_heads=2, head_dim=64, index_heads=8, index_dim=32)


@pytest.fixture
def prompt():
    return (b"Most of what is read is hardly used: score, select, attend. " * 2)[:110]


@pytest.fixture
def decoder():
    return Decoder(SHAPE, 0, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture
def finish(decoder, prompt):
    """``finish(text=..., steps=..., top_pages=...)``: a finished job, of which every row is kept."""

    def finish(text=prompt, steps=5, top_pages=4, decoder=decoder, **arguments):
        return run(decoder, Settings(SHAPE, steps, top_pages, seed=0), text, **{"prompt_rows": 1000} | arguments)

    return finish
