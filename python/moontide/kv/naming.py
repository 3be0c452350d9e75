"""Keys of blocks. Processes share a block only if everything that determines the meaning of its bytes is equal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

#: Bytes at the start and at the end of each file of weights that go into the digest: enough to tell two trainings
#: apart, and few enough not to delay the start.
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Namespace:
    """Properties that engines must have in common to share blocks.

    >>> from moontide.kv import Namespace
    >>> one = Namespace("org/model", dtype="bfloat16", block_size=16, layout="2,16,8,128 x 32")
    >>> one.prefix
    'kv1/org-model/2e59a864fd18f535/'
    """

    #: Name of the model, equal in all engines.
    model: str
    #: Version of the model: a commit, or a digest of its weights. Empty if the name identifies it.
    revision: str = ""
    #: Element type of the cache; for quantised caches, with everything that their scales depend on.
    dtype: str = ""
    #: Tokens per block.
    block_size: int = 16
    #: Layout of the bytes of a block: layers, heads, order of dimensions.
    layout: str = ""
    #: Number of processes that share the model, and how ("tp2 pp1").
    ranks: str = "1"
    #: Hash function of the tokens. Engines with other hashes find no common blocks.
    hashing: str = "sha256"
    #: Everything else that is not part of the hashes: adapters, salts of tenants, versions of an engine.
    more: dict[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of all keys: the model's name, for readability, and a digest of all fields."""
        encoded = json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()
        name = _UNSAFE.sub("-", self.model).strip("-")[-60:] or "model"
        return f"kv1/{name}/{hashlib.sha256(encoded).hexdigest()[:16]}/"

    def keys(self, hashes: Iterable[bytes], parts: Sequence[str] = ("0",)) -> list[str]:
        """Returns the keys of blocks, one per part. A part of a block belongs to one rank or one group of layers."""
        return keys_of(self.prefix, hashes, parts)


def keys_of(prefix: str, hashes: Iterable[bytes], parts: Sequence[str]) -> list[str]:
    """Returns the keys of blocks under the prefix of a namespace."""
    return [f"{prefix}{block.hex()}/{part}" for block in hashes for part in parts]


def block_hashes(
    tokens: Sequence[int], block_size: int, *, parent: bytes = b"", salt: str = "", adapter: str = ""
) -> list[bytes]:
    """Returns one hash for each full block of tokens. A hash covers all tokens up to the end of its block.

    ``salt`` and ``adapter`` change all hashes, so tenants and adapters do not share blocks. To continue after blocks
    that are already hashed, pass the last hash as ``parent``.

    >>> from moontide.kv import block_hashes
    >>> first = block_hashes(range(64), 16)
    >>> len(first), first[1] == block_hashes(range(16, 64), 16, parent=first[0])[0]
    (4, True)
    """
    return list(_chain(tokens, block_size, parent or _root(salt, adapter)))


def _root(salt: str, adapter: str) -> bytes:
    return hashlib.sha256(json.dumps(["moontide", adapter, salt]).encode()).digest()


def _chain(tokens: Sequence[int], block_size: int, parent: bytes) -> Iterator[bytes]:
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    for start in range(0, len(tokens) - block_size + 1, block_size):
        words = b"".join(int(token).to_bytes(8, "little") for token in tokens[start : start + block_size])
        parent = hashlib.sha256(parent + words).digest()
        yield parent


def digest_of(folder: Path) -> str:
    """Returns a digest of a model folder: of its configuration and of samples of its weights. Serves as the revision of
    models that have none."""
    sha = hashlib.sha256()
    weights = sorted(file for kind in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for file in folder.glob(kind))
    for file in [folder / "config.json", *weights]:
        if not file.is_file():
            continue
        size = file.stat().st_size
        sha.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            sha.update(content.read(_SAMPLE_BYTES))
            content.seek(max(0, size - _SAMPLE_BYTES))
            sha.update(content.read(_SAMPLE_BYTES))
    return sha.hexdigest()[:16]
