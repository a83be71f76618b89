"""Tables of a run in Markdown: each variant against the peers, case by case, and where peers are ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..testing.case import groups
from ..testing.measure import Measurement
from ..testing.summary import EVERY_CASE, Mean, means
from ..testing.sweep import FAILED
from .results import Run

ByCase = dict[str, dict[str, Measurement]]
"""Measurements of an op by case and by the name of the variant or peer."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sections(run: Run, meanings: Mapping[str, str]) -> Iterator[str]:
    """What a run measured, as Markdown, an op at a time.

    Args:
        run: the run.
        meanings: what is in each group of cases that has a name.
    """
    for op in dict.fromkeys(m.op for m in run.measurements):
        yield _section(op, [m for m in run.measurements if m.op == op], meanings)


def _section(op: str, found: Sequence[Measurement], meanings: Mapping[str, str]) -> str:
    by_case: ByCase = {}
    for m in found:
        by_case.setdefault(m.case, {})[m.variant] = m
    ours, peers = (list(dict.fromkeys(m.variant for m in found if m.peer == peer)) for peer in (False, True))
    rivals = peers or list(dict.fromkeys(m.variant for m in found if m.baseline))
    others = [name for name in ours if name not in rivals]
    parts = []
    for group, cases in _groups(op, list(by_case)).items():
        if group in meanings:
            parts.append(f"`--{group}`: {meanings[group]}\n\n")
        parts.append(_times({case: by_case[case] for case in cases}, others, rivals) + "\n")
    if any(m.tolerance is not None for m in found):
        parts.append("\\* computes with less precision than is asked of variants, and has a bound of its own\n\n")
    parts.append(_means(op, found, others))
    if peers:
        parts.append("\n" + _behind(by_case, others, peers))
    return "".join(parts)


def _groups(op: str, cases: Sequence[str]) -> dict[str, list[str]]:
    """The cases of each group that was run whole, in order, then those that are in none of them."""
    whole = {name: [c for c in cases if c in members] for name, members in groups(op).items() if members <= {*cases}}
    grouped = {case for members in whole.values() for case in members}
    rest = [case for case in cases if case not in grouped]
    return whole | ({EVERY_CASE: rest} if rest else {})


def _times(by_case: ByCase, ours: Sequence[str], rivals: Sequence[str]) -> str:
    """Times of each case, and how many times faster each of our variants is than the fastest rival."""
    over = "fastest peer" if len(rivals) > 1 else next(iter(rivals), "")
    header = [
        "case",
        *(f"{name}, µs" for name in (*ours, *rivals)),
        *(f"{name} over {over}" for name in ours if rivals),
    ]
    rows = []
    for case, of_case in by_case.items():
        best = _fastest(of_case, rivals)
        ratios = [_ratio(best, of_case.get(name)) for name in ours if rivals]
        rows.append([f"`{case}`", *(_time(of_case.get(name)) for name in (*ours, *rivals)), *ratios])
    return table(header, rows)


def _time(m: Measurement | None) -> str:
    if m is None or m.judged is None:
        return "failed" if m is not None and m.status == FAILED else "-"
    chosen = f" ({m.chosen})" if m.chosen else ""
    return f"{m.judged.median_us:.2f}{chosen}" + r"\*" * (m.tolerance is not None)


def _fastest(of_case: Mapping[str, Measurement], names: Sequence[str]) -> Measurement | None:
    timed = [(m.judged.median_us, m) for name in names if (m := of_case.get(name)) is not None and m.judged is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _ratio(rival: Measurement | None, own: Measurement | None) -> str:
    """How many times faster ``own`` is; bold where it is slower."""
    if rival is None or own is None or rival.judged is None or own.judged is None:
        return "-"
    ratio = rival.judged.median_us / own.judged.median_us
    return f"{ratio:.2f}x" if ratio >= 1 else f"**{ratio:.2f}x**"


def _means(op: str, found: Sequence[Measurement], ours: Sequence[str]) -> str:
    """Geometric means of our variants over each peer, or over the baseline where there is none."""
    made = [mean for mean in means(found, {op: groups(op)}) if mean.variant in ours]
    peers = list(dict.fromkeys(peer for mean in made for peer in mean.over))
    baseline = "" if peers else next((m.variant for m in found if m.baseline), "")
    header = [
        "geometric means of",
        "variant",
        "cases",
        *(f"over {name} (least)" for name in peers or [baseline]),
        "roof",
    ]
    return table(header, [_mean(mean, peers) for mean in made])


def _mean(mean: Mean, peers: Sequence[str]) -> list[str]:
    over = [mean.over.get(peer) for peer in peers] or [mean.speedup]
    cells = ["-" if o is None else f"{o.mean:.2f}x ({o.least:.2f}x)" for o in over]
    return [mean.group, mean.variant, str(mean.cases), *cells, "-" if mean.roof is None else f"{mean.roof:.0%}"]


def _behind(by_case: ByCase, ours: Sequence[str], peers: Sequence[str]) -> str:
    """In how many cases each variant is slower than some peer, and those where all of ours are."""
    rows, behind, compared = [], dict.fromkeys(ours, 0), dict.fromkeys(ours, 0)
    for case, of_case in by_case.items():
        rival, own = _fastest(of_case, peers), _fastest(of_case, ours)
        for name in ours:
            ratio = _ratio(rival, of_case.get(name))
            compared[name] += ratio != "-"
            behind[name] += ratio.startswith("**")
        if rival is not None and own is not None and (ratio := _ratio(rival, own)).startswith("**"):
            rows.append([f"`{case}`", own.variant, _time(own), rival.variant, _time(rival), ratio])
    counts = "; ".join(f"{name} in {behind[name]} of {compared[name]}" for name in ours)
    text = f"Slower than the fastest peer: {counts} cases.\n"
    if not rows:
        return f"{text}In no case are all of these variants slower than it.\n"
    return f"{text}These are the cases where all of them are:\n\n" + table(
        ["case", "our fastest", "µs", "fastest peer", "µs", "over it"], rows
    )
