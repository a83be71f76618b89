"""Entry of the command line: finds the commands, reads the arguments, turns exceptions into exit codes."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from .. import __version__, env
from ..errors import UnsupportedProblem
from . import console
from .arguments import UsageError

FAILED, USAGE, INTERRUPTED, UNREAD = 1, 2, 130, 141
"""Exit codes beside 0: bad usage as argparse has it; Ctrl-C and output that nobody reads as in shells."""


def commands() -> dict[str, ModuleType]:
    """Every file of this folder that is a command, by name."""
    folder = importlib.import_module(__package__)
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    modules = {name: importlib.import_module(f".{name}", __package__) for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "add_arguments")}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; a command's docstring is its help, the first line the short one."""
    main_parser = argparse.ArgumentParser(
        prog="kvscout", description="Attention kernels for long-context inference: what runs here, how right, how fast."
    )
    main_parser.add_argument("--version", action="version", version=f"kvscout {__version__}")
    subparsers = main_parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in commands().items():
        description = (module.__doc__ or "").strip()
        command = subparsers.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 fine, 1 failed, 2 bad usage, 130 interrupted, 141 output closed."""
    words = sys.argv[1:] if argv is None else list(argv)
    name = "kvscout"
    try:
        # Within the try: the commands are imported here.
        args = parser().parse_args(words)
        name = f"kvscout {args.command}"
        args.command_line = shlex.join(["kvscout", *words])
        if sys.stdout is None:
            console.error(f"{name}: the standard output is closed, so nothing can be printed")
            return FAILED
        code = int(args.run(args))
        console.flush()
        return code
    except (UsageError, env.WrongVariable) as error:
        console.error(f"{name}: {error}")
        return USAGE
    except KeyboardInterrupt:
        console.error(f"{name}: interrupted")
        return INTERRUPTED
    except UnsupportedProblem as error:
        console.error(f"{name}: {error}")
        return FAILED
    except console.OutputError as error:
        console.give_up()
        console.error(f"{name}: {error}")
        return FAILED
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough.
        console.give_up()
        return UNREAD
