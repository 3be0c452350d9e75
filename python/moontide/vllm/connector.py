"""``MoontideConnector``: the interface that vLLM calls. It forwards the calls to the connector of its role."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .messages import Handshake, Report, Step
from .scheduler import SchedulerConnector
from .settings import Settings
from .stats import MoontideMetrics, MoontideStats
from .worker import WorkerConnector

LOG = logging.getLogger("moontide.vllm")


class MoontideConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves full blocks of vLLM's KV cache in a Moontide cluster by their hashes, and loads them again."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler_or_none: SchedulerConnector | None = None
        self._worker_or_none: WorkerConnector | None = None
        if role == KVConnectorRole.SCHEDULER:
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                LOG.warning(
                    'kv_load_failure_policy is "%s": a request fails if a block that was found cannot be loaded; '
                    'set "kv_load_failure_policy": "recompute" in --kv-transfer-config to compute the block instead',
                    self._kv_transfer_config.kv_load_failure_policy,
                )
            self._scheduler_or_none = SchedulerConnector(settings, vllm_config, kv_cache_config)
        else:
            self._worker_or_none = WorkerConnector(settings, vllm_config, kv_cache_config, rank_name(vllm_config))

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the store is a cache, and vLLM computes blocks that were not saved."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return Settings.of(extra_config).load == "layerwise"

    # -------------------------------------------------------------------------------------------------- scheduler calls

    @property
    def _scheduler(self) -> SchedulerConnector:
        assert self._scheduler_or_none is not None, "scheduler call in a worker"
        return self._scheduler_or_none

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.block_ids = kv_cache_manager.get_block_ids

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.register_workers(worker for worker in metadata.values() if isinstance(worker, Handshake))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self._scheduler.on_worker_report(
            report if isinstance(report, Report) else None, connector_output.finished_recving or ()
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        self._scheduler.reset()
        return True

    # ----------------------------------------------------------------------------------------------------- worker calls

    @property
    def _worker(self) -> WorkerConnector:
        assert self._worker_or_none is not None, "worker call in the scheduler"
        return self._worker_or_none

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Step)
        self._worker.preempt(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.save_layer(self._step, layer_name)

    def wait_for_save(self) -> None:
        self._worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._worker.results()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, _ = self._worker.results()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report()

    # ------------------------------------------------------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._scheduler_or_none or self._worker).stats()

    def shutdown(self) -> None:
        (self._scheduler_or_none or self._worker).close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return MoontideStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return MoontideMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def rank_name(vllm_config: Any) -> str:
    """Returns the name of this worker's part of the model."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    name = f"tp{get_tp_group().rank_in_group}"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        name += f".pp{get_pp_group().rank_in_group}"
    return name
