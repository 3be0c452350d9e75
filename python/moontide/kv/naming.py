"""What a block is called. Two processes may share bytes only if all that gives those bytes a meaning is equal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

#: Of each file of weights so much at its beginning and at its end goes into the digest: enough to tell two trainings
#: apart, and little enough not to be noticed at the start.
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Namespace:
    """What engines must have in common to use each other's blocks.

    >>> from moontide.kv import Namespace
    >>> one = Namespace("org/model", dtype="bfloat16", block_size=16, layout="2,16,8,128 x 32")
    >>> one.prefix
    'kv1/org-model/2e59a864fd18f535/'
    """

    #: The model, as all of them name it.
    model: str
    #: Its version: a commit, a digest of its weights. Empty if the name alone says it.
    revision: str = ""
    #: The type of one number of the cache; for quantised caches, with whatever their scales depend on.
    dtype: str = ""
    #: Tokens of a block.
    block_size: int = 16
    #: How the bytes of a block lie: layers, heads, order of dimensions.
    layout: str = ""
    #: How many processes share the model, and in which ways ("tp2 pp1").
    ranks: str = "1"
    #: How tokens become hashes: who hashes otherwise never finds anything, and should not try.
    hashing: str = "sha256"
    #: Whatever else: adapters, tenants' salts, versions of an engine, if they are not part of the hashes.
    more: dict[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What all its keys begin with: for people the model's name, and a digest of everything."""
        said = json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()
        name = _UNSAFE.sub("-", self.model).strip("-")[-60:] or "model"
        return f"kv1/{name}/{hashlib.sha256(said).hexdigest()[:16]}/"

    def keys(self, hashes: Iterable[bytes], parts: Sequence[str] = ("0",)) -> list[str]:
        """The keys of blocks, part by part: a part is what one rank, or one group of layers, has of a block."""
        return keys_of(self.prefix, hashes, parts)


def keys_of(prefix: str, hashes: Iterable[bytes], parts: Sequence[str]) -> list[str]:
    """The keys of blocks under a namespace's prefix, for whoever was told no more of it."""
    return [f"{prefix}{block.hex()}/{part}" for block in hashes for part in parts]


def block_hashes(
    tokens: Sequence[int], block_size: int, *, parent: bytes = b"", salt: str = "", adapter: str = ""
) -> list[bytes]:
    """One hash for each full block of tokens. Each stands for all tokens up to its end, not for its own alone.

    ``salt`` and ``adapter`` change all of them: what was computed for one tenant, or with one adapter, is not found by
    another. To go on after blocks that are hashed already, say the last hash as ``parent``.

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
        raise ValueError(f"a block has at least one token, not {block_size}")
    for start in range(0, len(tokens) - block_size + 1, block_size):
        words = b"".join(int(token).to_bytes(8, "little") for token in tokens[start : start + block_size])
        parent = hashlib.sha256(parent + words).digest()
        yield parent


def digest_of(folder: Path) -> str:
    """Of a folder with a model: its configuration, and samples of its weights. A revision for models without one."""
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
