"""Runs vLLM in a process of its own: requests as JSON on the command line, one line of JSON for each answer.

    engine_vllm.py '{"model": FOLDER, "store": {"master": "127.0.0.1:7400"}, "rounds": [[{"tokens": [[1, 468]]}]]}'

Rounds are run one after the other, the requests of a round together. With ``"wait": true`` each round waits for a line
on stdin, and with ``"reset_local": true`` forgets the engine's own cache first. ``tokens`` are pieces of a prompt, each
a seed and a length: the same pieces are the same prefix; ``ids`` are the tokens themselves. Without ``store`` vLLM runs
alone. After each round, a line with the connector's counters.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any


def prompt(pieces: list[list[int]]) -> list[int]:
    """Tokens by chance, the same for the same seeds."""
    tokens: list[int] = []
    for seed, length in pieces:
        draw = random.Random(seed)
        tokens += [draw.randrange(3, 300) for _ in range(length)]
    return tokens


def say(**facts: Any) -> None:
    print("E2E " + json.dumps(facts), flush=True)


def counters(llm: Any) -> dict[str, float]:
    """The connector's, as vLLM publishes them."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:moontide_")
        if name != metric.name or metric.name == "vllm:num_preemptions":
            found[name] = found.get(name, 0) + metric.value
    return found


def answer(output: Any) -> dict[str, Any]:
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
    say(ready=round(time.monotonic() - began, 1), pid=os.getpid())
    loras: dict[str, Any] = {}
    for number, requests in enumerate(job["rounds"]):
        if job.get("wait"):
            sys.stdin.readline()
        if job.get("reset_local") and number:
            forget(llm)
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
            say(round=number, request=at, **answer(output))
        say(round=number, counters=counters(llm), seconds=round(seconds, 4))
    # What is being saved is saved before it ends, and what that gave is counted.
    time.sleep(job.get("linger", 0))
    llm.llm_engine.engine_core.shutdown()
    say(over=True)


def forget(llm: Any) -> None:
    """Empties the engine's own cache. Blocks that are being saved are free only once the engine has stepped again."""
    until = time.monotonic() + 15
    while not llm.reset_prefix_cache():
        if time.monotonic() > until:
            sys.exit("the engine's cache cannot be emptied")
        llm.llm_engine.step()
        time.sleep(0.02)


def adapter(loras: dict[str, Any], folder: str | None) -> Any:
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return loras.setdefault(folder, LoRARequest(os.path.basename(folder), len(loras) + 1, folder))


if __name__ == "__main__":
    main()
