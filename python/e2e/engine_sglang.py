"""SGLang in a separate process, for tests: reads prompts and writes responses, line by line.

    python engine_sglang.py '{"model": "FOLDER", "backend": "dynamic", "extra": {…}}'

Each line of standard input is ``{"tokens": […]}``. Each response is a line of standard output that starts with
``RESPONSE``. The first response reports that the engine is ready. The process exits at the end of its input. ``engine``
in the argument overrides arguments of the engine.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOKENS = 12
"""Number of tokens to generate for each prompt."""

PAGE = 16
"""Tokens per page."""

CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 8192,
    "context_length": 4096,
    "dtype": "float32",
    "skip_server_warmup": True,
    "host": "127.0.0.1",
    "log_level": "info",
}
"""Options for a CPU; wrong for a GPU."""

HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "page_size": PAGE,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    # Waits for all pages that were found: a test must not depend on timing.
    "hicache_storage_prefetch_policy": "wait_complete",
}


def respond(response: dict[str, Any]) -> None:
    print("RESPONSE " + json.dumps(response), flush=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    import sglang

    options = CPU_OPTIONS | {"model_path": job["model"]}
    if job.get("backend"):
        options |= HICACHE | {
            "hicache_storage_backend": job["backend"],
            "hicache_storage_backend_extra_config": json.dumps(job.get("extra", {})),
        }
    engine = sglang.Engine(**(options | job.get("engine", {})))
    respond({"ready": True})
    for line in sys.stdin:
        request, began = json.loads(line), time.monotonic()
        output = engine.generate(
            input_ids=request["tokens"],
            sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
        facts = output["meta_info"]
        respond(
            {
                "tokens": output["output_ids"],
                "logprobs": [round(each[0], 4) for each in facts["output_token_logprobs"]],
                "prompt": facts["prompt_tokens"],
                "cached": facts["cached_tokens"],
                "from": facts.get("cached_tokens_details") or {},
                "seconds": round(time.monotonic() - began, 3),
            }
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
