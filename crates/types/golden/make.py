"""Computes the golden vectors of the record format with other people's implementations of BLAKE3, XXH3 and
CRC-32C, so that they do not come from the code they test. Needs: pip install blake3 xxhash crc32c

    python make.py > records.txt

The file is made once. A vector that changes means that old records can no longer be read: add a new header
version instead.
"""

import struct

import blake3
import crc32c
import xxhash

PAGE = 256 << 10
FAN_OUT = 512


def emit(name, data):
    print(f"{name} = {data.hex()}")


def u64(value):
    return struct.pack("<Q", value)


def pattern(length):
    """Payload bytes: byte i is (i * 7 + i // 251) mod 256."""
    return bytes((i * 7 + i // 251) & 0xFF for i in range(length))


def tenant_id_key(secret, tenant):
    return blake3.blake3(b"moontide tenant id key\0" + tenant, key=secret).digest()


def object_id(secret, tenant, generation, key):
    data = struct.pack("<I", generation) + key
    return blake3.blake3(data, key=tenant_id_key(secret, tenant)).digest()[:16]


class Context:
    def __init__(self, oid, version, stripe, length):
        self.oid, self.version, self.stripe, self.length = oid, version, stripe, length

    def seed(self, level, index):
        data = self.oid + u64(self.version) + struct.pack("<II", self.stripe, level) + u64(index) + u64(self.length)
        return xxhash.xxh3_64_intdigest(data)

    def page(self, index, data):
        return xxhash.xxh3_64_intdigest(data, seed=self.seed(0, index))

    def root(self, digests):
        level = 0
        while True:
            level += 1
            groups = [digests[i : i + FAN_OUT] for i in range(0, len(digests), FAN_OUT)] or [[]]
            digests = [
                xxhash.xxh3_64_intdigest(b"".join(map(u64, group)), seed=self.seed(level, index))
                for index, group in enumerate(groups)
            ]
            if len(digests) == 1:
                return digests[0]

    def pages(self, payload):
        return [self.page(i // PAGE, payload[i : i + PAGE]) for i in range(0, len(payload), PAGE)]


def object_root(oid, version, length, roots):
    seed = Context(oid, version, len(roots), length).seed(0xFF, 0)
    return xxhash.xxh3_64_intdigest(b"".join(map(u64, roots)), seed=seed)


def header(flags, oid, word, object_len, stripe_offset, stripe_len, payload_offset, root, stripe_index,
           stripe_count, digests_len, key_len, attributes_len, trailer_crc, id_key, generation):
    def pack(word):
        data = b"MTRC" + struct.pack("<HH", 2, flags) + oid + u64(word)
        data += struct.pack("<QQQQQ", object_len, stripe_offset, stripe_len, payload_offset, root)
        data += struct.pack("<HHI", stripe_index, stripe_count, PAGE)
        data += struct.pack("<IIIIII", digests_len, key_len, attributes_len, trailer_crc, id_key, generation)
        return data.ljust(124, b"\0")

    return pack(word) + struct.pack("<I", crc32c.crc32c(pack(word & ~3)))


def attribute(kind, value):
    return struct.pack("<HH", kind, len(value)) + value


secret = bytes(range(32))
oid = object_id(secret, b"default", 0, b"hello")
emit("tenant id key default", tenant_id_key(secret, b"default"))
emit("id default/0/hello", oid)
emit("id team-a/7/\\x00\\xff", object_id(secret, b"team-a", 7, b"\x00\xff"))
emit("id default/0/4096 x", object_id(secret, b"default", 0, b"x" * 4096))

version = (3 << 40) | 12345
for length in [0, 1, 16, 17, 128, 129, 240, 241, 4096, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 77]:
    context = Context(oid, version, 0, length)
    pages = context.pages(pattern(length))
    emit(f"pages {length}", b"".join(map(u64, pages)))
    emit(f"root {length}", u64(context.root(pages)))
for count in [512, 513, 1025, FAN_OUT * FAN_OUT, FAN_OUT * FAN_OUT + 1]:
    context = Context(oid, version, 2, count * PAGE)
    emit(f"tree {count}", u64(context.root([(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(count)])))
emit("object root 3", u64(object_root(oid, version, 5 * PAGE, [1, 2, 3])))

key_section = struct.pack("<H", 7) + b"default" + struct.pack("<H", 5) + b"hello"
attributes = attribute(1, b"\x01") + attribute(2, u64(1_800_000_000_000)) + attribute(3, b"cohort")
attributes += attribute(4, bytes(range(32))) + attribute(5, b"note")
emit("key section", key_section)
emit("attributes", attributes)
trailer_crc = crc32c.crc32c(attributes, crc32c.crc32c(key_section))
emit("trailer crc", struct.pack("<I", trailer_crc))

ready = (version << 2) | 2
payload = pattern(PAGE + 1)
whole = Context(oid, version, 0, len(payload))
emit("header whole", header(0, oid, ready, len(payload), 0, len(payload), 8192, whole.root(whole.pages(payload)),
                            0, 1, 16, len(key_section), len(attributes), trailer_crc, 1, 0))
emit("header stripe", header(1, oid, (version << 2) | 1, 5 * PAGE, 4 * PAGE, PAGE, 4096, 0, 2, 3, 0,
                             len(key_section), 0, crc32c.crc32c(key_section), 4, 7))
