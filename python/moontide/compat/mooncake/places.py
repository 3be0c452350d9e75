"""Names of segments, as nodes of Moontide.

Mooncake names a segment by the address of its process. In Moontide that is an address of a node.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from moontide.errors import Error

from .setup import address_of, split_port

# Time in seconds for which the list of nodes is used. A node that starts again gets a new id at the same address.
_KEPT_S = 10.0

# Time in seconds after which a name that is not in the list makes it be fetched again: a node may have joined since.
_UNKNOWN_S = 1.0

# Maximum number of places that a put can prefer.
_PLACES_MAX = 8

# Maximum number of names whose addresses are kept. A cluster has one per process.
_NAMES_MAX = 4096


class Places:
    """Translates names of segments to ids of nodes. Thread-safe: threads that refresh at a time do the same."""

    def __init__(self, nodes: Callable[[], Iterable[dict[str, Any]]]) -> None:
        self._nodes = nodes
        self._known: dict[str, str] = {}
        self._fetched_at = -_KEPT_S
        self._resolved: dict[str, str] = {}

    def of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the nodes with these names, in order and without repetitions. Unknown names are left out: Mooncake
        uses other segments then."""
        names = list(names)
        age_s = time.monotonic() - self._fetched_at
        found = self._find(names) if age_s < _KEPT_S else [None]
        if None in found and age_s >= _UNKNOWN_S:
            self._fetch()
            found = self._find(names)
        return tuple(node for node in dict.fromkeys(found) if node is not None)[:_PLACES_MAX]

    def _find(self, names: list[str]) -> list[str | None]:
        known = self._known
        return [known.get(name) or known.get(self._address(name)) for name in names]

    def _fetch(self) -> None:
        try:
            self._known = {address: node["node"] for node in self._nodes() for _, address in node["addresses"]}
        except Error:
            pass  # the put reports it if the master is still unreachable
        self._fetched_at = time.monotonic()

    def _address(self, name: str) -> str:
        """Returns the name with the address of its host. A name that cannot be resolved is tried once."""
        address = self._resolved.get(name)
        if address is None:
            try:
                address = f"{address_of(name)}:{split_port(name)[1]}"
            except ValueError:
                address = name
            if len(self._resolved) >= _NAMES_MAX:
                self._resolved.clear()
            self._resolved[name] = address
        return address
