"""``Store`` with the mapping protocol, and ``dev()``: a cluster for development."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any, Optional, Union

from moontide import _native
from moontide._binary import binary
from moontide.errors import Closed, InvalidArgument, Pending

Key = Union[str, bytes]


class Store(_native.Store):
    __doc__ = _native.Store.__doc__

    #: Development cluster of this store; the reference keeps it running.
    _dev: Optional[Dev] = None

    @classmethod
    def connect(cls, master: Optional[str] = None, **settings: Any) -> Store:
        """Equals ``Store(master, ...)``."""
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
        """Stores bytes unchanged, and an array with its type and shape. Replaces an existing object.

        Ignores Pending: the value is stored. Use put(overwrite=True) to learn whether the replacement is certain.

        >>> import numpy
        >>> store["a"] = numpy.zeros((2, 2), dtype="float16")
        >>> store["a"]
        <moontide.Tensor float16 [2, 2]>
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            with suppress(Pending):
                self.put(key, value, overwrite=True)
        elif isinstance(value, str):
            raise TypeError("a str cannot be stored; encode it, e.g. with value.encode()")
        else:
            with suppress(Pending):
                self.put_tensor(key, value, overwrite=True)

    def __getitem__(self, key: Key) -> Any:
        """Returns the stored bytes, or a Tensor. Raises KeyError if the key does not exist."""
        found = self._get_value(key)
        if found is None:
            raise KeyError(key)
        if isinstance(found, _native.Tensor):
            return found
        content = bytes(found)
        # Copies are always verified. If the local copy is corrupt, another replica may be intact.
        if not found.verify():
            fetched = self.get(key)
            if fetched is None:
                raise KeyError(key)
            content = fetched
        return content

    def __delitem__(self, key: Key) -> None:
        """Removes an object. Raises KeyError if the key does not exist."""
        if not self.remove(key):
            raise KeyError(key)

    # Without this, Python would iterate with integers as keys. `keys()` lists the keys.
    __iter__ = None

    def __contains__(self, key: Key) -> bool:
        return self.exists(key)

    def __repr__(self) -> str:
        return f"<moontide.Store of {self.master}{', closed' if self.closed else ''}>"


class Dev:
    """A master and nodes in this process. They end with the process, and all objects are lost."""

    def __init__(self, memory: int, nodes: int, disk_dir: Optional[Union[str, os.PathLike[str]]]) -> None:
        if nodes < 1:
            raise InvalidArgument("a cluster needs at least one node")
        self._nodes: list[_native.LocalNode] = []
        self._closed = False
        # A new directory: the content of an old one would belong to a cluster that no longer exists.
        self._disks = None if disk_dir is None else tempfile.mkdtemp(prefix="moontide-dev-", dir=disk_dir)
        self._master = _native.LocalMaster()
        #: Address of the master for stores, also in other local processes.
        self.master: str = self._master.address
        #: URL of the master's admin endpoints.
        self.admin: str = f"http://{self._master.admin_address}"
        try:
            for number in range(nodes):
                if self._disks is None:
                    node = _native.LocalNode(self.master, memory, drain_timeout=0.2)
                else:
                    # The directory is deleted with the cluster: nothing has to be written to it at the end.
                    disk = f"{self._disks}/{number}"
                    node = _native.LocalNode(
                        self.master, memory, disk_dir=disk, disk_flush_timeout=0.0, drain_timeout=0.2
                    )
                self._nodes.append(node)
        except BaseException:
            self.close()
            raise

    def store(self, **settings: Any) -> Store:
        """Returns a store of this cluster. The store keeps the cluster running."""
        if self._closed:
            raise Closed("the cluster is closed; create another one with moontide.dev()")
        store = Store(self.master, **settings)
        store._dev = self
        return store

    def close(self) -> None:
        """Shuts the cluster down. Further calls do nothing."""
        self._closed = True
        # The nodes first: they unregister from the master.
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
    """Starts a development cluster in this process: ``nodes`` nodes with ``memory`` bytes each.

    Other local processes can use it too. With ``disk_dir``, the cluster has a disk tier in a new subdirectory, which it
    deletes when it closes. An object must fit into the memory of all nodes together.

    >>> with moontide.dev(64 << 20, nodes=2) as cluster, cluster.store() as store:
    ...     store.put("twice", b"...", replicas=2)
    True
    """
    return Dev(memory, nodes, disk_dir)


def doctor() -> bool:
    """Prints the capabilities of this host and suggested fixes, as ``moontide doctor``. Returns whether all checks
    passed."""
    return subprocess.run([binary(), "doctor"], check=False).returncode == 0
