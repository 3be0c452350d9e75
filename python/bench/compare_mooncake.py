"""Measures a store through Mooncake's Python module and prints one line of JSON per result.

Run it in an environment with `moontide` and `moontide-mooncake-compat` and in one with Mooncake's own wheel, within the
same hour on the same machine, and compare the lines:

    ours/bin/python python/bench/compare_mooncake.py > ours.jsonl
    MOONTIDE_SHM=0 ours/bin/python python/bench/compare_mooncake.py > ours-tcp.jsonl
    theirs/bin/python python/bench/compare_mooncake.py > theirs.jsonl

It starts `mooncake_master` from the directory of the interpreter and a second process that contributes memory, both on
this host, and ends both.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
from mooncake.store import MooncakeDistributedStore

BATCH = 16
MODES = ("put", "put_from", "batch_put_from", "get", "get_into", "batch_get_into")


def connect(master, segment_bytes):
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    if code != 0:
        sys.exit(f"setup returned {code}: no master answers at {master}")
    return store


def contribute_memory(master, segment_bytes):
    """Runs the second process until its standard input ends."""
    store = connect(master, segment_bytes)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def call(store, mode, name, keys, base, slots, size, value):
    """Makes one call and returns the number of transferred objects. Raises if an object was not transferred
    completely."""
    draw = [random.randrange(len(keys)) for _ in range(BATCH)]
    addresses = [base + random.randrange(slots) * size for _ in range(BATCH)]
    if mode == "put":
        codes, expected = [store.put(name, value)], 0
    elif mode == "put_from":
        codes, expected = [store.put_from(name, addresses[0], size)], 0
    elif mode == "batch_put_from":
        names = [f"{name}/{nth}" for nth in range(BATCH)]
        codes, expected = store.batch_put_from(names, addresses, [size] * BATCH), 0
    elif mode == "get":
        codes, expected = [len(store.get(keys[draw[0]]))], size
    elif mode == "get_into":
        codes, expected = [store.get_into(keys[draw[0]], addresses[0], size)], size
    else:
        codes, expected = store.batch_get_into([keys[at] for at in draw], addresses, [size] * BATCH), size
    if any(code != expected for code in codes):
        raise RuntimeError(f"{mode} of {size} bytes returned {codes}")
    return len(codes)


def measure(store, mode, size, threads, keys, base, buffer_bytes, seconds, bytes_max, tag):
    """Returns the number of transferred objects and the elapsed time."""
    share = buffer_bytes // threads
    slots = max(1, share // size)
    value = bytes(size)
    moved, failed = [0] * threads, []
    start = threading.Barrier(threads + 1)

    def work(nth):
        start.wait()
        end = time.perf_counter() + seconds
        calls = 0
        try:
            while time.perf_counter() < end and moved[nth] * size * threads < bytes_max:
                name = f"{tag}/{nth}/{calls}"
                moved[nth] += call(store, mode, name, keys, base + nth * share, slots, size, value)
                calls += 1
        except RuntimeError as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(nth,)) for nth in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    begun = time.perf_counter()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return sum(moved), time.perf_counter() - begun


def run(master, arguments):
    store = connect(master, 0)
    memory = numpy.random.default_rng(1).integers(0, 256, arguments.buffer, dtype=numpy.uint8)
    base = memory.ctypes.data
    store.register_buffer(base, memory.nbytes)
    for size in arguments.sizes:
        store.remove_all(True)
        keys = [f"o{size}/{nth}" for nth in range(max(BATCH, min(4096, arguments.objects // size)))]
        for key in keys:
            if (code := store.put_from(key, base, size)) != 0:
                raise RuntimeError(f"put_from returned {code}")
        if store.get(keys[-1]) != memory[:size].tobytes():
            raise RuntimeError("get returned other bytes than were put")
        for mode in MODES:
            for threads in arguments.threads:
                rates = []
                for round_ in range(arguments.rounds):
                    tag = f"{mode}-{threads}-{round_}"
                    moved, took = measure(
                        store, mode, size, threads, keys, base, memory.nbytes, arguments.seconds, arguments.objects, tag
                    )
                    rates.append(moved * size / took / 1e9)
                    if "put" in mode:
                        store.remove_by_regex(f"^{tag}/.*", True)
                row = {"mode": mode, "size": size, "threads": threads, "GBps": round(statistics.median(rates), 4)}
                print(json.dumps(row | {"low": round(min(rates), 4), "high": round(max(rates), 4)}), flush=True)
    store.unregister_buffer(base)
    store.close()


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=numbers, default=[4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20])
    parser.add_argument("--threads", type=numbers, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="duration of each round")
    parser.add_argument("--objects", type=int, default=512 << 20, help="total size of the objects in bytes")
    parser.add_argument("--buffer", type=int, default=256 << 20, help="size of the buffer in bytes")
    parser.add_argument("--segment", type=int, default=4 << 30, help="bytes that the second process contributes")
    parser.add_argument("--port", type=int, default=50151)
    parser.add_argument("--contribute-memory", metavar="MASTER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contribute_memory:
        return contribute_memory(arguments.contribute_memory, arguments.segment)
    port, master = arguments.port, f"127.0.0.1:{arguments.port}"
    program = Path(sys.executable).parent / "mooncake_master"
    flags = [f"--rpc_port={port}", f"--metrics_port={port + 1}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([program, *flags], **quiet)
    contributor = None
    try:
        time.sleep(1.5)
        command = [sys.executable, __file__, "--contribute-memory", master, "--segment", str(arguments.segment)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        contributor = subprocess.Popen(command, **pipes)
        if contributor.stdout.readline().strip() != b"ready":
            sys.exit("the process that contributes memory could not reach the master")
        run(master, arguments)
    finally:
        if contributor is not None:
            contributor.stdin.close()
            contributor.wait(timeout=20)
        server.terminate()
        server.wait(timeout=20)
    # Threads of a client may still run when the interpreter ends.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
