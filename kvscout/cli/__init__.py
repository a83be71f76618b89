"""The command line. A command is a file of this folder with ``add_arguments(parser)`` and ``run(args) -> int``."""
