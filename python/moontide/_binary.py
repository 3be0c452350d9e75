"""Path of the program ``moontide`` of this package, and a function that replaces this process with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["binary", "become"]

_VARIABLE = "MOONTIDE_BINARY"
_PACKAGED = Path(__file__).resolve().parent / "bin" / "moontide"


def binary() -> str:
    """Returns the path of the program ``moontide``: that of this package, or the value of ``MOONTIDE_BINARY``.

    >>> import subprocess
    >>> subprocess.run([binary(), "--version"], check=True)  # doctest: +SKIP
    """
    named = os.environ.get(_VARIABLE)
    path = Path(named) if named else _PACKAGED
    if os.access(path, os.X_OK) and path.is_file():
        return str(path)
    if named:
        raise FileNotFoundError(f"{_VARIABLE} is {named!r}, which is not an executable file")
    # PATH is not searched: the `moontide` found there may be the script that called this function.
    raise FileNotFoundError(
        f"this installation of moontide has no program at {path}; build a wheel with `cargo xtask wheel`, "
        f"or set {_VARIABLE}"
    )


def become(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process with the program, so that the pid stays the same."""
    program = binary()
    # Python ignores these signals, and ignored signals stay ignored in the program and its children.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, ["moontide", *arguments])
