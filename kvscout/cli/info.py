"""Show this machine, the versions, the settings, and which variants run here or why not."""

from __future__ import annotations

import argparse
import ast
import importlib.util
from pathlib import Path
from typing import Any

import torch

from .. import env, tuning
from ..device import arch_of, name_of
from ..testing import provenance
from ..testing.case import family, ops
from ..variants import Family
from . import arguments, console

UNUSED = "not used: KVSCOUT_TUNED is off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``info``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what :func:`collect` finds."""
    found = collect()
    if args.json:
        console.out(provenance.dumps(found))
        return 0
    for title in ("machine", "versions"):
        console.table(title, ("item", "value"), [(key, value) for key, value in found[title].items()])
    settings = [(s["name"], s["default"], s["meaning"]) for s in found["settings"]]
    console.table("environment variables", ("name", "default", "meaning"), settings)
    values = found["environment"] | found["unread"]
    set_now = [(name, value, found["wrong"].get(name)) for name, value in values.items() if value is not None]
    if set_now:
        console.table("set now", ("name", "value", "what is wrong"), set_now)
    tables = [(table["file"], table["state"]) for table in found["tuned"]]
    console.table(f"tuned tables of {found['machine']['device']}", ("file", "state"), tables)
    for op, variants in found["ops"].items():
        rows = [(v["name"], v["unavailable"] or "available", v["summary"]) for v in variants]
        console.table(op, ("variant", "here", "summary"), rows)
    return 0


def collect() -> dict[str, Any]:
    """Machine, versions, environment, and each op's variants with what keeps them from running."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unread = env.unread(ops())
    return {
        "machine": provenance.machine(device),
        "versions": provenance.versions(),
        "settings": [vars(setting) for setting in env.SETTINGS],
        "environment": env.current(ops()),
        "unread": unread,
        "tuned": _tuned_tables(device),
        "wrong": arguments.wrong_overrides() | env.wrong() | dict.fromkeys(unread, "nothing reads it: is it misspelt?"),
        "ops": {op: [_variant(family(op), name, arch_of(device)) for name in family(op).names] for op in ops()},
    }


def _tuned_tables(device: torch.device) -> list[dict[str, str]]:
    """The places where tuned tables of the device may be, and what is said of each."""
    try:
        used = env.use_tuned()
        found = tuning.look(name_of(device))
    except env.WrongVariable as error:
        return [{"file": "", "state": str(error)}]
    return [
        {"file": str(file), "state": _state(table) if used or table is None else UNUSED}
        for file, table in found.items()
    ]


def _state(table: tuning.Table | tuning.WrongTable | None) -> str:
    if table is None:
        return "there is none"
    if isinstance(table, tuning.WrongTable):
        return f"not used: it {table}"
    states = []
    for op, section in table.ops.items():
        fresh = op in ops() and section.fingerprint == tuning.fingerprint(family(op).package)
        number = len(section.entries)
        states.append(f"{number} {'entry' if number == 1 else 'entries'} of {op} in use" if fresh else tuning.stale(op))
    return "; ".join(states) or "it is empty"


def _variant(variants: Family, name: str, arch: str) -> dict[str, str | None]:
    try:
        unavailable = variants.unavailable(name, arch)
    except env.WrongVariable as error:
        unavailable = str(error)
    return {"name": name, "unavailable": unavailable, "summary": _summary(variants, name)}


def _summary(variants: Family, name: str) -> str:
    """First line of a variant's docstring, read without importing what the variant needs."""
    found = importlib.util.find_spec(f"{variants.package}.variants.{name}")
    if found is None or found.origin is None:
        return ""
    return (ast.get_docstring(ast.parse(Path(found.origin).read_text())) or "").partition("\n")[0]
