"""What ptxas makes of every kernel of ``cute_wgmma``, on a machine that need not have a GPU.

Numbers and order of instructions; whether they compute the right thing is for the cases to say.
"""

import json
from dataclasses import dataclass

import pytest

from kvscout.kernels.cute import toolchain
from kvscout.ops.mqa_logits.api import NUM_HEADS
from kvscout.ops.mqa_logits.cute_tile import KEYS, THREADS, Tile
from kvscout.ops.mqa_logits.variants.cute_wgmma import HEAD_DIMS, VARIANT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]

# The kernels of one number of heads, in one process: importing CuTe DSL takes seconds, and each worker of pytest has
# something to do. The opcodes of a kernel tell its instructions in their order.
COMPILE = """
import json, re, sys
from kvscout.ops.mqa_logits import cute_launch
from kvscout.ops.mqa_logits.variants.cute_wgmma import VARIANT
from kvscout.testing.compiled_cute import compile_program

class Recorder(cute_launch.SmemAllocator):
    def allocate(self, storage, *arguments, **options):
        shared.append(storage.size_in_bytes())
        return super().allocate(storage, *arguments, **options)

cute_launch.SmemAllocator = Recorder
found = {}
for program in VARIANT.programs():
    if program.spec.heads == int(sys.argv[1]):
        shared = []
        made = compile_program(program)
        kernel, = made.kernels
        opcodes = re.findall(r"/[*][0-9a-f]{4,}[*]/ +(?:@!?U?P\\w+ +)?([A-Z][\\w.]*)", kernel.sass)
        found[program.name] = {"registers": kernel.registers, "stack": kernel.stack, "spills": made.spills,
                               "warnings": made.warnings, "shared": shared, "opcodes": opcodes}
print(json.dumps(found))
"""

# All registers of a multiprocessor among the threads of a block, in steps of 8.
ENTRY_REGISTERS = (65536 // THREADS) // 8 * 8
SHARED_MEMORY = 227 << 10
STEP = 32
"""Elements of D that one instruction multiplies."""
CODE_PATHS = 2
"""Tiles that windows cut, and tiles inside all windows."""
Q_STAGES = 2


@dataclass(frozen=True)
class Kernel:
    tile: Tile
    name: str
    registers: int
    stack: int
    spills: int
    warnings: list[str]
    shared: list[int]
    opcodes: list[str]

    def places(self, *instructions):
        """Where instructions stand whose first words are one of these."""
        return [i for i, word in enumerate(self.opcodes) if f"{word}.".startswith(tuple(f"{i}." for i in instructions))]

    @property
    def products(self):
        """The matrix instructions, in groups that make one product of 64 keys."""
        places, size = self.places("QGMMA"), self.tile.dim // STEP
        return [places[i : i + size] for i in range(0, len(places), size)]


@pytest.fixture(
    scope="module", params=[pytest.param(h, marks=pytest.mark.xdist_group(f"cute_h{h}")) for h in NUM_HEADS]
)
def kernels(request, run_python):
    found = json.loads(run_python("-c", COMPILE, str(request.param), timeout=900).stdout)
    tiles = {program.name: program.spec for program in VARIANT.programs()}
    return [Kernel(tiles[name], name, **row) for name, row in found.items()]


def test_every_program_is_compiled(kernels):
    heads = {kernel.tile.heads for kernel in kernels}
    assert len(heads) == 1
    assert {kernel.tile.dim for kernel in kernels} == set(HEAD_DIMS)
    assert {kernel.tile for kernel in kernels} == {p.spec for p in VARIANT.programs() if p.spec.heads in heads}


def test_nothing_spills_and_matrix_instructions_are_not_serialised(kernels):
    for kernel in kernels:
        assert (kernel.spills, kernel.stack, kernel.warnings) == (0, 0, []), kernel.name
        assert kernel.places("LDL", "STL") == [], kernel.name
        # More, and the block would not start; the warps that multiply get theirs when it runs.
        assert kernel.registers == ENTRY_REGISTERS, kernel.name
        assert len(kernel.places("USETMAXREG")) == 2, kernel.name


def test_shared_memory_fits(kernels):
    for kernel in kernels:
        (shared,) = kernel.shared
        rings = Q_STAGES * kernel.tile.query_bytes + kernel.tile.kv_stages * kernel.tile.stage_bytes
        assert rings < shared <= SHARED_MEMORY, kernel.name


def test_each_product_is_as_many_matrix_instructions_as_it_needs(kernels):
    for kernel in kernels:
        tile, places = kernel.tile, kernel.places("QGMMA")
        words = {kernel.opcodes[place] for place in places}
        assert words == {f"QGMMA.{KEYS}x{tile.columns}x{STEP}.F32.E4M3.E4M3"}, kernel.name
        assert len(places) == tile.halves * (tile.dim // STEP) * CODE_PATHS, kernel.name
        assert kernel.places("HGMMA", "IGMMA", "HMMA") == [], kernel.name


def test_the_matrix_instructions_of_a_product_follow_each_other_without_a_wait(kernels):
    for kernel in kernels:
        # Stores of the half before may stand between them, and be on their way meanwhile.
        waits = kernel.places("WARPGROUP", "WARPSYNC", "DEPBAR", "BAR", "SYNCS", "BRA", "BSYNC", "LDS", "LDG")
        for product in kernel.products:
            assert [place for place in waits if product[0] < place < product[-1]] == [], kernel.name
        # One fence before each product, and one wait after it.
        for kind, following in (("WARPGROUP.ARRIVE", False), ("WARPGROUP.DEPBAR", True)):
            expected = [sum(product[0] < place for product in kernel.products) for place in kernel.places(kind)]
            assert expected == [i + following for i in range(len(kernel.products))], kernel.name


def test_each_dot_product_takes_two_instructions_and_half_of_the_relus_are_maxima(kernels):
    for kernel in kernels:
        # Two keys of each pair of columns: a multiply-add for each dot product, an addition for those of the first key,
        # and a maximum that keeps NaN for those of the second.
        dots = 4 * kernel.tile.groups * kernel.tile.pairs * len(kernel.products)
        assert len(kernel.places("FFMA")) == dots, kernel.name
        assert len(kernel.places("FMNMX.NAN")) == dots // 2, kernel.name
        sums = 16 * kernel.tile.groups * len(kernel.products)
        assert dots // 2 <= len(kernel.places("FADD")) < dots // 2 + sums, kernel.name


def test_queries_and_keys_come_through_tensor_maps_and_fill_goes_in_bulk(kernels):
    for kernel in kernels:
        # A box of queries per group of rows; the keys of a task's first tile, and of those after it. The compiler may
        # write a loop twice.
        assert len(kernel.places("UTMALDG.4D")) >= kernel.tile.query_tiles * kernel.tile.groups, kernel.name
        assert len(kernel.places("UTMALDG.2D")) >= 2, kernel.name
        # Left and right of what the tiles cover.
        assert len(kernel.places("UBLKCP")) >= 2, kernel.name


def test_the_start_overlaps_the_kernel_before_and_touches_none_of_its_memory(kernels):
    for kernel in kernels:
        (wait,), (trigger,) = kernel.places("ACQBULK"), kernel.places("PREEXIT")
        # The other way round, what follows the kernel after this one could start before this one's input is there.
        assert wait < trigger, kernel.name
        memory = ("LDG", "LD", "LDGSTS", "STG", "ST", "RED", "ATOM", "ATOMG", "UTMALDG", "UBLKCP", "QGMMA")
        assert kernel.places(*memory)[0] > trigger, kernel.name
