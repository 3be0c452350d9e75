"""Error numbers: 0 is success, negative numbers are errors, and calls do not raise.

Programs compare these numbers, so they are Mooncake's. Moontide's codes are in ``crates/types/src/error.rs``; calls
with addresses return them as negative numbers, and all other calls raise exceptions with a code.
"""

import logging
from typing import NoReturn

from moontide.errors import Closed, Error

LOG = logging.getLogger("moontide.compat.mooncake")

INTERNAL = -1
NO_SPACE = -200
BAD_KEY = -400
BAD_ARGUMENT = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
CORRUPT = -801
UNREACHABLE = -900
TIMED_OUT = -901

# From Moontide's codes, negative as in the results of calls with addresses.
READ = {
    -1: INTERNAL,
    -2: BAD_ARGUMENT,
    -3: BAD_ARGUMENT,
    -4: UNREACHABLE,
    -5: UNREACHABLE,
    -6: BAD_ARGUMENT,
    -100: NOT_FOUND,
    -101: EXISTS,
    -102: NOT_READY,
    -103: NOT_READY,
    -104: NOT_FOUND,
    -105: NOT_READY,
    -200: NO_SPACE,
    -201: NO_SPACE,
    -202: UNREACHABLE,
    -203: UNREACHABLE,
    -204: LEASED,
    -205: LEASE_EXPIRED,
    -300: UNREACHABLE,
    -301: UNREACHABLE,
    -302: TRANSFER_FAILED,
    -303: TRANSFER_FAILED,
    -304: UNREACHABLE,
    -305: TRANSFER_FAILED,
    -306: BAD_ARGUMENT,
    -400: TIMED_OUT,
    -401: UNREACHABLE,
    -402: UNREACHABLE,
    -403: INTERNAL,
    -500: CORRUPT,
    -501: TRANSFER_FAILED,
    -502: NO_SPACE,
}
# A put of an object that exists, or that another client is writing, has nothing to do. A replacement that not all nodes
# have confirmed is stored. An object that never fits has no space.
WRITE = {**READ, -3: NO_SPACE, -101: 0, -102: 0, -103: 0}
# A removal that not all nodes have confirmed counts as done: the master completes it.
REMOVE = {**READ, -103: 0}
# No object has an invalid key.
LOOKUP = {**READ, -2: 0, -3: 0}


class NotSetUp(Exception):
    """The store is not set up, or is closed."""


def not_set_up(*_arguments: object, **_named: object) -> NoReturn:
    """Replaces all calls of the store before ``setup`` and after ``close``."""
    raise NotSetUp


def code_of(error: BaseException, codes: dict[int, int] = READ) -> int:
    """Returns the number for an exception. Raises TypeError for arguments of a wrong type, as Mooncake does."""
    if isinstance(error, (NotSetUp, Closed)):
        return BAD_ARGUMENT
    if isinstance(error, Error):
        return codes.get(-error.code, INTERNAL)
    if isinstance(error, OverflowError):
        raise TypeError(f"sizes and addresses must be 0 to 2**64 - 1: {error}") from None
    if isinstance(error, ValueError):
        LOG.warning("invalid argument: %s", error)
        return BAD_ARGUMENT
    raise error
