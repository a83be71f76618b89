"""What ptxas makes of kernels of ``cute_wgmma``, on a machine that need not have a GPU.

Numbers and order of instructions; whether they compute the right thing is for the cases to say.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass

import pytest

from kvscout.kernels.cute import toolchain
from kvscout.ops.pa_decode.cute_tile import LOAD_THREADS, REGISTERS, STEP, WIDEN_THREADS, Tile
from kvscout.ops.pa_decode.variants.cute_wgmma import CACHES, VARIANT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.cannot_compile() is not None, reason="needs CuTe DSL and a C compiler"),
]


def is_compiled(tile):
    """Not all of them, for the sake of time: other pages of D 64 and 256, of clusters too, small pieces and float16
    differ little.
    """
    if tile.dim == 128 and tile.in_bulk and not tile.cluster:
        return True
    return tile.cache != "fp16" and (tile.page == 32 if tile.in_bulk else tile.dim > 64)


# Kernels of one element type, in one process: importing CuTe DSL takes seconds. The opcodes of a kernel tell its
# instructions in their order.
COMPILE = """
import json, re, sys
from kvscout.ops.pa_decode.variants.cute_wgmma import VARIANT
from kvscout.testing.compiled_cute import compile_program

found = {}
for program in VARIANT.programs():
    if program.name in sys.argv[1:]:
        made = compile_program(program)
        kernels = {}
        for kernel in made.kernels:
            opcodes = re.findall(r"/[*][0-9a-f]{4,}[*]/ +(?:@!?U?P\\w+ +)?([A-Z][\\w.]*)", kernel.sass)
            role = re.match(r"kernel_cutlass_(decode|reduce)_", kernel.name)[1]
            kernels[role] = {"registers": kernel.registers, "stack": kernel.stack, "opcodes": opcodes}
        found[program.name] = {"spills": made.spills, "warnings": made.warnings, "kernels": kernels}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Kernel:
    registers: int
    stack: int
    opcodes: list[str]

    def places(self, *instructions):
        """Where instructions stand whose first words are one of these."""
        return [i for i, word in enumerate(self.opcodes) if f"{word}.".startswith(tuple(f"{i}." for i in instructions))]


@dataclass(frozen=True)
class Made:
    tile: Tile
    spills: int
    warnings: list[str]
    decode: Kernel
    reduce: Kernel | None = None  # clusters need none

    @property
    def kernels(self):
        return [self.decode] if self.reduce is None else [self.decode, self.reduce]


@pytest.fixture(
    scope="module", params=[pytest.param(c, marks=pytest.mark.xdist_group(f"cute_{c}")) for c in CACHES.values()]
)
def programs(request, run_python):
    tiles = {program.name: program.spec for program in VARIANT.programs()}
    tiles = {name: tile for name, tile in tiles.items() if tile.cache == request.param and is_compiled(tile)}
    found = json.loads(run_python("-c", COMPILE, *tiles, timeout=900).stdout)
    assert set(found) == set(tiles)
    return [
        Made(tiles[name], row["spills"], row["warnings"], **{role: Kernel(**k) for role, k in row["kernels"].items()})
        for name, row in found.items()
    ]


def test_nothing_spills_and_matrix_instructions_are_not_serialised(programs):
    for made in programs:
        assert (made.spills, made.warnings) == (0, []), made.tile.name
        for kernel in made.kernels:
            assert kernel.stack == 0, made.tile.name
            assert kernel.places("LDL", "STL") == [], made.tile.name
        assert made.decode.registers * made.tile.threads * made.tile.blocks <= REGISTERS, made.tile.name
        if made.tile.moves_registers:
            # Warps that asked for more than there are would wait for ever.
            math, load = made.tile.registers
            asked = made.tile.math_threads * math + LOAD_THREADS * load
            if made.tile.widens:
                asked += WIDEN_THREADS * made.tile.widening_registers
            assert asked <= made.decode.registers * made.tile.threads, made.tile.name
        roles = 2 * made.tile.moves_registers + made.tile.widens
        assert len(made.decode.places("USETMAXREG")) == roles, made.tile.name


