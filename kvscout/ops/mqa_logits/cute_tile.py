"""The shape of the Hopper kernel's work: which part of the logits a thread block, a warpgroup and a thread compute.

A *tile* is ``stage_keys`` keys times the ``block_rows`` query rows of a block. A warpgroup multiplies 64 keys (the
rows of its accumulator) by the heads of ``rows`` query rows (its ``columns``). The two warpgroups of a thread block
take either different rows of the same keys (``split="rows"``) or different keys of the same rows (``split="keys"``).

Columns are ordered so that the sum over heads stays in a thread: ``quad_rows`` query rows are interleaved head pair by
head pair, column ``2 * (pair * quad_rows + row) + e`` being head ``2 * pair + e``. A thread's columns (two in every
eight) then all belong to one row; with fewer than four rows, ``row_lanes`` neighbours of a quad share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

KEYS = 64
"""Keys of one matrix instruction."""
COST_KEYS = 16
"""Keys of a row block that cost 1 in the schedule."""
MAX_COLUMNS = 256
"""Columns of one matrix instruction, at most."""
MAX_BLOCK_ROWS = 32
"""Query rows of a thread block, at most: a lane each."""
WARPGROUPS = 2
"""Warpgroups that multiply; a third one loads and fills."""
THREADS = 384

TASK_WORDS = 8
"""Integers that describe a task; see :class:`~.cute_launch.Shared`."""

FILL_FLOATS = 2048
"""Length of the run of -inf in shared memory that the fill copies out."""


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for.

    Attributes:
        heads: H.
        dim: D.
        rows: query rows of a warpgroup; a power of two.
        split: ``"rows"`` or ``"keys"``: what the two warpgroups divide among them.
        stage_keys: keys of a pipeline stage, and of a tile of the schedule.
        kv_stages: pipeline stages of keys.
        block_cost: what loading a block's queries is charged in the schedule, in units of 16 keys.
    """

    heads: int
    dim: int
    rows: int
    split: str
    stage_keys: int
    kv_stages: int
    block_cost: int

    def __post_init__(self) -> None:
        if self.halves < 1 or self.block_rows > MAX_BLOCK_ROWS or self.columns > MAX_COLUMNS:
            raise ValueError(f"no kernel for {self}")

    @property
    def name(self) -> str:
        """Unique, and a legal symbol."""
        shape = f"h{self.heads}_d{self.dim}_{self.split}{self.rows}"
        return f"mqa_logits_{shape}_keys{self.stage_keys}x{self.kv_stages}_cost{self.block_cost}"

    @property
    def columns(self) -> int:
        """Columns of a warpgroup's accumulator."""
        return self.rows * self.heads

    @property
    def query_tiles(self) -> int:
        """Query tiles of a thread block: one that both warpgroups share, or one each."""
        return WARPGROUPS if self.split == "rows" else 1

    @property
    def block_rows(self) -> int:
        """Query rows of a thread block."""
        return self.rows * self.query_tiles

    @property
    def tile_cost(self) -> int:
        """Cost of a tile in the schedule."""
        return self.stage_keys // COST_KEYS

    @property
    def quad_rows(self) -> int:
        """Query rows that the four lanes of a quad hold at once."""
        return min(self.rows, 4)

    @property
    def groups(self) -> int:
        """Query rows that a lane holds, one after the other in its columns."""
        return self.rows // self.quad_rows

    @property
    def row_lanes(self) -> int:
        """Lanes of a quad that share a query row."""
        return 4 // self.quad_rows

    @property
    def pairs(self) -> int:
        """Accumulator columns in pairs that a lane holds of one row: its head pairs."""
        return self.heads // 2 // self.row_lanes

    @property
    def halves(self) -> int:
        """Times 64 keys that a warpgroup multiplies of one stage."""
        return self.stage_keys // KEYS // (WARPGROUPS if self.split == "keys" else 1)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of one block."""
        return self.query_tiles * self.columns * self.dim

    @property
    def stage_bytes(self) -> int:
        """Bytes of the keys of one stage."""
        return self.stage_keys * self.dim
