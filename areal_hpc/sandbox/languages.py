"""Languages that programs may be written in; another one is another entry."""

from __future__ import annotations

from typing import NamedTuple


class Language(NamedTuple):
    """How a program is recognised and run.

    Attributes:
        tags: words after the three backticks that mark a block of it; "" is a block without a word.
        file: name of the program's file.
        command: interpreter and options before the file's name; empty for Python, which the sandbox itself is.
    """

    tags: tuple[str, ...]
    file: str
    command: tuple[str, ...] = ()


LANGUAGES = {
    "python": Language(("", "python", "py", "python3"), "main.py"),
}
