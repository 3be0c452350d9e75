"""Runs vLLM in a separate process: requests as JSON on the command line, one line of JSON for each output.

    engine_vllm.py '{"model": FOLDER, "store": {"master": "127.0.0.1:7400"}, "rounds": [[{"tokens": [[1, 468]]}]]}'

Rounds run one after the other, the requests of a round together. With ``"wait": true`` each round waits for a line on
stdin. With ``"reset_local": true`` each round but the first clears the engine's own cache. ``tokens`` are parts of a
prompt, each a seed and a length: equal parts are an equal prefix. ``ids`` are the tokens themselves. Without ``store``
vLLM runs without a connector. After each round it prints a line with the counters of the connector.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any


def prompt(parts: list[list[int]]) -> list[int]:
    """Returns random tokens for seeds and lengths."""
    tokens: list[int] = []
    for seed, length in parts:
        draw = random.Random(seed)
        tokens += [draw.randrange(3, 300) for _ in range(length)]
    return tokens


def report(**facts: Any) -> None:
    print("E2E " + json.dumps(facts), flush=True)


def counters(llm: Any) -> dict[str, float]:
    """Returns the counters of the connector, as vLLM exports them."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:moontide_")
        if name != metric.name or metric.name == "vllm:num_preemptions":
            found[name] = found.get(name, 0) + metric.value
    return found


def summary(output: Any) -> dict[str, Any]:
    done = output.outputs[0]
    chosen = [
        round(float(options[token].logprob), 4) for token, options in zip(done.token_ids, done.logprobs, strict=True)
    ]
    metrics = output.metrics
    return {
        "tokens": list(done.token_ids),
        "logprob": round(float(done.cumulative_logprob), 4),
        "logprobs": chosen,
        "cached": output.num_cached_tokens,
        "prompt": len(output.prompt_token_ids),
        "reason": done.finish_reason,
        "ttft": round(float(metrics.first_token_latency), 4) if metrics is not None else None,
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if job.get("store") is not None:
        transfer = KVTransferConfig(
            kv_connector="MoontideConnector",
            kv_connector_module_path="moontide.vllm",
            kv_role=job.get("role", "kv_both"),
            kv_load_failure_policy=job.get("policy", "recompute"),
            kv_connector_extra_config=job["store"],
        )
    settings = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    } | job.get("engine", {})
    if "events" in job:
        from vllm.config import KVEventsConfig

        settings["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{job['events']}"
        )
    began = time.monotonic()
    llm = LLM(job["model"], kv_transfer_config=transfer, **settings)
    report(ready=round(time.monotonic() - began, 1), pid=os.getpid())
    loras: dict[str, Any] = {}
    for number, requests in enumerate(job["rounds"]):
        if job.get("wait"):
            sys.stdin.readline()
        if job.get("reset_local") and number:
            clear_cache(llm)
        prompts, sampling, adapters = [], [], []
        for request in requests:
            text: dict[str, Any] = {"prompt_token_ids": request.get("ids") or prompt(request["tokens"])}
            if "salt" in request:
                text["cache_salt"] = request["salt"]
            prompts.append(text)
            sampling.append(
                SamplingParams(temperature=0, max_tokens=request.get("max_tokens", 12), ignore_eos=True, logprobs=1)
            )
            adapters.append(adapter(loras, request.get("lora")))
        began = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters if any(adapters) else None)
        seconds = time.monotonic() - began
        for at, output in enumerate(outputs):
            report(round=number, request=at, **summary(output))
        report(round=number, counters=counters(llm), seconds=round(seconds, 4))
    # The shutdown waits for pending saves and counts them.
    time.sleep(job.get("linger", 0))
    llm.llm_engine.engine_core.shutdown()
    report(over=True)


def clear_cache(llm: Any) -> None:
    """Clears the engine's own cache. Blocks with pending saves are freed only after another step of the engine."""
    deadline = time.monotonic() + 15
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            sys.exit("cannot clear the engine's cache")
        llm.llm_engine.step()
        time.sleep(0.02)


def adapter(loras: dict[str, Any], folder: str | None) -> Any:
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return loras.setdefault(folder, LoRARequest(os.path.basename(folder), len(loras) + 1, folder))


if __name__ == "__main__":
    main()
