"""The shape of the Hopper kernel's work, and where everything lies in shared memory.

A thread block takes one task of the plan, one KV head and a block of ``rows`` query rows. It walks the task's tokens in
*steps* of 128, each a stage of two rings: one of keys, one of values. Scores and outputs are kept transposed: ``S^T = K
Q^T`` has tokens as its 64 rows and query rows as its columns, and so has ``O^T = V^T P^T`` with the head's elements.

A chunked page copied as it is, is already a K-major operand of wgmma without swizzle: eight rows of 16 bytes, the core
matrix, are contiguous. Values of any page size, and keys of pages of 128, so become one operand of 128 tokens. Keys of
pages of 32 or 64 are copied chunk by chunk to make the same. Keys of pages of 16 stay page by page: eight tokens of
each page make eight of the 64 rows.

* e4m3: the two multiplying warpgroups take alternate steps, or a single one takes them all. Tokens ``16 g + 8 h + i``
  (i < 8) are rows ``8 g + i`` of the h-th product. Queries and probabilities are sums of two e4m3 numbers, side by
  side: 2 ``rows`` columns.
* 16-bit: each warpgroup takes every step, and of it the tokens ``16 g + 8 w + i``, w being its number.

With many query rows it is the other way round: ``S = Q K^T`` and ``O = P V``, each warpgroup on alternate steps, with
probabilities in registers (see :mod:`.cute_rows`). The operands lie as they do above. There a product of so many
columns would be so much softmax that it and not memory would take the time. So many probabilities would also take long
to become sums of e4m3 numbers: instead further warps make the step's values float16 (see :mod:`.cute_widening`).

Caches of other layouts are copied in pieces of 16 bytes, whatever their pages, to what chunked caches with pages of 128
would make. Keys and values that lie token by token stay so, in operands with wgmma's swizzle of 128 bytes, to whose
rows whole lines of memory can be copied: the first 128 bytes of token t's elements are at 128 t, those of all tokens
before the next 128, and in them the 16 bytes that would be c-th are at place ``c ^ (t & 7)``. The values so are an
MN-major operand, which e4m3 ones may not be: these are transposed on the way. e4m3 keys of 64 bytes get no swizzle.

A thread of the first kind holds the columns ``8 j + 2 (lane % 4) + e`` (j < rows / 8, e < 2), which are numbered
``c = 2 j + e``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

STEP = 128
"""Tokens of a stage."""
WARPGROUPS = 2
"""Warpgroups that multiply, unless a tile has but one; four more warps load, two for keys and two for values."""
MATH_THREADS = 128 * WARPGROUPS
LOAD_THREADS = 128
WIDEN_THREADS = 128
"""Where e4m3 values become float16, threads that do this."""
MATH_BARRIER = 3
"""The named barrier of all multiplying warps when they begin; the warpgroups' own are 1 and 2."""
ASKED_BARRIER = 7
"""The named barrier where those who load wait until queries, where they are many, have been asked for."""
CORE = 128
"""Bytes of a core matrix."""
ELEMENTS = 8
"""Elements of 16 bytes of a query."""
RUN = 128
"""Bytes of a token that lie side by side in an operand with swizzle."""
ATOM = 8 * RUN
"""Bytes of eight such tokens, with which the swizzle repeats."""
ROWS_DIM = 128
"""D where query rows are the rows of products."""
SHARED_BYTES = 228 << 10
"""Shared memory of a multiprocessor, of which the system takes the following for each thread block."""
RESERVED_BYTES = 1024
REGISTERS = 65536
"""Those of a multiprocessor. Threads get them by eights."""
COUNTERS = 32
"""Counters of arrivals of a sequence and KV head: one for each block of query rows."""
REDUCE_THREADS = 128
"""Threads of a block of the merge, at most."""
REDUCE_FEW = 8
"""Partial results of a row that a warp of the merge adds up by itself."""
REDUCE_PARTS = 4
"""Warps that share a row of more."""
MEANS = 2.0**7
"""What means of e4m3 values are multiplied by to be float16 numbers: small ones keep bits, and 448 is not too large."""
CLUSTER_ROWS = 16
"""Query rows of a thread block whose cluster merges them."""
E4M3 = "e4m3"
KINDS = {E4M3: "k32.f32.e4m3.e4m3", "bf16": "k16.f32.bf16.bf16", "fp16": "k16.f32.f16.f16"}
CHUNKED, PLAIN_V, TOKEN_MAJOR = "chunked", "plain_v", "token_major"
"""Layouts of a cache; the last is nhd and hnd, which differ in strides."""


