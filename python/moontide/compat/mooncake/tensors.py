"""Calls with tensors.

They are stored as Moontide stores tensors, with type and shape in front of the elements: what was put here is got back
here or by ``moontide.Store``, and not by a Mooncake client. Nothing is ever pickled.

A tensor that is split over ranks is stored in parts, each under the key ``<key>_tp_<rank>``.
"""

from collections.abc import Sequence
from typing import Any

from moontide.store import Store

from .codes import BAD_ARGUMENT, LOG, WRITE, code_of
from .config import ReplicateConfig, options


def _parts(tensor: Any, ranks: int, split_dim: int) -> list[Any]:
    """A tensor in as many parts as there are ranks, the first ones larger if it does not come out even."""
    length = tensor.shape[split_dim]
    size, left = divmod(length, ranks)
    parts, start = [], 0
    for rank in range(ranks):
        end = start + size + (rank < left)
        place = [slice(None)] * len(tensor.shape)
        place[split_dim] = slice(start, end)
        part = tensor[tuple(place)]
        parts.append(part.contiguous() if hasattr(part, "contiguous") else part)
        start = end
    return parts


def _of_rank(key: str, rank: int) -> str:
    return f"{key}_tp_{rank}"


class Tensors:
    """The part of the store that knows of types and shapes. Tensors are torch's where torch is there, else numpy's."""

    def _stored(self) -> Store:
        raise NotImplementedError

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Stores a tensor."""
        return self._put_tensor(key, tensor, None, False)

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """The same, with a choice of how."""
        return self._put_tensor(key, tensor, config, False)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """The same, in place of what is there."""
        return self._put_tensor(key, tensor, None, True)

    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """The same, in place of what is there, with a choice of how."""
        return self._put_tensor(key, tensor, config, True)

    def _put_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None, overwrite: bool) -> int:
        try:
            store = self._stored()
            store.put_tensor(key, tensor, options(config, 1, overwrite))
        except TypeError as error:
            LOG.warning("no tensor: %s", error)
            return BAD_ARGUMENT
        except Exception as error:
            return code_of(error, WRITE)
        return 0

    def get_tensor(self, key: str) -> Any:
        """A tensor of its own; None if there is none under this key."""
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
        # Bytes in place are compared with their digest only on request.
        if not tensor.verify():
            LOG.warning("get_tensor failed: the bytes do not match their digest")
            return None
        return copy

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """Stores many; a number for each."""
        return self.batch_pub_tensor(keys, tensors_list)

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """The same, with a choice of how."""
        return self._put_tensors(keys, tensors_list, config, False)

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """Stores many in place of what is there."""
        return self._put_tensors(keys, tensors_list, None, True)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        """The same, with a choice of how."""
        return self._put_tensors(keys, tensors_list, config, True)

    def _put_tensors(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None, overwrite: bool
    ) -> list[int]:
        if len(keys) != len(tensors_list):
            return [BAD_ARGUMENT] * len(keys)
        each = zip(keys, tensors_list, strict=True)
        return [self._put_tensor(key, tensor, config, overwrite) for key, tensor in each]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """Many tensors; None for those that are not there."""
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
        """The same, with a choice of how."""
        if tp_size <= 1:
            return self.pub_tensor(key, tensor, config)
        try:
            parts = _parts(tensor, tp_size, split_dim)
        except (AttributeError, IndexError, TypeError) as error:
            LOG.warning("no tensor that can be split along dimension %d: %s", split_dim, error)
            return BAD_ARGUMENT
        codes = [self.pub_tensor(_of_rank(key, rank), part, config) for rank, part in enumerate(parts)]
        return next((code for code in codes if code), 0)

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """A rank's part of a tensor."""
        return self.get_tensor(key if tp_size <= 1 else _of_rank(key, tp_rank))

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Stores many, each in one part per rank."""
        if len(base_keys) != len(tensors_list):
            return [BAD_ARGUMENT] * len(base_keys)
        return [
            self.put_tensor_with_tp(key, tensor, tp_rank, tp_size, split_dim)
            for key, tensor in zip(base_keys, tensors_list, strict=True)
        ]

    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> list[Any]:
        """A rank's parts of many tensors."""
        return [self.get_tensor_with_tp(key, tp_rank, tp_size) for key in base_keys]
