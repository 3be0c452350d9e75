"""A rank of a cache whose pages are pushed and read by Triton's kernels: see ``test_nano_kernels.py``. In the interpreter, or, if
``TRITON_INTERPRET`` is 0, on a device."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import json
import sys
from typing import Any

import torch

import moontide
from moontide import kernels
from moontide.nano import NanoKVCache, Ticket


#: Where kernels' arguments are. Torch calls devices of both vendors so.
PLACE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def noise(seed: int, size: int) -> torch.Tensor:
    made = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.to(PLACE)


def room(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=PLACE)


class Rank:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.cache = NanoKVCache(settings.pop("heap_bytes"), **settings)
        self.bases = torch.tensor(self.cache.bases, dtype=torch.int64, device=PLACE)
        self.status = torch.zeros(1, dtype=torch.int32, device=PLACE)
        self.metas: dict[str, Any] = {}
        self.plans: dict[str, Any] = {}

    def open(self, key: str, size: int, owner: int) -> str:
        self.plans[key] = plan = self.cache.open_for_write(key, size, preferred_segment=owner)
        return bytes(plan.ticket).hex()

    def push(self, key: str, seed: int, first_page: int = 0, pages: int | None = None) -> str:
        """By kernels, into the owner's memory."""
        ticket = self.plans[key].ticket
        source = noise(seed, ticket.bytes_total)[first_page * ticket.page_bytes :].contiguous()
        self.status.zero_()
        kernels.push(self.bases, ticket.record, source, self.status, first_page=first_page, pages=pages)
        return kernels.Push(int(self.status)).name

    def write(self, key: str, seed: int) -> None:
        """By this process's CPU or, if the source is on a device, by a copy between devices; in Rust."""
        self.plans[key].write(noise(seed, self.plans[key].bytes_total))

    def write_page(self, key: str, seed: int, page: int) -> bool:
        plan = self.plans[key]
        first = page * plan.page_bytes
        plan.write_page(page, noise(seed, plan.bytes_total)[first : first + plan.page_bytes].cpu())
        return plan.complete

    def write_is_refused(self, key: str, seed: int) -> str:
        try:
            self.write(key, seed)
        except moontide.InvalidArgument as error:
            return str(error)
        return "it is not"

    def commit(self, key: str) -> dict[str, int]:
        self.cache.commit(key)
        return self.cache.stats()

    def expect(self, packed: str) -> bool:
        meta = self.cache.expect(Ticket.from_bytes(bytes.fromhex(packed)))
        self.metas[packed] = meta
        return meta.ready

    def wait(self, packed: str, looks: int) -> str:
        """By a kernel."""
        meta = self.metas[packed]
        self.status.zero_()
        kernels.wait_ready(self.bases, meta.ticket.record, meta.header_ptr, self.status, looks=looks)
        return kernels.Wait(int(self.status)).name

    def read_awaited(self, packed: str, seed: int) -> bool:
        """By a kernel, after a wait, under what the host holds."""
        meta = self.metas.pop(packed)
        target = room(meta.bytes_total)
        self.status.fill_(int(kernels.Read.OK))
        kernels.copy(self.bases, meta.ticket.record, target, self.status)
        meta.release()
        return bool((target == noise(seed, meta.bytes_total)).all())

    def read_pinned(self, packed: str, seed: int) -> str:
        """By a kernel that names the slot in a ledger cell itself."""
        ticket = Ticket.from_bytes(bytes.fromhex(packed))
        try:
            pin = self.cache.pin(ticket)
        except moontide.Gone:
            return "GONE"
        except moontide.DeviceError:
            return "UNSEEN"
        target = room(ticket.bytes_total)
        self.status.zero_()
        kernels.read(self.bases, ticket.record, pin, target, self.status, looks=100)
        outcome = kernels.Read(int(self.status)).name
        if outcome == "OK" and not (target == noise(seed, ticket.bytes_total)).all():
            return "WRONG"
        return outcome

    def read_held(self, key: str, seed: int) -> bool:
        """By a kernel, under what the host holds."""
        with self.cache.get_location(key) as meta:
            target = room(meta.bytes_total)
            self.status.fill_(int(kernels.Read.OK))
            kernels.copy(self.bases, meta.ticket.record, target, self.status)
            return bool((target == noise(seed, meta.bytes_total)).all())

    def is_gone(self, packed: str) -> bool:
        """By the host."""
        try:
            return not self.metas[packed].ready and False
        except moontide.Gone:
            return True

    def locate(self, key: str) -> str | None:
        meta = self.cache.get_location(key)
        if not meta:
            return None
        packed = bytes(meta.ticket).hex()
        meta.release()
        return packed

    def read_by_store(self, key: str, seed: int) -> bool:
        """By an ordinary client, in Rust."""
        found = self.cache.store.get(key)
        return found is not None and found == noise(seed, len(found)).cpu().numpy().tobytes()

    def remove(self, key: str) -> bool:
        return self.cache.store.remove(key, force=True)

    def stats(self) -> dict[str, int]:
        return self.cache.stats()

    def bases_of(self) -> list[int]:
        return self.cache.bases


def main() -> None:
    rank = Rank(json.loads(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        print(json.dumps(getattr(rank, call.pop("do"))(**call)), flush=True)


if __name__ == "__main__":
    main()
