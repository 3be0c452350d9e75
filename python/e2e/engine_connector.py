"""vLLM with any connector, in a separate process: reads prompts and writes responses, line by line.

    python engine_connector.py '{"model": "FOLDER", "transfer": {"kv_connector": "MooncakeStoreConnector", …}}'

Each line of standard input is ``{"tokens": […]}``. Each response is a line of standard output that starts with
``RESPONSE``. The first response reports that the engine is ready. The process exits at the end of its input.
``transfer`` is vLLM's ``--kv-transfer-config``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

TOKENS = 12
"""Number of tokens to generate for each prompt."""


def respond(response: dict[str, Any]) -> None:
    print("RESPONSE " + json.dumps(response), flush=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(**job["transfer"]) if job.get("transfer") else None
    llm = LLM(
        job["model"],
        kv_transfer_config=transfer,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=4,
        block_size=32,
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    respond({"ready": True})
    for line in sys.stdin:
        began = time.monotonic()
        (output,) = llm.generate([{"prompt_token_ids": json.loads(line)["tokens"]}], sampling, use_tqdm=False)
        took, done = time.monotonic() - began, output.outputs[0]
        respond(
            {
                "tokens": list(done.token_ids),
                "logprobs": [
                    round(float(options[token].logprob), 4)
                    for token, options in zip(done.token_ids, done.logprobs, strict=True)
                ],
                "prompt": len(output.prompt_token_ids),
                "cached": output.num_cached_tokens,
                "metrics": connector_metrics(llm),
                "seconds": round(took, 3),
            }
        )
    llm.llm_engine.engine_core.shutdown()


def connector_metrics(llm: Any) -> dict[str, float]:
    """Returns the counters of vLLM's Mooncake connector: calls, keys and bytes by operation."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:mooncake_store_")
        if name != metric.name and hasattr(metric, "value"):
            name = f"{name} {metric.labels['operation']}"
            found[name] = found.get(name, 0) + metric.value
    return found


if __name__ == "__main__":
    main()
