"""Messages in the words of the library that the caller wrote for."""

from __future__ import annotations

from collections.abc import Mapping


def renamed(error: TypeError | ValueError, names: Mapping[str, str]) -> TypeError | ValueError:
    """An error whose message begins with an argument's name here, with the name that the caller knows it by.

    Args:
        error: raised by a check: ``"name: expected ..., got ..."``.
        names: what each argument is called there, by what it is called here.
    """
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{names[name]}:{rest}") if colon and name in names else error
