#!/usr/bin/env python3
"""diffusers' half of bench/compare.py. Runs in the reference environment (tests/goldens/README.md), never in ours.

    reference_worker.py prepare DIR                      # writes the weights and inputs that both halves read
    reference_worker.py denoise DIR DTYPE THREADS BRANCHES
    reference_worker.py text DIR DTYPE THREADS
    reference_worker.py request REPOSITORY DTYPE THREADS

After "ready" it answers each line of standard input: "run [JSON]" does the work once and answers its seconds, "save FILE" writes the last
result, "memory" answers the process's peak resident bytes. DTYPE is F32 or BF16.
"""

import json
import os
import sys
import time

import torch
from safetensors.torch import load_file, save_file

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
STEPS, GUIDANCE = 50, 5.0
# 5 x 15 x 20 = 1,500 tokens: 240x320 pixels, 17 frames
LATENTS = (1, 16, 5, 30, 40)
PROMPT_TOKENS = 20


def dump_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)


def randomise(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.uniform_(0.9, 1.1) if "norm" in name and name.endswith("weight") else p.uniform_(-0.1, 0.1)
            elif name == "shared.weight":
                p.uniform_(-1, 1)
            else:
                p.uniform_(-1, 1).mul_((p.numel() / p.shape[0]) ** -0.5)
    return model


def write_repository(root, transformer, text_encoder):
    """A repository of which only the component under test has weights; the others' configurations make it readable."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
    dump_json(root + "/model_index.json", {
        "_class_name": "WanPipeline", "_diffusers_version": "0.42.1", "boundary_ratio": None, "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"], "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None], "vae": ["diffusers", "AutoencoderKLWan"]})
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0).save_config(root + "/scheduler")
    with torch.device("meta"):
        AutoencoderKLWan().save_config(root + "/vae")
    transformer(root + "/transformer")
    text_encoder(root + "/text_encoder")


def prepare(root):
    from diffusers import WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel
    torch.manual_seed(0)

    def dit(text_dim):
        return WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, text_dim=text_dim, ffn_dim=8960, num_layers=8,
                                     cross_attn_norm=True, qk_norm="rms_norm_across_heads")

    def umt5(d_model):
        return UMT5Config(vocab_size=32000, d_model=d_model, d_kv=64, d_ff=2816, num_layers=8, num_heads=16, dropout_rate=0.0,
                          feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)

    for name in ("denoise", "text"):
        os.makedirs(f"{root}/{name}")

    def dit_config(path):
        with torch.device("meta"):
            dit(1024).save_config(path)

    write_repository(root + "/denoise", lambda path: randomise(dit(4096)).to(torch.bfloat16).save_pretrained(path),
                     lambda path: umt5(4096).save_pretrained(path))
    write_repository(root + "/text", dit_config,
                     lambda path: randomise(UMT5EncoderModel(umt5(1024))).to(torch.bfloat16).save_pretrained(path))
    save_file({"latents": torch.randn(LATENTS), "text": torch.randn(PROMPT_TOKENS, 4096), "negative_text": torch.randn(1, 4096),
               "ids": torch.cat([torch.randint(3, 32000, (PROMPT_TOKENS - 1,)), torch.tensor([1])])}, root + "/inputs.safetensors")


def denoise(root, dtype, branches):
    from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
    model = WanTransformer3DModel.from_pretrained(root + "/denoise/transformer", torch_dtype=dtype).eval()
    scheduler = UniPCMultistepScheduler.from_pretrained(root + "/denoise/scheduler")
    scheduler.set_timesteps(STEPS)
    scheduler.set_begin_index(0)
    inputs = load_file(root + "/inputs.safetensors")

    def padded(rows):
        return torch.cat([rows, rows.new_zeros(512 - len(rows), rows.shape[1])])[None].to(dtype)

    text, negative = padded(inputs["text"]), padded(inputs["negative_text"])
    state = {"latents": inputs["latents"], "step": 0}

    def run():
        t = scheduler.timesteps[state["step"]]
        x, time_ = state["latents"].to(dtype), t.expand(1)
        v = model(x, time_, text, return_dict=False)[0]
        if branches == 2:
            unconditional = model(x, time_, negative, return_dict=False)[0]
            v = unconditional + GUIDANCE * (v - unconditional)
        state["latents"] = scheduler.step(v, t, state["latents"], return_dict=False)[0]
        state["step"] += 1
        return state["latents"] - inputs["latents"]

    return lambda _: run()


def text(root, dtype):
    from transformers import UMT5EncoderModel
    model = UMT5EncoderModel.from_pretrained(root + "/text/text_encoder", dtype=dtype).eval()
    ids = load_file(root + "/inputs.safetensors")["ids"]
    padded = torch.zeros(1, 512, dtype=torch.int64)
    padded[0, :len(ids)] = ids
    mask = (torch.arange(512) < len(ids)).long()[None]
    return lambda _: model(padded, mask).last_hidden_state[0, :len(ids)]


def request(repository, dtype):
    from diffusers import AutoencoderKLWan, WanPipeline
    vae = AutoencoderKLWan.from_pretrained(repository + "/vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(repository, torch_dtype=dtype, vae=vae)
    pipe.set_progress_bar_config(disable=True)

    def run(line):
        r = json.loads(line)
        return torch.from_numpy(pipe(r["prompt"], height=r["height"], width=r["width"], num_frames=r["num_frames"],
                                     num_inference_steps=r["num_inference_steps"], guidance_scale=r["guidance_scale"],
                                     generator=torch.Generator("cpu").manual_seed(r["seed"]), output_type="np").frames[0])

    return run


def peak_resident_bytes():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def serve(work):
    print("ready", flush=True)
    result = None
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "run":
            start = time.perf_counter()
            with torch.inference_mode():
                result = work(argument)
            print(time.perf_counter() - start, flush=True)
        elif command == "save":
            save_file({"result": result.float().contiguous()}, argument)
            print("saved", flush=True)
        elif command == "memory":
            print(peak_resident_bytes(), flush=True)
        else:
            sys.exit(f"reference_worker: unknown command {command}")


def main():
    command, root, *rest = sys.argv[1:]
    if command == "prepare":
        prepare(root)
        return
    dtype, threads = DTYPES[rest[0]], int(rest[1])
    torch.set_num_threads(threads)
    serve({"denoise": lambda: denoise(root, dtype, int(rest[2])), "text": lambda: text(root, dtype),
           "request": lambda: request(root, dtype)}[command]())


if __name__ == "__main__":
    main()
