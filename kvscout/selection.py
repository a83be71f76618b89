"""From selected blocks or tokens to what ``pa_decode`` attends to: every row a sequence of its own.

:func:`tables_of_blocks` serves models that select whole blocks of tokens: the pages stay where they are, and each row
gets a block table of its own. :func:`gather_tokens` serves those that select single tokens, which no table of pages can
describe: it copies them together. Both take what ``topk_indices`` returns, and both give tables and lengths for a
``pa_decode`` of ``query_length=1`` with as many sequences as there are rows, causal or not, without a sliding window:
that would count places in the row's pages, not in the sequence.
"""

from __future__ import annotations

from .ops.selection_gather.api import Tokens, gather_tokens
from .ops.selection_tables.api import Tables, tables_of_blocks
from .ops.selection_tables.rows import NOTHING

__all__ = ["NOTHING", "Tables", "Tokens", "gather_tokens", "tables_of_blocks"]
