"""Show this machine, the versions, the settings, and which variants run here or why not."""

from __future__ import annotations

import argparse
import ast
import importlib.util
from pathlib import Path
from typing import Any

import torch

from .. import env
from ..device import arch_of
from ..testing import provenance
from ..testing.case import family, ops
from ..variants import Family
from . import arguments, console


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
        "wrong": arguments.wrong_overrides() | env.wrong() | dict.fromkeys(unread, "nothing reads it: is it misspelt?"),
        "ops": {op: [_variant(family(op), name, arch_of(device)) for name in family(op).names] for op in ops()},
    }


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
