"""``ReplicateConfig``: options of a put, with Mooncake's names."""

import enum
from typing import Any

from moontide._native import PutOptions

from .places import Places


class SoftPinAction(enum.IntEnum):
    """Whether an object is evicted after others."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(enum.IntEnum):
    """Type of an object. Accepted and ignored."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


# Maximum number of replicas of an object.
_REPLICAS_MAX = 8

# Maximum number of derived options that are kept: preferred nodes get new ids when they start again.
_CACHED_MAX = 16

# Type and default of each field.
_FIELDS: dict[str, tuple[Any, Any]] = {
    "replica_num": (int, 1),
    "with_soft_pin": (bool, False),
    "with_hard_pin": (bool, False),
    "preferred_segment": (str, ""),
    "preferred_segments": (list, ()),
    "prefer_alloc_in_same_node": (bool, False),
    "group_ids": (list | None, None),
    "soft_pin_action": (SoftPinAction, SoftPinAction.PRESERVE),
    "soft_pin_ttl_ms": (int | None, None),
    "data_type": (ObjectDataType, ObjectDataType.UNKNOWN),
    "nof_replica_num": (int, 0),
    "dfs_replica_num": (int, 0),
    "preferred_nof_segments": (list, ()),
}


class ReplicateConfig:
    """Options of a put. The derived `PutOptions` are cached until a field is set."""

    __slots__ = (*_FIELDS, "_cached")

    replica_num: int
    with_soft_pin: bool
    with_hard_pin: bool
    preferred_segment: str
    preferred_segments: list[str]
    prefer_alloc_in_same_node: bool
    group_ids: list[str] | None
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    data_type: ObjectDataType
    nof_replica_num: int
    dfs_replica_num: int
    preferred_nof_segments: list[str]
    _cached: dict[tuple[bool, tuple[str, ...]], PutOptions]

    def __init__(self) -> None:
        for name, (kind, value) in _FIELDS.items():
            setattr(self, name, [] if kind is list else value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind, _ = _FIELDS.get(name, (None, None))
        if kind is not None:
            if isinstance(value, tuple):
                value = list(value)
            if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value < 1 << 64):
                raise TypeError(f"{name} must not be {value!r}")
        object.__setattr__(self, name, value)
        object.__setattr__(self, "_cached", {})

    def __str__(self) -> str:
        fields = ", ".join(f"{name}: {getattr(self, name)!r}" for name in _FIELDS)
        return f"ReplicateConfig: {{ {fields} }}"

    def _options(self, overwrite: bool, cohort: str | None, places: Places) -> PutOptions:
        """Returns Moontide's options. Fewer replicas than requested are enough, as for Mooncake."""
        prefer: tuple[str, ...] = ()
        if self.preferred_segments or self.preferred_segment:
            prefer = places.of(filter(None, [*self.preferred_segments, self.preferred_segment]))
        cached = self._cached.get((overwrite, prefer)) if cohort is None else None
        if cached is None:
            soft = self.with_soft_pin or self.soft_pin_action is SoftPinAction.ENABLE
            cached = PutOptions(
                replicas=min(self.replica_num, _REPLICAS_MAX),
                replicas_min=1,
                overwrite=overwrite,
                pin="hard" if self.with_hard_pin else "soft" if soft else "none",
                cohort=cohort,
                prefer=prefer,
            )
            if cohort is None and len(self._cached) < _CACHED_MAX:
                self._cached[overwrite, prefer] = cached
        return cached


_OVERWRITE = PutOptions(overwrite=True)
_COHORT_BYTES_MAX = 64


def options(config: ReplicateConfig | None, keys: int, places: Places, overwrite: bool = False) -> PutOptions | None:
    """Returns the options of a call with ``keys`` keys. ``places`` translates the names of segments.

    Raises ValueError where Mooncake fails: no replicas, a time to live without a soft pin, or a number of group ids
    that differs from the number of keys.
    """
    if config is None:
        return _OVERWRITE if overwrite else None
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    if config.replica_num == 0:
        raise ValueError("replica_num must not be 0")
    if config.soft_pin_ttl_ms is not None and config.soft_pin_action is not SoftPinAction.ENABLE:
        raise ValueError("soft_pin_ttl_ms needs SoftPinAction.ENABLE")
    groups, cohort = config.group_ids, None
    if groups is not None:
        if len(groups) != keys:
            raise ValueError(f"{len(groups)} group_ids for {keys} keys")
        # Options apply to a whole call. Different ids within a call are ignored.
        if groups and groups.count(groups[0]) == keys and 0 < len(groups[0].encode()) <= _COHORT_BYTES_MAX:
            cohort = groups[0]
    return config._options(overwrite, cohort, places)