class Places(NamedTuple):
    """Offsets in shared memory."""

    keys: int
    values: int
    queries: int  # B operand
    own: int  # of each warpgroup: a B operand, probabilities or widened values; in the end, outputs for another
    finer: int  # what two e4m3 numbers leave of probabilities; where blocks share a multiprocessor, in their place
    mail: int  # of each block of a cluster and each row that this one merges: elements
    mail_stats: int  # of these: reference and sum
    bounds: int  # (low, high) of each row
    row_scales: int
    maxima: int  # of each warpgroup, warp and row
    sums: int  # of each warpgroup, warp and row
    references: int  # of each warpgroup and row; by rows, of each thread and with its sums
    key_scales: int  # of each stage and token
    value_scales: int
    full_keys: int  # a barrier of each stage
    full_values: int
    empty_keys: int
    empty_values: int
    full_wide: int  # a barrier of each warpgroup
    empty_wide: int
    mail_barrier: int
    constants: int  # a word of each warp
    size: int


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for.

    Attributes:
        cache: "e4m3", "bf16" or "fp16".
        page: tokens per page; 128 where the cache is not chunked, whatever it has.
        rows: query rows of a thread block; a multiple of 16.
        stages: steps whose keys the ring holds.
        blocks: thread blocks that share a multiprocessor.
        token_scales: whether keys or values have a scale per token.
        by_rows: whether query rows, which are 64, are the rows of products.
        dim: D, elements of a head.
        layout: how the cache lies.
        value_stages: steps whose values their ring holds, 0 for as many. Values stay until a step has ended, keys
            until it has scores.
        cluster: whether the blocks of a sequence are a cluster, which merges its partial results itself.
        warpgroups: those that multiply, two or one: half as many warps begin and end a task, and there is nothing to
            exchange between them.
    """

    cache: str
    page: int
    rows: int
    stages: int
    blocks: int = 1
    token_scales: bool = False
    by_rows: bool = False
    dim: int = 128
    layout: str = CHUNKED
    value_stages: int = 0
    cluster: bool = False
    warpgroups: int = WARPGROUPS

    def __post_init__(self) -> None:
        if self.value_stages == 0:
            object.__setattr__(self, "value_stages", self.stages)
        # A warpgroup that met a stage only every other phase would take one parity for the other.
        mixed_up = self.alternate and (self.stages % self.warpgroups != 0 or self.value_stages % self.warpgroups != 0)
        if self.rows % 16 or STEP % self.page or mixed_up or not (self.in_bulk or self.page == STEP):
            raise ValueError(f"no kernel for {self}")
        if self.by_rows and (self.rows != 64 or self.token_scales or self.dim != ROWS_DIM or not self.in_bulk):
            raise ValueError(f"no kernel for {self}")
        is_plain = self.is_e4m3 and not (self.by_rows or self.token_scales or self.cluster)
        if self.warpgroups != WARPGROUPS and not (self.warpgroups == 1 and is_plain):
            raise ValueError(f"no kernel for {self}")
        if self.cluster and (self.rows != CLUSTER_ROWS or self.blocks > 1):
            raise ValueError(f"no kernel for {self}")
        if self.places.size > SHARED_BYTES // self.blocks - RESERVED_BYTES:
            raise ValueError(f"{self}: needs more shared memory than there is")

    @property
    def name(self) -> str:
        """Unique, and a legal symbol."""
        scales = "_token_scales" if self.token_scales else "_by_rows" if self.by_rows else ""
        pages = f"page{self.page}" if self.in_bulk else self.layout
        shape = f"{self.cache}_d{self.dim}_{pages}_rows{self.rows}"
        stages = f"{self.stages}" if self.value_stages == self.stages else f"{self.stages}_{self.value_stages}"
        few = f"_wg{self.warpgroups}" if self.warpgroups != WARPGROUPS else ""
        return f"pa_decode_{shape}_stages{stages}x{self.blocks}{scales}{'_cluster' * self.cluster}{few}"

    @property
    def in_bulk(self) -> bool:
        """Whether pages are copied in bulk, else in pieces of 16 bytes."""
        return self.layout == CHUNKED

    @property
    def turns_values(self) -> bool:
        """Whether values, which lie token by token, are transposed on the way: only 16-bit operands may lie so."""
        return self.layout == TOKEN_MAJOR and self.is_e4m3

    @property
    def are_keys_swizzled(self) -> bool:
        """Whether keys make an operand with swizzle: where they lie token by token, in runs that are long enough."""
        return self.layout == TOKEN_MAJOR and self.dim * self.element_bytes >= RUN

    @property
    def are_values_turned(self) -> bool:
        """Whether values lie token by token in shared memory too, with swizzle, else with tokens side by side."""
        return self.layout == TOKEN_MAJOR and not self.is_e4m3

    @property
    def is_e4m3(self) -> bool:
        """Whether the cache is quantised."""
        return self.cache == E4M3

    @property
    def widens(self) -> bool:
        """Whether values become float16 before they are multiplied."""
        return self.is_e4m3 and self.by_rows

    @property
    def partial_bytes(self) -> int:
        """Bytes of an element of a partial result: a mean of e4m3 values is a float16, others are sums in float32."""
        return 2 if self.widens else 4

    @property
    def math_threads(self) -> int:
        """Threads that multiply."""
        return 128 * self.warpgroups

    @property
    def can_last_merge(self) -> bool:
        """Whether the last block of a sequence may merge: it takes registers, which make pairs' loops 2% slower."""
        return self.blocks == 1 and not self.cluster and not (self.token_scales and self.rows > 32)

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return self.math_threads + LOAD_THREADS + (WIDEN_THREADS if self.widens else 0)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the cache."""
        return 1 if self.is_e4m3 else 2

    @property
    def stage_bytes(self) -> int:
        """Bytes of the keys, or of the values, of a step."""
        return STEP * self.dim * self.element_bytes

    @property
    def long_stages(self) -> int:
        """Stages of each ring that a task of more steps uses: what is on its way to some blocks holds up others."""
        is_deep = self.blocks == 1 and self.stages == self.value_stages == 4
        is_served = self.in_bulk and not (self.by_rows or self.token_scales)
        return self.stages // 2 if is_deep and is_served else self.stages

    @property
    def halves(self) -> int:
        """Products of 64 tokens that a warpgroup makes of a step that it takes."""
        return 2 if self.alternate else 1

    @property
    def alternate(self) -> bool:
        """Whether the warpgroups take alternate steps, and a single one every step."""
        return self.is_e4m3 or self.by_rows

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return self.rows * (2 if self.is_e4m3 else 1)

    @property
    def own_columns(self) -> int:
        """Query rows of which a thread holds scores and outputs."""
        return self.rows // 4

    @property
    def own_elements(self) -> int:
        """Elements of an output row that a thread holds: ``64 a + 16 w + 8 b + g`` (b < 2) of slot ``8 w + g``."""
        return self.dim // 32

    @property
    def vector(self) -> int:
        """How many of them are stored at once."""
        return min(self.own_elements, 4)

    @property
    def moves_registers(self) -> bool:
        """Whether the loading warps give registers to those that multiply."""
        return self.blocks > 1 or self.rows > 32 or self.rows * self.dim > 32 * 128

    @property
    def registers(self) -> tuple[int, int]:
        """Those of a multiplying and of a loading thread then: no more than all threads start with."""
        if self.blocks > 1:
            loading = 24 if self.in_bulk or not self.token_scales else 40
        else:
            loading = 24 if self.rows > 32 and not self.widens else 40
        at_first = REGISTERS // (self.blocks * self.threads) // 8 * 8 * self.threads
        widening = self.widening_registers * WIDEN_THREADS if self.widens else 0
        return (at_first - loading * LOAD_THREADS - widening) // self.math_threads // 8 * 8, loading

    @property
    def widening_registers(self) -> int:
        """Those of a thread that makes values float16."""
        return 72

    @property
    def chains(self) -> int:
        """Products of 64 rows in flight: two, unless their accumulators are too many."""
        return 2 if self.columns <= 64 else 1

    @property
    def kind(self) -> str:
        """The matrix instruction's shape and types."""
        return KINDS[self.cache]

    @property
    def value_kind(self) -> str:
        """That of probabilities and values."""
        return KINDS["fp16" if self.widens else self.cache]

    @property
    def tokens_of_piece(self) -> int:
        """Tokens of 16 bytes of values."""
        return 16 // self.element_bytes

    @property
    def chunks(self) -> int:
        """Pieces of 16 bytes of a token's keys."""
        return self.dim * self.element_bytes // 16

    @property
    def by_page(self) -> bool:
        """Whether a step's keys stay page by page."""
        return self.page == 16

    @property
    def by_chunk(self) -> bool:
        """Whether keys are copied chunk by chunk."""
        return self.page in (32, 64)

    @property
    def copies(self) -> int:
        """Bulk copies that a loading lane starts in a step: two, where keys of a step have more than 64 chunks."""
        return 2 if self.by_chunk and STEP // self.page * self.chunks > 64 else 1

    @property
    def lanes_of_page(self) -> int:
        """Lanes that copy a page's keys chunk by chunk."""
        return self.chunks // self.copies

    @property
    def key_leading(self) -> int:
        """Bytes from one 16-byte chunk of keys to the next; with swizzle, of 128 bytes, and before it."""
        if self.are_keys_swizzled:
            return 16
        return (self.page if self.by_page else STEP) * 16

    @property
    def key_eight(self) -> int:
        """Bytes from the keys of the tokens ``16 g`` to those of the tokens ``16 g + 8``."""
        return ATOM if self.are_keys_swizzled else CORE

    @property
    def key_stride(self) -> int:
        """Bytes from the keys of the tokens ``16 g`` to those of the tokens ``16 g + 16``."""
        return self.page_bytes if self.by_page else 2 * self.key_eight

    def key_chunk(self, chunk: int) -> int:
        """Bytes from a token's first 16-byte chunk of keys to another; before a swizzle."""
        if self.are_keys_swizzled:
            run, chunk = divmod(chunk, RUN // 16)
            return run * STEP * RUN + chunk * self.key_leading
        return chunk * self.key_leading

    @property
    def page_bytes(self) -> int:
        """Bytes of one head's keys, or values, of a page."""
        return self.page * self.dim * self.element_bytes

    @property
    def value_leading(self) -> int:
        """Bytes from a warpgroup's 16 bytes of tokens, or its eight of them, to its next."""
        if self.are_values_turned:
            return 2 * ATOM
        return self.dim * 16 * (1 if self.alternate else self.warpgroups)

    @property
    def value_part(self) -> int:
        """Bytes from 64 elements of values to the next 64."""
        return STEP * RUN if self.are_values_turned else 8 * CORE

    @property
    def value_parity(self) -> int:
        """Bytes from where one warpgroup's values of a step begin to where the other's do."""
        return ATOM if self.are_values_turned else self.dim * 16

    @property
    def probability_pitch(self) -> int:
        """Bytes of 16-byte pieces of all columns: from one core matrix of a B operand to the next along K."""
        return self.columns * 16

    @property
    def query_threads(self) -> int:
        """Threads that share a query row, neighbours in a warp: all load all rows at once, or some load the same."""
        return min(self.dim // ELEMENTS, self.math_threads // self.rows)

    @property
    def query_parts(self) -> int:
        """Pieces of 16 bytes of a row that each of them loads."""
        return self.dim // ELEMENTS // self.query_threads

    @property
    def query_pitch(self) -> int:
        """Bytes from a 16-byte piece of queries to the next: so many more that a warp's stores meet no bank twice."""
        at_once = 128 // (ELEMENTS * self.element_bytes)
        return self.probability_pitch + 16 * max(1, at_once // self.query_threads)

    @property
    def probability_bytes(self) -> int:
        """Bytes of the probabilities of a warpgroup."""
        return 0 if self.by_rows else 8 * self.probability_pitch

    @property
    def own_bytes(self) -> int:
        """Bytes of a warpgroup's own: of its probabilities, or of half of its outputs, or of a step's wide values."""
        wide = STEP * self.dim * 2 if self.widens else 0
        exchanged = self.rows // 2 * self.dim * 4 if self.warpgroups > 1 else 0
        return max(self.probability_bytes, exchanged, wide)

    @property
    def places(self) -> Places:
        """Where everything lies."""
        at = 0

        def take(size: int) -> int:
            nonlocal at
            begin, at = at, at + (size + 15) // 16 * 16
            return begin

        per_row = 4 * self.rows
        of_step = STEP * 4 if self.token_scales else 0
        mailed = self.rows if self.cluster else 0
        own_bytes = self.warpgroups * self.own_bytes
        return Places(
            keys=take(self.stages * self.stage_bytes),
            values=take(self.value_stages * self.stage_bytes),
            queries=take(self.chunks * self.query_pitch),
            own=(own := take(own_bytes)),
            finer=own if not self.is_e4m3 or self.by_rows or self.blocks > 1 else take(own_bytes),
            mail=take(mailed * self.dim * 4),
            mail_stats=take(mailed * 8),
            bounds=take(2 * per_row),
            row_scales=take(per_row),
            maxima=take(self.warpgroups * 4 * per_row),
            sums=take(self.warpgroups * 4 * per_row),
            references=take(self.warpgroups * (128 * 8 if self.by_rows else per_row)),
            key_scales=take(self.stages * of_step),
            value_scales=take(self.stages * of_step),
            full_keys=take(8 * self.stages),
            full_values=take(8 * self.value_stages),
            empty_keys=take(8 * self.stages),
            empty_values=take(8 * self.value_stages),
            full_wide=take(8 * self.warpgroups if self.widens else 0),
            empty_wide=take(8 * self.warpgroups if self.widens else 0),
            mail_barrier=take(8 * self.cluster),
            constants=take(4 * self.threads // 32),
            size=at,
        )
