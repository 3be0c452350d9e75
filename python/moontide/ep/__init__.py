"""Expert-parallel exchange: tokens to their experts and results back, between the processes of one host.

Every process is a rank of a ``World`` and has some of the experts. In a step of a ``Channel`` each sends its tokens to
where their experts are, works on what it got, and gets the weighted sums of what became of its own. ``moe_forward`` is a
whole step; ``send``, ``wait``, ``scatter`` and ``combine`` are its parts. ``moontide.ep.reference`` is the same without
any transport, to compare with.

>>> from moontide.ep import Channel
>>> Channel.bytes(ranks=8, tokens_max=32, hidden=7168, top_k=8, experts_per_rank=32) >> 20  # MiB of each rank
7
"""

from __future__ import annotations

from moontide._native import Channel, Received, Sent, TokenRows, World
from moontide.errors import Excluded, RanksMissing

__all__ = [
    "Channel",
    "Excluded",
    "RanksMissing",
    "Received",
    "Sent",
    "TokenRows",
    "World",
]
