"""A rank of a cache whose pages Triton kernels push and read: see ``test_nano_kernels.py``. The kernels run in the
interpreter, or on a device if ``TRITON_INTERPRET`` is 0."""

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


#: Device of the kernels' arguments. Torch uses "cuda" for both vendors.
DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def noise(seed: int, size: int) -> torch.Tensor:
    made = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE)


class Rank:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.cache = NanoKVCache(settings.pop("heap_bytes"), **settings)
        self.bases = torch.tensor(self.cache.bases, dtype=torch.int64, device=DEVICE)
        self.status = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.metas: dict[str, Any] = {}
        self.plans: dict[str, Any] = {}

    def open(self, key: str, size: int, owner: int) -> str:
        self.plans[key] = plan = self.cache.open_for_write(key, size, preferred_segment=owner)
        return bytes(plan.ticket).hex()

    def push(self, key: str, seed: int, first_page: int = 0, pages: int | None = None) -> str:
        """Pushes pages with a kernel to the owner's memory."""
        ticket = self.plans[key].ticket
        source = noise(seed, ticket.bytes_total)[first_page * ticket.page_bytes :].contiguous()
        self.status.zero_()
        kernels.push(self.bases, ticket.record, source, self.status, first_page=first_page, pages=pages)
        return kernels.Push(int(self.status)).name

    def write(self, key: str, seed: int) -> None:
        """Writes all pages in Rust: with the CPU, or by a device copy if the source is on a device."""
        self.plans[key].write(noise(seed, self.plans[key].bytes_total))

    def write_page(self, key: str, seed: int, page: int) -> bool:
        plan = self.plans[key]
        first = page * plan.page_bytes
        plan.write_page(page, noise(seed, plan.bytes_total)[first : first + plan.page_bytes].cpu())
        return plan.complete

    def write_error(self, key: str, seed: int) -> str:
        try:
            self.write(key, seed)
        except moontide.InvalidArgument as error:
            return str(error)
        return "no error"

    def commit(self, key: str) -> dict[str, int]:
        self.cache.commit(key)
        return self.cache.stats()

    def open_for_read(self, packed: str) -> bool:
        meta = self.cache.open_for_read(Ticket.from_bytes(bytes.fromhex(packed)))
        self.metas[packed] = meta
        return meta.ready

    def wait(self, packed: str, polls_max: int) -> str:
        """Waits with a kernel."""
        meta = self.metas[packed]
        self.status.zero_()
        kernels.wait_ready(self.bases, meta.ticket.record, meta.header_ptr, self.status, polls_max=polls_max)
        return kernels.Wait(int(self.status)).name

    def read_opened(self, packed: str, seed: int) -> bool:
        """Reads with a kernel after a wait, while the host holds the record."""
        meta = self.metas.pop(packed)
        target = zeros(meta.bytes_total)
        self.status.fill_(int(kernels.Read.OK))
        kernels.copy(self.bases, meta.ticket.record, target, self.status)
        meta.release()
        return bool((target == noise(seed, meta.bytes_total)).all())

    def read_pinned(self, packed: str, seed: int) -> str:
        """Reads with a kernel that pins the slot in a ledger cell."""
        ticket = Ticket.from_bytes(bytes.fromhex(packed))
        try:
            pin = self.cache.pin(ticket)
        except moontide.Gone:
            return "GONE"
        except moontide.DeviceError:
            return "UNSUPPORTED"
        target = zeros(ticket.bytes_total)
        self.status.zero_()
        kernels.read(self.bases, ticket.record, pin, target, self.status, polls_max=100)
        outcome = kernels.Read(int(self.status)).name
        if outcome == "OK" and not (target == noise(seed, ticket.bytes_total)).all():
            return "WRONG"
        return outcome

    def read_held(self, key: str, seed: int) -> bool:
        """Reads with a kernel, while the host holds the object."""
        with self.cache.get_location(key) as meta:
            target = zeros(meta.bytes_total)
            self.status.fill_(int(kernels.Read.OK))
            kernels.copy(self.bases, meta.ticket.record, target, self.status)
            return bool((target == noise(seed, meta.bytes_total)).all())

    def is_gone(self, packed: str) -> bool:
        """Whether the record is gone, as the host sees it."""
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
        """Reads with an ordinary client, in Rust."""
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
