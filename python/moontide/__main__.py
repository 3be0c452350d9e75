"""The command ``moontide``, also ``python -m moontide``: replaces this process with the program of this package."""

from __future__ import annotations

import sys
from typing import NoReturn

from moontide._binary import become


def main() -> NoReturn:
    try:
        become(sys.argv[1:])
    except OSError as error:
        sys.exit(f"moontide: {error}")


if __name__ == "__main__":
    main()
