#!/usr/bin/env python3
"""Writes the seed corpus of the host weights fuzzers into host_weights_corpus/{identity,manifest,ready,config} beside this script.

ok_* must be accepted, bad_* refused (host_weights_corpus_test checks it). The generated files are committed; run this after changing
it, or a format.
"""
import copy
import hashlib
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent / "host_weights_corpus"


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha(data):
    return hashlib.sha256(data).hexdigest()


def tensor(name, dtype, shape, offset, size):
    return {"name": name, "dtype": dtype, "shape": shape, "offset": offset, "bytes": size}


def component(name, parts):
    offset, out = 0, []
    for size, tensors in parts:
        out.append({"offset": offset, "bytes": size, "tensors": tensors})
        offset += -(-size // 4096) * 4096
    return {"name": name, "file": name + ".bin", "bytes": offset, "parts": out}


def identity(components, **changes):
    value = {
        "schema": 1,
        "source": {"fingerprint": "1" * 64},
        "model": {"family": "wan", "config": "2" * 64},
        "representation": {"name": "dlo-final-layout-v1", "dtype": "BF16", "quantization": "none"},
        "layout": {"name": "dlo-parts-v1", "digest": sha(canonical(components)), "tp_size": 1, "tp_rank": 0},
        "adaptation": {"kind": "base", "fingerprint": None},
        "producer": {
            "id": "dlo-final-layout",
            "implementation": sha(canonical(IMPLEMENTATION)),
            "manifest_schema": 1,
            "restorer_schema": 1,
        },
    }
    for path, change in changes.items():
        *sections, key = path.split("__")
        at = value
        for section in sections:
            at = at[section]
        at[key] = change
    return value


IMPLEMENTATION = {
    "cast": "round-to-nearest-even-1",
    "identity": "1",
    "layout": "block-layout-256-1",
    "loader": "canonical-1",
    "manifest": "1",
    "quantize": "e4m3-per-tensor-1",
    "restorer": "1",
    "source": "content-1",
}


def manifest(components, /, **changes):
    ident = identity(components)
    with_digests = copy.deepcopy(components)
    for c in with_digests:
        for part in c["parts"]:
            part["sha256"] = "3" * 64
    value = {
        "schema": 1,
        "key": sha(canonical(ident)),
        "identity": ident,
        "content": sha(canonical(with_digests)),
        "components": with_digests,
    }
    value.update(changes)
    return value


def ready(value):
    data = canonical(value)
    return {
        "schema": 1,
        "key": value["key"],
        "manifest_bytes": len(data),
        "manifest_sha256": sha(data),
        "content": value["content"],
        "integrity": "sha256-of-parts",
    }


ONE = [component("vae", [(256, [tensor("w", "F32", [4], 0, 16)])])]
TWO = [
    component(
        "transformer",
        [
            (512, [tensor("proj", "F32", [2, 3], 0, 24), tensor("bias", "BF16", [5], 256, 10)]),
            (6144, [tensor("blocks.0.w", "BF16", [3000], 0, 6000)]),
            (6144, [tensor("blocks.1.w\u00e9\"\n", "F8_E4M3", [1, 6000], 0, 6000)]),
        ],
    ),
    component("vae", [(256, [tensor("w", "F32", [4], 0, 16), tensor("none", "I64", [0, 7], 256, 0)])]),
]
HUGE = [component("vae", [(1 << 59, [tensor("w", "U8", [1 << 59], 0, 1 << 59)])])]

IDENTITY = {
    "ok_one": canonical(identity(ONE)),
    "ok_tp": canonical(identity(TWO, layout__tp_size=4, layout__tp_rank=3)),
    "ok_lora": canonical(identity(TWO, adaptation={"kind": "lora", "fingerprint": "4" * 64})),
    "ok_other_version": canonical(identity(ONE, producer__manifest_schema=7, layout__name="dlo-parts-v2")),
    "bad_empty": b"",
    "bad_null": b"null",
    "bad_blank": canonical(identity(ONE)) + b" ",
    "bad_indented": json.dumps(identity(ONE), sort_keys=True, indent=1).encode(),
    "bad_unsorted": json.dumps(identity(ONE), separators=(",", ":")).encode(),
    "bad_boolean": canonical(identity(ONE, layout__tp_size=True)),
    "bad_float": canonical(identity(ONE, layout__tp_size=1.0)),
    "bad_exponent": canonical(identity(ONE)).replace(b'"tp_size":1', b'"tp_size":1e0'),
    "bad_text_number": canonical(identity(ONE, layout__tp_size="1")),
    "bad_rank": canonical(identity(ONE, layout__tp_rank=1)),
    "bad_negative": canonical(identity(ONE, layout__tp_rank=-1)),
    "bad_minus_zero": canonical(identity(ONE)).replace(b'"tp_rank":0', b'"tp_rank":-0'),
    "bad_huge": canonical(identity(ONE, layout__tp_size=1 << 70)),
    "bad_nan": canonical(identity(ONE, layout__tp_size=float("nan"))),
    "bad_extra": canonical(identity(ONE, layout__sp_size=1)),
    "bad_extra_section": canonical(dict(identity(ONE), more={})),
    "bad_missing": canonical({k: v for k, v in identity(ONE).items() if k != "adaptation"}),
    "bad_section_list": canonical(identity(ONE, source=[])),
    "bad_upper_case": canonical(identity(ONE, source__fingerprint="A" * 64)),
    "bad_short_digest": canonical(identity(ONE, source__fingerprint="1" * 63)),
    "bad_word": canonical(identity(ONE, model__family="../wan")),
    "bad_lora_without": canonical(identity(ONE, adaptation__kind="lora")),
    "bad_base_with": canonical(identity(ONE, adaptation__fingerprint="4" * 64)),
    "bad_schema": canonical(identity(ONE, schema=2)),
    "bad_twice": b'{"schema":1,' + canonical(identity(ONE))[1:],
    "bad_nul": canonical(identity(ONE)) + b"\0",
    "bad_utf8": canonical(identity(ONE)).replace(b"wan", b"w\xffn"),
    "bad_deep": b"[" * 500,
    "bad_escape": canonical(identity(ONE)).replace(b"wan", b"\\u0077an"),
}


def changed(components, change):
    copied = copy.deepcopy(components)
    change(copied)
    return canonical(manifest(copied))


MANIFEST = {
    "ok_one": canonical(manifest(ONE)),
    "ok_two": canonical(manifest(TWO)),
    "ok_huge": canonical(manifest(HUGE)),
    "bad_empty": b"",
    "bad_newline": canonical(manifest(ONE)) + b"\n",
    "bad_cut": canonical(manifest(ONE))[:-1],
    "bad_key": canonical(manifest(ONE, key="5" * 64)),
    "bad_content": canonical(manifest(ONE, content="5" * 64)),
    "bad_schema": canonical(manifest(ONE, schema=2)),
    "bad_extra": canonical(manifest(ONE, more=1)),
    "bad_identity": canonical(manifest(ONE, identity=identity(TWO))),
    "bad_no_component": changed(ONE, lambda c: c.clear()),
    "bad_components_object": canonical(manifest(ONE, components={})),
    "bad_twice": changed(ONE, lambda c: c.append(copy.deepcopy(c[0]))),
    "bad_up": changed(ONE, lambda c: c[0].update(name="../vae", file="../vae.bin")),
    "bad_other_file": changed(ONE, lambda c: c[0].update(file="READY.json")),
    "bad_bytes": changed(ONE, lambda c: c[0].update(bytes=8192)),
    "bad_part_offset": changed(ONE, lambda c: c[0]["parts"][0].update(offset=4096)),
    "bad_part_short": changed(ONE, lambda c: c[0]["parts"][0].update(bytes=15)),
    "bad_part_negative": changed(ONE, lambda c: c[0]["parts"][0].update(bytes=-1)),
    "bad_part_2_63": changed(ONE, lambda c: c[0]["parts"][0].update(bytes=1 << 63)),
    "bad_tensor_bytes": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(bytes=20)),
    "bad_tensor_offset": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(offset=1 << 62)),
    "bad_shape_overflow": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(shape=[1 << 40, 1 << 40])),
    "bad_shape_negative": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(shape=[-2, -2])),
    "bad_shape_float": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(shape=[4.0])),
    "bad_dimensions": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(shape=[4] + [1] * 20)),
    "bad_dtype": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(dtype="F31")),
    "bad_name_empty": changed(ONE, lambda c: c[0]["parts"][0]["tensors"][0].update(name="")),
    "bad_overlap": changed(TWO, lambda c: c[0]["parts"][0]["tensors"][1].update(offset=16)),
    "bad_order": changed(TWO, lambda c: c[0]["parts"][0]["tensors"].reverse()),
    "bad_tensor_twice": changed(TWO, lambda c: c[0]["parts"][2]["tensors"][0].update(name="blocks.0.w")),
    "bad_deep": b'{"components":' + b"[" * 500,
}

