#!/usr/bin/env python3
"""Writes frames.txt: bytes of the fixed formats, made without the project's own code.

Each line: name, a space, hex. The test `golden.rs` builds the same values with the crate and compares.
Run: python3 make.py > frames.txt
"""
import struct


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit: polynomial 0x1EDC6F41, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283  # the check value of the CRC catalogue

NO_GROUP = 0xFFFF


def frame(kind, request, body, deadline, payload, map_version, term, flags, status, group):
    head = struct.pack("<4sHHQIIQQIHHH10x", b"MTF1", 1, kind, request, body, deadline, payload, map_version,
                       term, flags, status, group)
    assert len(head) == 60
    return head + struct.pack("<I", crc32c(head))


def epoch(term, sequence):
    return term << 40 | sequence


def word(term, sequence, state):
    return epoch(term, sequence) << 2 | state


def transfer_op(kind, flags, stripe, segment, generation, slot, term, version, ident, offset, length, capability):
    op = struct.pack("<BBHIQIIQ16sQQ16s", kind, flags, stripe, segment, generation, slot, term, version, ident,
                     offset, length, capability)
    assert len(op) == 80
    return op


def report(slot, tenant, flags, start, units, state_word, ident, object_len, root, stripe_offset, stripe_len,
           payload_offset, index, count, id_key, tenant_generation):
    record = struct.pack("<IHHIIQ16sQQQQQHHII4x", slot, tenant, flags, start, units, state_word, ident, object_len,
                         root, stripe_offset, stripe_len, payload_offset, index, count, id_key,
                         tenant_generation)
    assert len(record) == 96
    return record


IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, ROOT, KEYED = 1, 2, 8, 16


def blake3_keyed(key, data):
    """BLAKE3 of at most one chunk, from section 2 of its specification."""
    chaining = list(struct.unpack("<8I", key))
    blocks = [data[at:at + 64] for at in range(0, len(data), 64)]
    for number, block in enumerate(blocks):
        flags = KEYED | (CHUNK_START if number == 0 else 0)
        flags |= CHUNK_END | ROOT if number == len(blocks) - 1 else 0
        m = list(struct.unpack("<16I", block.ljust(64, b"\0")))
        v = chaining + list(IV[:4]) + [0, 0, len(block), flags]

        def mix(a, b, c, d, x, y):
            def rotated(value, by):
                return (value >> by | value << (32 - by)) & 0xFFFFFFFF
            v[a] = (v[a] + v[b] + x) & 0xFFFFFFFF
            v[d] = rotated(v[d] ^ v[a], 16)
            v[c] = (v[c] + v[d]) & 0xFFFFFFFF
            v[b] = rotated(v[b] ^ v[c], 12)
            v[a] = (v[a] + v[b] + y) & 0xFFFFFFFF
            v[d] = rotated(v[d] ^ v[a], 8)
            v[c] = (v[c] + v[d]) & 0xFFFFFFFF
            v[b] = rotated(v[b] ^ v[c], 7)

        for _ in range(7):
            mix(0, 4, 8, 12, m[0], m[1])
            mix(1, 5, 9, 13, m[2], m[3])
            mix(2, 6, 10, 14, m[4], m[5])
            mix(3, 7, 11, 15, m[6], m[7])
            mix(0, 5, 10, 15, m[8], m[9])
            mix(1, 6, 11, 12, m[10], m[11])
            mix(2, 7, 8, 13, m[12], m[13])
            mix(3, 4, 9, 14, m[14], m[15])
            m = [m[at] for at in PERMUTATION]
        chaining = [v[at] ^ v[at + 8] for at in range(8)]
    return struct.pack("<8I", *chaining)


def node_key(secret, node, rotation):
    return blake3_keyed(secret, struct.pack("<QQ", node, rotation))


def capability(key, right, stripe, segment, generation, slot, term, version, ident, shape=b"", digestless=0):
    scope = struct.pack("<BBHIQIIQ16s", right, digestless, stripe, segment, generation, slot, term, version, ident)
    assert len(scope) == 48
    return blake3_keyed(key, scope + shape)[:16]


def shape(start, units, object_len, stripe_offset, stripe_len, id_key, tenant_generation, stripe_count):
    return struct.pack("<IIQQQIIH", start, units, object_len, stripe_offset, stripe_len, id_key, tenant_generation,
                       stripe_count)


def packed_keys(keys):
    return struct.pack("<I", len(keys)) + b"".join(struct.pack("<H", len(k)) for k in keys) + b"".join(keys)


READ, WRITE, WRITE_REPLY, EXIST, ERROR = 34, 36, 37, 1, 41
IDENT = bytes(range(16))
CAPABILITY = bytes(range(0xA0, 0xB0))

NODE_KEY = node_key(bytes(range(32)), 0x0102030405060708, 9)

VECTORS = {
    "frame_exist": frame(EXIST, 7, 120, 250, 0, 9, 3, 0, 0, 5),
    "frame_read": frame(READ, 0x1122334455667788, 160, 1000, 0, 0, 0x3FFFFF, 0, 0, NO_GROUP),
    "frame_write": frame(WRITE, 3, 80, 1000, 262144, 0, 7, 1, 0, NO_GROUP),
    "frame_write_reply": frame(WRITE_REPLY, 1, 4, 0, 0, 2, 4, 0, 202, NO_GROUP),
    "frame_error": frame(ERROR, 2, 5, 0, 0, 0, 0, 0, 304, NO_GROUP),
    "op_read": transfer_op(1, 0, 3, 4, 5, 6, 7, epoch(7, 99), IDENT, 4096, 262144, CAPABILITY),
    "op_load": transfer_op(3, 1, 0, 0, 0, 0, 7, epoch(7, 99), IDENT, 0, 1, CAPABILITY),
    "report_ready": report(11, 2, 4, 8, 1024, word(3, 17, 2), IDENT, 524288, 0x0102030405060708, 262144, 262144,
                           4096, 1, 2, 1, 6),
    "report_free": report(12, 0, 0, 0, 0, word(3, 18, 0), bytes(16), 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "put_entry": struct.pack("<QH6x", 262144, 1),
    "packed_keys": packed_keys([b"a", b"prefix/\x00\xff", b"z" * 300]),
    "packed_no_keys": packed_keys([]),
    "capability_key": NODE_KEY,
    "capability_read": capability(NODE_KEY, 1, 3, 4, 5, 6, 7, epoch(7, 99), IDENT),
    "capability_write": capability(NODE_KEY, 2, 1, 4, 5, 6, 7, epoch(7, 99), IDENT,
                                   shape(8, 1024, 524288, 262144, 262144, 1, 6, 2), 1),
}

if __name__ == "__main__":
    for name, data in VECTORS.items():
        print(name, data.hex())
