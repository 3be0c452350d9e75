"""Exceptions. One class for each code by which the store, its command line and its wire name a failure.

>>> issubclass(moontide.DeadlineExceeded, TimeoutError)
True
>>> moontide.NoSpace.code, moontide.NoSpace.retryable
(200, True)
"""

from __future__ import annotations

from typing import Any, ClassVar


class Error(Exception):
    """Something that the store could not do. Its text says what to do next."""

    #: The stable number of the failure.
    code: ClassVar[int] = 1
    #: Its name, as logs and other languages have it.
    name: ClassVar[str] = "Internal"
    #: Whether the same call may succeed when repeated.
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class Internal(Error):
    """A bug of ours: please report it."""


class InvalidArgument(Error, ValueError):
    """An argument makes no sense."""

    code = 2


class TooLarge(Error, ValueError):
    """A documented bound was crossed."""

    code = 3


class Unsupported(Error):
    """The peer speaks another version: run the same release on both sides."""

    code = 4


class Unauthenticated(Error, PermissionError):
    """The caller did not prove who it is."""

    code = 5


class PermissionDenied(Error, PermissionError):
    """The caller may not do this."""

    code = 6


class NotFound(Error, LookupError):
    """There is no such object. Gets say None instead."""

    code = 100


class AlreadyExists(Error):
    """The object is there already. Puts say False instead."""

    code = 101


class InProgress(Error):
    """Somebody else is writing the object."""

    code = 102
    retryable = True


class Pending(Error):
    """Accepted, but not all nodes have confirmed yet."""

    code = 103
    retryable = True


class Gone(Error):
    """What the caller refers to is no longer there in that version."""

    code = 104


class UnknownSequence(Gone, LookupError):
    """A sequence of an engine's own cache that was freed, or is another cache's."""

    def __init__(self, message: str, sequence: int = 0) -> None:
        super().__init__(message)
        #: The number that is no sequence's.
        self.sequence = sequence

    def __reduce__(self) -> tuple[type[UnknownSequence], tuple[str, int]]:
        return type(self), (str(self), self.sequence)


class NotReady(Error):
    """The object is being written."""

    code = 105
    retryable = True


class NoSpace(Error, MemoryError):
    """No room, and nothing could be evicted."""

    code = 200
    retryable = True


class NoBlocks(NoSpace):
    """An engine's own cache has not enough blocks; nothing has changed. Free, park or thin a sequence, or drop views.

    >>> from moontide.blocks import BlockCache
    >>> cache = BlockCache(layers=1, kv_heads=1, dim=8, block_tokens=4, blocks=2)
    >>> try:
    ...     cache.allocate(range(9))
    ... except moontide.NoBlocks as error:
    ...     error.wanted, error.free
    (3, 2)
    """

    def __init__(
        self, message: str, wanted: int = 0, free: int = 0, longest: int = 0, cached: int = 0, waiting: int = 0
    ) -> None:
        super().__init__(message)
        #: How many were wanted.
        self.wanted = wanted
        #: How many are free.
        self.free = free
        #: How many of those follow each other; all, where that makes no difference.
        self.longest = longest
        #: How many hold prefixes that nobody is using.
        self.cached = cached
        #: How many wait until nobody can be reading them.
        self.waiting = waiting

    def __reduce__(self) -> tuple[type[NoBlocks], tuple[str, int, int, int, int, int]]:
        return type(self), (str(self), self.wanted, self.free, self.longest, self.cached, self.waiting)


class QuotaExceeded(Error):
    """The tenant's quota is used up."""

    code = 201
    retryable = True


class Busy(Error):
    """A bounded resource is in use."""

    code = 202
    retryable = True


class Retry(Error):
    """The answer is not known yet."""

    code = 203
    retryable = True


class Leased(Error):
    """The object is leased or pinned; remove it with force, or wait."""

    code = 204
    retryable = True


class LeaseExpired(Error):
    """The reader's lease ran out in the middle of its read."""

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
    """The reservation is lost: start the put again."""

    code = 302


class StaleGeneration(Error):
    """The memory was replaced."""

    code = 303


class Excluded(StaleGeneration):
    """The others have gone on without this rank. It may come back: ``rejoin``."""


class StaleSession(Error):
    """The node's session ended."""

    code = 304
    retryable = True


class Overlap(Error):
    """The range is in use by another object."""

    code = 305


class OutOfBounds(Error):
    """An address lies outside of what it names."""

    code = 306


class DeadlineExceeded(Error, TimeoutError):
    """The call was not done within its deadline."""

    code = 400
    retryable = True


class RanksMissing(DeadlineExceeded):
    """Ranks did not come in time. Wait again, or leave them behind and wait again."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        #: Which.
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[RanksMissing], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class Unreachable(Error, ConnectionError):
    """Nobody answers there."""

    code = 401
    retryable = True


class ConnectionLost(Error, ConnectionError):
    """The connection broke in the middle."""

    code = 402
    retryable = True


class Cancelled(Error):
    """The caller gave up."""

    code = 403


class Corrupt(Error):
    """The bytes do not match their digest, and were not returned."""

    code = 500
    retryable = True


class DiskError(Error):
    """A disk answered with an error."""

    code = 501
    retryable = True


class DiskFull(Error):
    """A disk is full."""

    code = 502
    retryable = True


class DeviceError(Error):
    """A device or its driver answered with an error."""

    code = 503


class Closed(Error, ValueError):
    """Used after it was closed, or in a child of the process that made it."""

    code = 2


class BatchError(Error):
    """Some objects of a batch failed. The others are done.

    >>> try:
    ...     store.batch_put(["fine", "k" * 5000], [b"1", b"2"])
    ... except moontide.BatchError as error:
    ...     [type(outcome).__name__ for outcome in error.outcomes]
    ['bool', 'InvalidArgument']
    """

    def __init__(self, outcomes: list[Any]) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, Error)]
        super().__init__(f"{len(failed)} of {len(outcomes)} failed; the first: {failed[0]}")
        #: One for each key, in order: what the call gives, or the exception.
        self.outcomes = outcomes
        self.code = failed[0].code  # type: ignore[misc]
        self.retryable = all(error.retryable for error in failed)  # type: ignore[misc]

    def __reduce__(self) -> tuple[type[BatchError], tuple[list[Any]]]:
        return type(self), (self.outcomes,)


#: The class for each code.
BY_CODE: dict[int, type[Error]] = {
    kind.code: kind for kind in Error.__subclasses__() if kind not in (Closed, BatchError)
}
