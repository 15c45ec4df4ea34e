#!/usr/bin/env python3
"""Writes the seed corpus of the safetensors fuzzers into safetensors_corpus/{file,json,index} beside this script.

ok_* must be accepted, bad_* refused (safetensors_corpus_test checks it). json/ holds headers without their length, for 16 bytes of
data. The generated files are committed; run this after changing it.
"""
import json
import pathlib
import struct

ROOT = pathlib.Path(__file__).resolve().parent / "safetensors_corpus"


def tensor(dtype="U8", shape=(16,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def text(header):
    return header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()


def framed(header, data=16, length=None):
    header = text(header)
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(data)


def raw(members):
    """A header from its members' text, for what json.dumps would not write."""
    return b"{" + members + b"}"


ONE = b'"a":' + text(tensor())

JSON = {
    "ok_one": {"a": tensor()},
    "ok_mixed": {
        "__metadata__": {"format": "pt", "x": ""},
        "blocks.0.attn1.to_q.weight": tensor("BF16", (2, 2), (0, 8)),
        "scale": tensor("F32", (), (8, 12)),
        "f8": tensor("F8_E4M3", (1, 1, 2), (12, 14)),
        "last": tensor("F16", (1,), (14, 16)),
    },
    "ok_zero_elements": {"a": tensor(), "z0": tensor("F32", (0,), (0, 0)), "z1": tensor("I64", (5, 0), (16, 16))},
    "ok_blanks": b'{ "a"\t:\n' + text(tensor()) + b" \r\n }  ",
    "ok_escapes": b'{"\\u0061\\ud83d\\ude00\\n":' + text(tensor()) + b"}",
    "ok_one_double": {"d": tensor("F64", (2,), (0, 16))},
    "bad_blank_first": b" " + raw(ONE),
    "bad_array": b"[1]",
    "bad_empty": b"",
    "bad_open": b'{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}',
    "bad_nul": raw(ONE) + b"\0{",
    "bad_utf8": raw(ONE + b',"\xc3\x28":{}'),
    "bad_lone_surrogate": raw(ONE + b',"\\ud800":{}'),
    "bad_deep": b'{"a":' + b"[" * 300,
    "bad_deep_objects": b'{"a":' * 100,
    "bad_duplicate": raw(ONE + b"," + ONE),
    "bad_duplicate_escaped": raw(ONE + b',"\\u0061":' + text(tensor("U8", (0,), (16, 16)))),
    "bad_duplicate_dtype": b'{"a":{"dtype":"U8","dtype":"U8","shape":[16],"data_offsets":[0,16]}}',
    "bad_duplicate_metadata": raw(b'"__metadata__":{},"__metadata__":{},' + ONE),
    "bad_metadata_number": {"__metadata__": {"k": 1}, "a": tensor()},
    "bad_metadata_nested": {"__metadata__": {"k": {"l": "m"}}, "a": tensor()},
    "bad_null": {"a": None},
    "bad_no_offsets": {"a": {"dtype": "U8", "shape": [16]}},
    "bad_key": {"a": {**tensor(), "strides": [1]}},
    "bad_dtype": {"a": tensor("U128")},
    "bad_dtype_number": {"a": tensor(3)},
    "bad_shape_negative": {"a": tensor(shape=(-16,))},
    "bad_shape_float": {"a": tensor(shape=(16.0,))},
    "bad_shape_huge": {"a": tensor(shape=(2**64,))},
    "bad_shape_int64": {"a": tensor(shape=(2**63,))},
    "bad_shape_product": {"a": tensor(shape=(2**32, 2**32), offsets=(0, 0))},
    "bad_shape_bytes": {"a": tensor("F64", (2**61,), (0, 0))},
    "bad_shape_wraps_to_16": {"a": tensor("U8", (2**60 + 1, 16))},
    "bad_rank": {"a": tensor(shape=(1,) * 65 + (16,))},
    "bad_offsets_three": {"a": tensor(offsets=(0, 16, 16))},
    "bad_offsets_backwards": {"a": tensor(offsets=(16, 0))},
    "bad_offsets_beyond": {"a": tensor(shape=(17,), offsets=(0, 17))},
    "bad_offsets_huge": {"a": tensor(offsets=(2**63 - 17, 2**63 - 1))},
    "bad_range_short": {"a": tensor(shape=(8,))},
    "bad_gap": {"a": tensor(shape=(4,), offsets=(0, 4)), "b": tensor(shape=(8,), offsets=(8, 16))},
    "bad_gap_first": {"a": tensor(shape=(12,), offsets=(4, 16))},
    "bad_overlap": {"a": tensor(shape=(10,), offsets=(0, 10)), "b": tensor(shape=(8,), offsets=(8, 16))},
    "bad_same_range": {"a": tensor(), "b": tensor()},
    "bad_zero_inside": {"a": tensor(), "z": tensor(shape=(0,), offsets=(8, 8))},
    "bad_trailing": {"a": tensor(shape=(15,), offsets=(0, 15))},
    "bad_no_tensors": {},
}

FILE = {
    "ok_one": framed({"a": tensor()}),
    "ok_odd_length": framed(text({"a": tensor()}) + b" " * 3),
    "ok_nothing": framed({}, 0),
    "ok_scalar": framed({"s": tensor("BF16", (), (0, 2))}, 2),
    "bad_empty": b"",
    "bad_seven_bytes": bytes(7),
    "bad_zero_length": bytes(8),
    "bad_zero_length_and_data": bytes(64),
    "bad_length_one_beyond": framed({"a": tensor()}, 0, len(text({"a": tensor()})) + 1),
    "bad_length_100_mb": framed({"a": tensor()}, length=100_000_001),
    "bad_length_max": framed({"a": tensor()}, length=2**64 - 1),
    "bad_length_wraps": framed({"a": tensor()}, length=2**64 - 8),
    "bad_length_int64": framed({"a": tensor()}, length=2**63 - 1),
    "bad_length_short": framed({"a": tensor()}, length=10),
    "bad_truncated": framed({"a": tensor()}, 15),
    "bad_trailing": framed({"a": tensor()}, 17),
    "bad_pickle": b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.",
    "bad_zip": b"PK\x03\x04" + bytes(40),
    "bad_lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "bad_big_endian": struct.pack(">Q", 2) + b"{}",
}

INDEX = {
    "ok_one": {"metadata": {"total_size": 16}, "weight_map": {"a": "model-00001-of-00001.safetensors"}},
    "ok_any_names": {"weight_map": {"a": "..x", "b": "x..", "c": "a b/\u00e9.bin", "d": "\\"}},
    "ok_other_keys": {"metadata": [None, True, -1, 1.5e300, {"weight_map": {}}], "x": "y", "weight_map": {"a": "b"}},
    "bad_empty": b"",
    "bad_array": b"[]",
    "bad_open": b'{"weight_map":{"a":"b"}',
    "bad_trailing": b'{"weight_map":{"a":"b"}}x',
    "bad_nul": b'{"weight_map":{"a":"b"}}\0x',
    "bad_no_map": {"metadata": {}},
    "bad_map_array": {"weight_map": ["a"]},
    "bad_map_empty": {"weight_map": {}},
    "bad_duplicate": b'{"weight_map":{"a":"b","a":"b"}}',
    "bad_duplicate_map": b'{"weight_map":{"a":"b"},"weight_map":{"a":"b"}}',
    "bad_deep": b'{"metadata":' + b"[" * 300,
    "bad_file_number": {"weight_map": {"a": 1}},
    "bad_file_empty": {"weight_map": {"a": ""}},
    "bad_file_absolute": {"weight_map": {"a": "/etc/passwd"}},
    "bad_file_parent": {"weight_map": {"a": "../x"}},
    "bad_file_parent_inside": {"weight_map": {"a": "b/../../x"}},
    "bad_file_parent_last": {"weight_map": {"a": "b/.."}},
    "bad_file_dot": {"weight_map": {"a": "./b"}},
    "bad_file_slashes": {"weight_map": {"a": "b//c"}},
    "bad_file_slash_last": {"weight_map": {"a": "b/"}},
    "bad_file_nul": {"weight_map": {"a": "b\0c"}},
}

for folder, inputs in (("json", JSON), ("file", FILE), ("index", INDEX)):
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    for name, content in inputs.items():
        (ROOT / folder / name).write_bytes(text(content))
