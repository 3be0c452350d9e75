"""Exceptions. One class per error code of the store, the command line and the wire protocol.

>>> issubclass(moontide.DeadlineExceeded, TimeoutError)
True
>>> moontide.NoSpace.code, moontide.NoSpace.retryable
(200, True)
"""

from __future__ import annotations

from typing import Any, ClassVar


class Error(Exception):
    """Failure of a call. The message contains a remedy."""

    #: Stable error code.
    code: ClassVar[int] = 1
    #: Name of the code, as in logs and in other languages.
    name: ClassVar[str] = "Internal"
    #: Whether the same call may succeed if repeated.
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class Internal(Error):
    """Bug in Moontide; please report it."""


class InvalidArgument(Error, ValueError):
    """Invalid argument."""

    code = 2


class TooLarge(Error, ValueError):
    """A documented limit is exceeded, or the object never fits into the memory of the nodes."""

    code = 3


class Unsupported(Error):
    """The peer runs an incompatible release; run the same release on both sides."""

    code = 4


class Unauthenticated(Error, PermissionError):
    """The caller is not authenticated."""

    code = 5


class PermissionDenied(Error, PermissionError):
    """The caller is not authorized."""

    code = 6


class NotFound(Error, LookupError):
    """The object does not exist. Gets return None instead."""

    code = 100


class AlreadyExists(Error):
    """The object exists. Puts return False instead."""

    code = 101


class InProgress(Error):
    """Another client is writing the object."""

    code = 102
    retryable = True


class Pending(Error):
    """Removed or replaced, but a node that has not confirmed it may still undo it."""

    code = 103
    retryable = True


class Gone(Error):
    """The version that the caller refers to no longer exists."""

    code = 104


class UnknownSequence(Gone, LookupError):
    """The sequence was freed, or belongs to another block cache."""

    def __init__(self, message: str, sequence: int = 0) -> None:
        super().__init__(message)
        #: Id that the caller passed.
        self.sequence = sequence

    def __reduce__(self) -> tuple[type[UnknownSequence], tuple[str, int]]:
        return type(self), (str(self), self.sequence)


class NotReady(Error):
    """The object is being written."""

    code = 105
    retryable = True


class NoSpace(Error, MemoryError):
    """No space, and nothing could be evicted."""

    code = 200
    retryable = True


class OutOfBlocks(NoSpace):
    """A block cache has not enough free blocks; the call changed nothing. Free, suspend or prune a sequence, or drop
    views.

    >>> from moontide.blocks import BlockCache
    >>> cache = BlockCache(layers=1, kv_heads=1, dim=8, block_tokens=4, blocks=2)
    >>> try:
    ...     cache.allocate(range(9))
    ... except moontide.OutOfBlocks as error:
    ...     error.needed, error.free
    (3, 2)
    """

    def __init__(
        self,
        message: str,
        needed: int = 0,
        free: int = 0,
        longest: int = 0,
        cached: int = 0,
        held_by_readers: int = 0,
    ) -> None:
        super().__init__(message)
        #: Number of blocks that the call needs.
        self.needed = needed
        #: Number of free blocks.
        self.free = free
        #: Length of the longest run of adjacent free blocks; equal to `free` in a paged cache.
        self.longest = longest
        #: Number of blocks with cached prefixes that no sequence uses.
        self.cached = cached
        #: Number of blocks that wait for readers.
        self.held_by_readers = held_by_readers

    def __reduce__(self) -> tuple[type[OutOfBlocks], tuple[str, int, int, int, int, int]]:
        return type(self), (str(self), self.needed, self.free, self.longest, self.cached, self.held_by_readers)


class QuotaExceeded(Error):
    """The tenant's quota is used up."""

    code = 201
    retryable = True


class TooManyTenants(Error):
    """Too many tenants have objects."""

    code = 206
    retryable = True


class Busy(Error):
    """A limited resource is in use."""

    code = 202
    retryable = True


class Retry(Error):
    """The result is not known yet."""

    code = 203
    retryable = True


class Leased(Error):
    """The object is leased or pinned; remove it with force, or retry later."""

    code = 204
    retryable = True


class LeaseExpired(Error):
    """The lease of the reader expired during the read."""

    code = 205
    retryable = True


class WrongMaster(Error):
    """This master does not host the key."""

    code = 300
    retryable = True


class StaleTerm(Error):
    """The master was replaced."""

    code = 301
    retryable = True


class StaleEpoch(Error):
    """The reservation is lost; repeat the put."""

    code = 302


class StaleGeneration(Error):
    """The memory was replaced."""

    code = 303


class Excluded(StaleGeneration):
    """The other ranks excluded this rank. It can ``rejoin``."""


class StaleSession(Error):
    """The node's session ended."""

    code = 304
    retryable = True


class Overlap(Error):
    """The range is in use by another object."""

    code = 305


class OutOfBounds(Error):
    """An address is out of bounds."""

    code = 306


class DeadlineExceeded(Error, TimeoutError):
    """The call timed out."""

    code = 400
    retryable = True


class RanksMissing(DeadlineExceeded):
    """Timed out waiting for ranks. Retry, or ``exclude`` them and retry."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        #: Missing ranks.
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[RanksMissing], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class Unreachable(Error, ConnectionError):
    """The address does not answer."""

    code = 401
    retryable = True


class ConnectionLost(Error, ConnectionError):
    """The connection was lost during the call."""

    code = 402
    retryable = True


class Cancelled(Error):
    """The caller cancelled the call."""

    code = 403


class Corrupt(Error):
    """The bytes did not match their digest and were not returned."""

    code = 500
    retryable = True


class DiskError(Error):
    """A disk reported an error."""

    code = 501
    retryable = True


class DiskFull(Error):
    """A disk is full."""

    code = 502
    retryable = True


class DeviceError(Error):
    """A device or its driver reported an error."""

    code = 503


class Closed(Error, ValueError):
    """Use after close, or in a forked child."""

    code = 2


class BatchError(Error):
    """Some objects of a batch failed. The others were processed.

    >>> try:
    ...     store.batch_put(["fine", "k" * 5000], [b"1", b"2"])
    ... except moontide.BatchError as error:
    ...     [type(outcome).__name__ for outcome in error.outcomes]
    ['bool', 'InvalidArgument']
    """

    def __init__(self, outcomes: list[Any]) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, Error)]
        super().__init__(f"{len(failed)} of {len(outcomes)} failed; the first: {failed[0]}")
        #: One entry per key, in order: the result or the exception.
        self.outcomes = outcomes
        self.code = failed[0].code  # type: ignore[misc]
        self.retryable = all(error.retryable for error in failed)  # type: ignore[misc]

    def __reduce__(self) -> tuple[type[BatchError], tuple[list[Any]]]:
        return type(self), (self.outcomes,)


#: Class of each code.
BY_CODE: dict[int, type[Error]] = {
    kind.code: kind for kind in Error.__subclasses__() if kind not in (Closed, BatchError)
}
