"""``Store`` with the manners of a mapping, and ``dev()``: a cluster to try things out."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from types import TracebackType
from typing import Any, Optional, Union

from moontide import _native
from moontide._binary import binary
from moontide.errors import Closed, InvalidArgument

Key = Union[str, bytes]


class Store(_native.Store):
    __doc__ = _native.Store.__doc__

    #: The cluster to try things out that it belongs to, which must not end before.
    _dev: Optional[Dev] = None

    @classmethod
    def connect(cls, master: Optional[str] = None, **settings: Any) -> Store:
        """The same as ``Store(master, ...)``."""
        return cls(master, **settings)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __setitem__(self, key: Key, value: Any) -> None:
        """Stores bytes as they are, and an array with its type and shape; replaces what was there.

        >>> import numpy
        >>> store["a"] = numpy.zeros((2, 2), dtype="float16")
        >>> store["a"]
        <moontide.Tensor float16 [2, 2]>
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            self.put(key, value, overwrite=True)
        elif isinstance(value, str):
            raise TypeError("text has no bytes of its own; store it encoded, e.g. value.encode()")
        else:
            self.put_tensor(key, value, overwrite=True)

    def __getitem__(self, key: Key) -> Any:
        """What was stored: bytes, or a Tensor in place. Raises KeyError if there is no such object."""
        found = self._get_value(key)
        if found is None:
            raise KeyError(key)
        if isinstance(found, _native.Tensor):
            return found
        content = bytes(found)
        # As for every copy. What is not right here may be elsewhere.
        if not found.verify():
            again = self.get(key)
            if again is None:
                raise KeyError(key)
            content = again
        return content

    def __delitem__(self, key: Key) -> None:
        """Removes an object. Raises KeyError if there is no such object."""
        if not self.remove(key):
            raise KeyError(key)

    # Python would otherwise try it with numbers as keys; `keys()` lists them.
    __iter__ = None

    def __contains__(self, key: Key) -> bool:
        return self.exists(key)

    def __repr__(self) -> str:
        return f"<moontide.Store of {self.master}{', closed' if self.closed else ''}>"


class Dev:
    """A master and nodes in this process. They end with it, and everything they have."""

    def __init__(self, memory: int, nodes: int, disk_dir: Optional[Union[str, os.PathLike[str]]]) -> None:
        if nodes < 1:
            raise InvalidArgument("a cluster needs at least one node")
        self._nodes: list[_native.LocalNode] = []
        self._closed = False
        # What is in it belongs to a cluster that never comes back.
        self._disks = None if disk_dir is None else tempfile.mkdtemp(prefix="moontide-dev-", dir=disk_dir)
        self._master = _native.LocalMaster()
        #: What stores connect to, also those of other processes of this host.
        self.master: str = self._master.address
        #: Where the master's page for operators is.
        self.admin: str = f"http://{self._master.admin_address}"
        try:
            for number in range(nodes):
                place = None if self._disks is None else f"{self._disks}/{number}"
                self._nodes.append(_native.LocalNode(self.master, memory, disk_dir=place, drain=0.2))
        except BaseException:
            self.close()
            raise

    def store(self, **settings: Any) -> Store:
        """A store of this cluster, which lasts at least as long as the store."""
        if self._closed:
            raise Closed("the cluster is closed; make another with moontide.dev()")
        store = Store(self.master, **settings)
        store._dev = self
        return store

    def close(self) -> None:
        """Ends it. A second time it does nothing."""
        self._closed = True
        # The nodes first: they say goodbye to the master.
        while self._nodes:
            self._nodes.pop().close()
        self._master.close()
        if self._disks is not None:
            shutil.rmtree(self._disks, ignore_errors=True)

    def __enter__(self) -> Dev:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        value: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<moontide.Dev with its master at {self.master}{', closed' if self._closed else ''}>"


def dev(memory: int = 256 << 20, *, nodes: int = 1, disk_dir: Optional[Union[str, os.PathLike[str]]] = None) -> Dev:
    """A cluster in this process, to try things out: ``memory`` bytes in each of ``nodes`` nodes.

    Other processes of this host can use it, too. With ``disk_dir``, what does not fit into memory goes
    to a new directory there, which goes with the cluster. An object must fit into a quarter of a node's memory.

    >>> with moontide.dev(64 << 20, nodes=2) as cluster, cluster.store() as store:
    ...     store.put("twice", b"...", replicas=2)
    True
    """
    return Dev(memory, nodes, disk_dir)


def doctor() -> bool:
    """Prints what this machine offers and what is missing, as ``moontide doctor`` does; whether nothing is in the way."""
    return subprocess.run([binary(), "doctor"], check=False).returncode == 0
