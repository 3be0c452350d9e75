"""Blocks of a KV cache in the store, for any engine: names, addresses, prefixes, and moving them in the background.

``BlockCache`` is all that a simple engine needs. Connectors of engines that must never wait are made of ``Door``,
``Lookups`` and ``Transfers``; those that tell routers what they saved have ``Departures`` say what has left since.
"""

from .cache import BlockCache
from .departures import Departures
from .door import Door
from .lookups import Lookups
from .naming import Namespace, block_hashes, digest_of, keys_of
from .pages import Pages, Run
from .transfers import Batch, Load, Transfers

__all__ = [
    "Batch",
    "BlockCache",
    "Departures",
    "Door",
    "Load",
    "Lookups",
    "Namespace",
    "Pages",
    "Run",
    "Transfers",
    "block_hashes",
    "digest_of",
    "keys_of",
]
