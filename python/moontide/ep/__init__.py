"""Expert-parallel dispatch and combine: sends tokens to their experts and results back, between processes of one host.

Every process is a rank of a ``World`` and has some of the experts. In a step of a ``Channel`` each rank sends its
tokens to the ranks of their experts, computes on the tokens that it receives, and gets the weighted sums of the results
of its own tokens. ``moe_forward`` is a whole step; ``start_dispatch``, ``wait``, ``scatter`` and ``combine`` are its
parts. ``moontide.ep.reference`` computes the same without transport, for comparison.

>>> from moontide.ep import Channel
>>> Channel.bytes(ranks=8, tokens_max=32, hidden=7168, top_k=8, experts_per_rank=32) >> 20  # MiB of each rank
7
"""

from __future__ import annotations

from moontide._native import Channel, Dispatched, Dispatching, TokenRows, World
from moontide.errors import Excluded, RanksMissing

__all__ = [
    "Channel",
    "Dispatched",
    "Dispatching",
    "Excluded",
    "RanksMissing",
    "TokenRows",
    "World",
]