def test_products_are_as_many_matrix_instructions_as_they_need(programs):
    for made in programs:
        tile = made.tile
        k = 32 if tile.is_e4m3 else 16
        places = made.decode.places("QGMMA", "HGMMA")
        if tile.by_rows:
            # The scores of the first step and of the next ones, of each number of a sum: of all of a step's tokens, or
            # of its halves where they lie page by page.
            halves = 2 if tile.by_page else 1
            scores = 2 * halves * (2 if tile.is_e4m3 else 1) * (tile.dim // k)
            # Probabilities and values have 16 bits.
            columns = [*[(STEP // halves, k)] * scores, *[(tile.dim, 16)] * (STEP // 16)]
        else:
            # Outputs of probabilities, and where they are e4m3 of their finer terms.
            scores = tile.halves * (tile.dim // k)
            outputs = tile.dim // 64 * (tile.halves * 64 // k) * (1 + tile.is_e4m3)
            columns = [(tile.columns, k)] * (scores + outputs)
        found = [re.search(r"([QH]GMMA)[.]64x(\d+)x(\d+)", made.decode.opcodes[place]) for place in places]
        assert Counter((int(shape[2]), int(shape[3])) for shape in found) == Counter(columns), tile.name
        assert all((shape[1] == "QGMMA") == (shape[3] == "32") for shape in found), tile.name
        if tile.by_rows:
            # A step's outputs and the next one's scores are under way together.
            first, second = (made.decode.places("WARPGROUP.DEPBAR")[i] for i in range(2))
            assert len([place for place in places if first < place < second]) == len(columns) - scores // 2, tile.name
        assert made.decode.places("HMMA", "IMMA") == [], tile.name


def test_pages_are_copied_in_bulk_or_in_pieces(programs):
    for made in programs:
        # One loop for keys and values; the compiler may write it twice.
        assert bool(made.decode.places("UBLKCP")) == made.tile.in_bulk, made.tile.name
        pieces = [place for place in made.decode.places("LDGSTS") if ".BYPASS.128" in made.decode.opcodes[place]]
        assert bool(pieces) == (not made.tile.in_bulk), made.tile.name
        assert bool(set(made.decode.places("LDGSTS")) - set(pieces)) == made.tile.token_scales, made.tile.name


def test_the_start_overlaps_the_kernel_before_and_touches_none_of_its_memory(programs):
    memory = ("LDG", "LD", "LDGSTS", "STG", "ST", "RED", "ATOM", "ATOMG", "UBLKCP", "QGMMA", "HGMMA")
    for made in programs:
        (wait,) = made.decode.places("ACQBULK")
        assert made.decode.places(*memory)[0] > wait, made.tile.name
        # The merge is launched in the last step, or after it where that was slower.
        (trigger,) = made.decode.places("PREEXIT")
        products = made.decode.places("QGMMA", "HGMMA")
        if made.tile.blocks > 1 or made.tile.by_rows:
            assert trigger > products[-1], made.tile.name
        else:
            assert made.decode.places("ACQBULK")[0] < trigger < products[0], made.tile.name
        assert (made.reduce is None) == made.tile.cluster, made.tile.name
        if made.reduce is None:
            continue
        # The merge reads which slots are whose in the plan, which is older, and nothing else.
        (wait,) = made.reduce.places("ACQBULK")
        early = [place for place in made.reduce.places(*memory) if place < wait]
        # Where blocks share a multiprocessor, it also looks for any sequence that is split.
        loads = 3 if made.tile.blocks > 1 else 2
        assert [made.reduce.opcodes[place].partition(".")[0] for place in early] == ["LDG"] * loads, made.tile.name
        # The merge launches the next kernel before it waits itself; there, at its end if it has anything to do.
        first, *others = made.reduce.places("PREEXIT")
        assert first < wait, made.tile.name
        assert len(others) == (made.tile.blocks > 1), made.tile.name
        assert all(trigger > made.reduce.places("LDG")[-1] for trigger in others), made.tile.name


def test_clusters_send_to_each_other_s_shared_memory_once_all_blocks_are_there(programs):
    for made in programs:
        sends, stats = made.decode.places("STAS.128"), made.decode.places("STAS.64")
        waits, arrivals = made.decode.places("UCGABAR_WAIT"), made.decode.places("UCGABAR_ARV")
        if not made.tile.cluster:
            assert sends + stats + waits + arrivals == [], made.tile.name
            continue
        # Of two rows: elements, reference and sum.
        vectors = 2 * (made.tile.dim // 32 // made.tile.vector)
        counts = {"STAS.128": vectors, "STAS.64": 2} if made.tile.dim > 64 else {"STAS.64": vectors + 2}
        assert Counter(made.decode.opcodes[place] for place in sends + stats) == counts, made.tile.name
        # Loading warps, and those that multiply with a task and without one.
        assert (len(arrivals), len(waits)) == (1, 3), made.tile.name
        (arrival,), (acquire,) = arrivals, made.decode.places("ACQBULK")
        assert arrival < acquire < waits[0], made.tile.name
        assert any(wait < min(sends + stats) for wait in waits), made.tile.name


def test_the_last_block_counts_itself_and_reads_past_l1(programs):
    for made in programs:
        opcodes, counts = made.decode.opcodes, made.decode.places("ATOMG", "ATOM", "RED")
        tile = made.tile
        if tile.cluster or tile.blocks > 1 or (tile.token_scales and tile.rows > 32):
            assert counts == [], made.tile.name
            continue
        (count,) = counts
        assert opcodes[count] == "ATOMG.E.INC.STRONG.GPU", made.tile.name
        # What the others stored is seen by all, before it.
        assert any(opcodes[place] == "MEMBAR.ALL.GPU" for place in range(count - 6, count)), made.tile.name
        assert count > made.decode.places("QGMMA", "HGMMA")[-1], made.tile.name
        vectors = [opcodes[place] for place in made.decode.places("LDG.E.128", "LDG.E.64") if place > count]
        assert vectors, made.tile.name
        assert all(word.endswith(".STRONG.GPU") for word in vectors), made.tile.name


def test_nothing_divides(programs):
    for made in programs:
        for kernel in made.kernels:
            # What a division by a number that is not constant becomes: a reciprocal of an integer.
            assert kernel.places("I2F.U32.RP", "I2F.RP", "CALL") == [], made.tile.name
