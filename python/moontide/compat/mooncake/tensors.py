"""Calls with tensors.

Tensors are stored in Moontide's format, with a header of type and shape before the elements. ``moontide.Store`` can
read them, a Mooncake client cannot. Pickle is never used.

A tensor that is split over ranks is stored in parts, each under the key ``<key>_tp_<rank>``.
"""

from collections.abc import Sequence
from typing import Any

from moontide.store import Store

from .codes import BAD_ARGUMENT, LOG, WRITE, code_of
from .config import ReplicateConfig, options
from .places import Places


def _parts(tensor: Any, ranks: int, split_dim: int) -> list[Any]:
    """Splits a tensor into one part per rank. The first parts are larger if the length is not a multiple."""
    length = tensor.shape[split_dim]
    size, left = divmod(length, ranks)
    parts, start = [], 0
    for rank in range(ranks):
        end = start + size + (rank < left)
        index = [slice(None)] * len(tensor.shape)
        index[split_dim] = slice(start, end)
        part = tensor[tuple(index)]
        parts.append(part.contiguous() if hasattr(part, "contiguous") else part)
        start = end
    return parts


def _of_rank(key: str, rank: int) -> str:
    return f"{key}_tp_{rank}"


class Tensors:
    """Calls of the store for tensors. Results are torch tensors if torch is installed, otherwise numpy arrays."""

    _places: Places

    def _stored(self) -> Store:
        raise NotImplementedError

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Stores a tensor."""
        return self._put_tensor(key, tensor, None, False)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """As `put_tensor`, with options."""
        return self._put_tensor(key, tensor, config, False)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """As `put_tensor`, but replaces an existing object."""
        return self._put_tensor(key, tensor, None, True)

    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """As `upsert_tensor`, with options."""
        return self._put_tensor(key, tensor, config, True)

    def _put_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None, overwrite: bool) -> int:
        try:
            store = self._stored()
            store.put_tensor(key, tensor, options(config, 1, self._places, overwrite))
        except TypeError as error:
            LOG.warning("put of a tensor failed: not a tensor: %s", error)
            return BAD_ARGUMENT
        except Exception as error:
            return code_of(error, WRITE)
        return 0

    def get_tensor(self, key: str) -> Any:
        """Returns a copy of a tensor; None if the key has no tensor."""
        try:
            tensor = self._stored().get_tensor(key)
        except Exception as error:
            LOG.warning("get_tensor failed: %d", code_of(error))
            return None
        if tensor is None:
            return None
        try:
            copy = tensor.torch().clone()
        except ImportError:
            copy = tensor.numpy().copy()
        # Zero-copy bytes are verified only on request.
        if not tensor.verify():
            LOG.warning("get_tensor failed: the bytes do not match their digest")
            return None
        return copy

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """Stores many tensors. Returns a number for each."""
        return self.batch_pub_tensor(keys, tensors_list)

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """As `batch_put_tensor`, with options."""
        return self._put_tensors(keys, tensors_list, config, False)

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """As `batch_put_tensor`, but replaces existing objects."""
        return self._put_tensors(keys, tensors_list, None, True)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """As `batch_upsert_tensor`, with options."""
        return self._put_tensors(keys, tensors_list, config, True)

    def _put_tensors(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None, overwrite: bool
    ) -> list[int]:
        if len(keys) != len(tensors_list):
            return [BAD_ARGUMENT] * len(keys)
        each = zip(keys, tensors_list, strict=True)
        return [self._put_tensor(key, tensor, config, overwrite) for key, tensor in each]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """Returns many tensors; None for each key that has none."""
        return [self.get_tensor(key) for key in keys]

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Stores a tensor in one part per rank."""
        return self.pub_tensor_with_tp(key, tensor, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """As `put_tensor_with_tp`, with options."""
        if tp_size <= 1:
            return self.pub_tensor(key, tensor, config)
        try:
            parts = _parts(tensor, tp_size, split_dim)
        except (AttributeError, IndexError, TypeError) as error:
            LOG.warning("cannot split the tensor along dimension %d: %s", split_dim, error)
            return BAD_ARGUMENT
        codes = [self.pub_tensor(_of_rank(key, rank), part, config) for rank, part in enumerate(parts)]
        return next((code for code in codes if code), 0)

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """Returns the part of a tensor for a rank."""
        return self.get_tensor(key if tp_size <= 1 else _of_rank(key, tp_rank))

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Stores many tensors, each in one part per rank."""
        if len(base_keys) != len(tensors_list):
            return [BAD_ARGUMENT] * len(base_keys)
        return [
            self.put_tensor_with_tp(key, tensor, tp_rank, tp_size, split_dim)
            for key, tensor in zip(base_keys, tensors_list, strict=True)
        ]

    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> list[Any]:
        """Returns the parts of many tensors for a rank."""
        return [self.get_tensor_with_tp(key, tp_rank, tp_size) for key in base_keys]
