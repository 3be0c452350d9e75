"""SGLang in a process of its own, for tests: prompts come in line by line, answers go out line by line.

    python engine_sglang.py '{"model": "FOLDER", "backend": "dynamic", "extra": {…}}'

Each line of standard input is ``{"tokens": […]}``. Each answer is a line of standard output, beginning with ``ANSWER``.
The first answer says that the engine is there, and the process ends with its input. ``engine`` in the argument changes
arguments of the engine itself.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOKENS = 12
"""How many are generated for each prompt."""

PAGE = 16
"""Tokens of a page."""

ON_A_CPU = {
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
"""What is needed here and would be wrong on a GPU."""

HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "page_size": PAGE,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    # Whatever is found is waited for: a test must not depend on who is faster.
    "hicache_storage_prefetch_policy": "wait_complete",
}


def say(answer: dict[str, Any]) -> None:
    print("ANSWER " + json.dumps(answer), flush=True)


def main() -> None:
    told = json.loads(sys.argv[1])
    import sglang

    options = ON_A_CPU | {"model_path": told["model"]}
    if told.get("backend"):
        options |= HICACHE | {
            "hicache_storage_backend": told["backend"],
            "hicache_storage_backend_extra_config": json.dumps(told.get("extra", {})),
        }
    engine = sglang.Engine(**(options | told.get("engine", {})))
    say({"ready": True})
    for line in sys.stdin:
        asked, began = json.loads(line), time.monotonic()
        answer = engine.generate(
            input_ids=asked["tokens"],
            sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
        facts = answer["meta_info"]
        say(
            {
                "tokens": answer["output_ids"],
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