READY_OF = manifest(ONE)
READY = {
    "ok_one": canonical(ready(READY_OF)),
    "bad_empty": b"",
    "bad_object": b"{}",
    "bad_newline": canonical(ready(READY_OF)) + b"\n",
    "bad_cut": canonical(ready(READY_OF))[:-1],
    "bad_other": canonical(ready(manifest(TWO))),
    "bad_size": canonical(dict(ready(READY_OF), manifest_bytes=1)),
    "bad_digest": canonical(dict(ready(READY_OF), manifest_sha256="6" * 64)),
    "bad_extra": canonical(dict(ready(READY_OF), more=1)),
    "bad_schema": canonical(dict(ready(READY_OF), schema=True)),
    "bad_integrity": canonical(dict(ready(READY_OF), integrity="none")),
    "bad_nul": canonical(ready(READY_OF)) + b"\0",
}

# As models/wan/wan_test_repository.h has them: accepted in their own place.
TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
TEXT_ENCODER = {
    "model_type": "umt5",
    "architectures": ["UMT5EncoderModel"],
    "vocab_size": 256,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
}
CONFIG = {
    "ok_transformer": json.dumps(TRANSFORMER).encode(),
    "ok_text_encoder": json.dumps(TEXT_ENCODER).encode(),
    "ok_empty_object": b"{}",
    "ok_vae": json.dumps({"base_dim": 3, "num_res_blocks": 1, "dim_mult": [1, 1, 1, 1]}).encode(),
    "ok_scheduler": json.dumps({"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}).encode(),
    "ok_unknown_keys": json.dumps({"_comment": "x", "unheard_of": [1, {"a": None}]}).encode(),
    "bad_empty": b"",
    "bad_array": b"[]",
    "bad_number": b"7",
    "bad_open": b"{",
    "bad_nul": b"{}\0",
    "bad_behind": b"{} {}",
    "bad_twice": b'{"num_layers":1,"num_layers":1}',
    "bad_deep": b'{"a":' + b"[" * 500,
    "bad_utf8": b'{"\xff":1}',
    "bad_nan": b'{"eps":NaN}',
    "bad_comment": b"{} // end",
    "bad_single_quotes": b"{'a':1}",
    "bad_bom_only": b"\xef\xbb\xbf",
}


def main():
    for folder, files in (("identity", IDENTITY), ("manifest", MANIFEST), ("ready", READY), ("config", CONFIG)):
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
        for old in (ROOT / folder).glob("*_*"):
            if old.name.startswith(("ok_", "bad_")):
                old.unlink()
        for name, data in files.items():
            (ROOT / folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
