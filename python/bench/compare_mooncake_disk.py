"""Puts more objects than fit into memory through Mooncake's Python module, reads them back, and prints one line of JSON.

Run it in an environment with `moontide` and `moontide-mooncake-compat` and in one with Mooncake's own wheel, within the
same hour on the same machine, and compare the lines:

    MOONTIDE_SHM=0 ours/bin/python python/bench/compare_mooncake_disk.py --dir /mnt/ssd
    theirs/bin/python python/bench/compare_mooncake_disk.py --dir /mnt/ssd 2>/dev/null

It starts `mooncake_master` and `mooncake_client`, with memory and a disk, from the directory of the interpreter, and ends
both. `lost` counts acknowledged objects that could not be read, `wrong` those with other bytes. `oldest` are the objects of
the first half, which have left memory. `GBps` counts the objects that were read, `requested_GBps` all that were requested:
a lost one takes less time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
from mooncake.store import MooncakeDistributedStore

BATCH = 16
#: Time for one put, repeated while there is no space.
PUT_SECONDS = 20
#: Time for writes to the disk to end.
SETTLE_SECONDS = 20


class Objects:
    """Objects whose first and last bytes name them, in one buffer."""

    def __init__(self, store, size):
        self.store, self.size = store, size
        self.memory = numpy.random.default_rng(1).integers(0, 256, BATCH * size, dtype=numpy.uint8)
        self.base = self.memory.ctypes.data
        store.register_buffer(self.base, self.memory.nbytes)

    def key(self, number):
        return f"disk-{self.size}-{number}"

    def ends(self, slot):
        start = slot * self.size
        return self.memory[start : start + 8].view("u8"), self.memory[start + self.size - 8 : start + self.size].view("u8")

    def put(self, number):
        """Returns whether the object was stored."""
        for end in self.ends(0):
            end[0] = number
        until = time.monotonic() + PUT_SECONDS
        while self.store.put_from(self.key(number), self.base, self.size) != 0:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def read(self, numbers, batch):
        """Reads objects, and returns how many were read, lost and wrong, and bytes per second."""
        read = lost = wrong = 0
        began = time.perf_counter()
        for at in range(0, len(numbers), batch):
            part = numbers[at : at + batch]
            for slot in range(len(part)):
                for end in self.ends(slot):
                    end[0] = 1 << 63
            keys, addresses = map(self.key, part), [self.base + slot * self.size for slot in range(len(part))]
            codes = self.store.batch_get_into(list(keys), addresses, [self.size] * len(part))
            for slot, (number, code) in enumerate(zip(part, codes, strict=True)):
                if code != self.size:
                    lost += 1
                elif all(end[0] == number for end in self.ends(slot)):
                    read += 1
                else:
                    wrong += 1
        took = time.perf_counter() - began
        rates = {"GBps": read * self.size / took / 1e9, "requested_GBps": len(numbers) * self.size / took / 1e9}
        return {"read": read, "lost": lost, "wrong": wrong} | {name: round(rate, 3) for name, rate in rates.items()}


def run(master, arguments):
    store = MooncakeDistributedStore()
    if (code := store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", master)) != 0:
        sys.exit(f"setup returned {code}: no master answers at {master}")
    objects = Objects(store, arguments.size)
    count = arguments.total // arguments.size
    began = time.perf_counter()
    stored = [number for number in range(count) if objects.put(number)]
    took = time.perf_counter() - began
    time.sleep(SETTLE_SECONDS)
    oldest = [number for number in stored if number < count // 2]
    row = {
        "size": arguments.size,
        "acknowledged": len(stored),
        "refused": count - len(stored),
        "put_GBps": round(len(stored) * arguments.size / took / 1e9, 3),
        "oldest_in_batches": objects.read(oldest, BATCH),
        "oldest_one_by_one": objects.read(oldest, 1),
        "all_in_batches": objects.read(stored, BATCH),
    }
    print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of an object")
    parser.add_argument("--total", type=int, default=3 << 30, help="bytes of all objects")
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes of memory")
    parser.add_argument("--dir", type=Path, help="a new directory in this one is removed at the end")
    parser.add_argument("--port", type=int, default=50171)
    arguments = parser.parse_args()
    port, master = arguments.port, f"127.0.0.1:{arguments.port}"
    disk = tempfile.mkdtemp(prefix="compare-mooncake-", dir=arguments.dir)
    offload = {
        "FILE_STORAGE_PATH": disk,
        "STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
        "USE_URING": "true",
        "HEARTBEAT_INTERVAL_SECONDS": "1",
        "LOCAL_BUFFER_SIZE_BYTES": str(512 << 20),
        "TOTAL_SIZE_LIMIT_BYTES": str(4 * arguments.total),
        "BUCKET_MAX_TOTAL_SIZE": str(4 * arguments.total),
    }
    environment = os.environ | {f"MOONCAKE_OFFLOAD_{name}": value for name, value in offload.items()}
    server_flags = [
        f"--rpc_port={port}",
        f"--metrics_port={port + 1}",
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        "--enable_offload=true",
        "--default_kv_lease_ttl=500",
    ]
    client_flags = [
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        "--host=127.0.0.1",
        f"--port={port + 2}",
        f"--global_segment_size={arguments.memory >> 20} MB",
        "--enable_offload=true",
    ]
    programs = Path(sys.executable).parent
    processes = []
    try:
        for program, flags in [("mooncake_master", server_flags), ("mooncake_client", client_flags)]:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes.append(subprocess.Popen([programs / program, *flags], env=environment, **quiet))
            time.sleep(3)
        run(master, arguments)
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait(timeout=20)
        shutil.rmtree(disk, ignore_errors=True)
    # Threads of a client may still run when the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
