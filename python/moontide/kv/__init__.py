"""KV cache blocks in the store, for any inference engine: keys, addresses, prefix lookups and background transfers.

``StoreBlockCache`` is enough for a simple engine. Connectors of engines that must not block use ``StoreConnection``,
``Lookups`` and ``Transfers``. Connectors that announce saved blocks to routers use ``RemovalTracker`` to learn which
blocks were removed since.
"""

from .cache import StoreBlockCache
from .connection import StoreConnection
from .lookups import Lookups
from .naming import Namespace, block_hashes, digest_of, keys_of
from .pages import BlockPages, LayerRun
from .removals import RemovalTracker
from .transfers import Batch, Load, Transfers

__all__ = [
    "Batch",
    "BlockPages",
    "LayerRun",
    "Load",
    "Lookups",
    "Namespace",
    "RemovalTracker",
    "StoreBlockCache",
    "StoreConnection",
    "Transfers",
    "block_hashes",
    "digest_of",
    "keys_of",
]
