"""Print the history of an offline W&B file as JSON lines.

usage: read_wandb.py FILE.wandb (needs wandb's own protobufs)

The file is a LevelDB log: 32 KiB blocks of (crc32 u32, length u16, type u8, data). The first block
starts with a 7-byte header. Types: 1 full, 2 first, 3 middle, 4 last.
"""

import json
import struct
import sys

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


def records(data):
    position, parts = 7, []
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            position += left
            continue
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def main(path):
    with open(path, "rb") as file:
        data = file.read()
    for raw in records(data):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            print(json.dumps({key: json.loads(value) for key, value in row.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
