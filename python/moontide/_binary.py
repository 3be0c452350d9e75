"""Where the program ``moontide`` is that belongs to this package, and how a process becomes it."""

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
    """The path of the program ``moontide``: the one in this package, or the one that ``MOONTIDE_BINARY`` names.

    >>> import subprocess
    >>> subprocess.run([binary(), "--version"], check=True)  # doctest: +SKIP
    """
    named = os.environ.get(_VARIABLE)
    path = Path(named) if named else _PACKAGED
    if os.access(path, os.X_OK) and path.is_file():
        return str(path)
    if named:
        raise FileNotFoundError(f"{_VARIABLE} is {named!r}, which is not a program")
    # PATH is not searched: what stands there under this name may be the script that has just called us.
    raise FileNotFoundError(
        f"this installation of moontide has no program at {path}; `cargo xtask wheel` builds one that has, "
        f"and {_VARIABLE} can name another"
    )


def become(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the program, so that whoever started it holds the program's own pid."""
    program = binary()
    # Python ignores these, and what is ignored stays so in the next program and in all that it starts.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, ["moontide", *arguments])
