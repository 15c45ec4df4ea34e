#!/usr/bin/env python3
"""Writes tests/goldens/{pipelines,components}: tiny repositories with formula weights and what diffusers 0.42 computes with them.

    PYTHON tools/make_goldens.py [--out tests/goldens] [--only pipelines|components]

PYTHON is an environment with diffusers 0.42.1, transformers 5 and torch 2.11 (tests/goldens/README.md). Nothing of ours runs here: every
expected value is diffusers' or transformers' own. Runs on one thread, so a second run gives the same bytes.
"""

import argparse
import json
import os
import shutil

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from formula import uniform
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

VAE21_MEAN = [-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
              0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921]
VAE21_STD = [2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
             3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160]
VAE22_MEAN = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667]
VAE22_STD = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744]

PROMPT = "a green triangle moving up on a black background"
NEGATIVE = "blurry, dark"
# Fills the 512 rows, so that guidance matters: of a short prompt's rows most are zero, as the negative prompt's.
LONG_PROMPT = "; ".join(f"{n} red circles moving up" for n in range(150))


# ---- formula weights (tests/support/hash_weights.h is the same formula) ------------------------------------------------


def formula(name, shape, component):
    last = name.rsplit(".", 1)[-1]
    numel = int(np.prod(shape))
    if last == "scale_shift_table":
        scale, offset = 0.2, 0.0
    elif last == "bias":
        scale, offset = 0.1, 0.0
    elif last == "gamma":
        scale, offset = 0.1, 1.0
    elif name == "shared.weight" or name.endswith("relative_attention_bias.weight"):
        scale, offset = 1.0, 0.0
    elif len(shape) == 1:
        scale, offset = 0.1, 1.0
    else:
        scale, offset = 1 / np.sqrt(numel / shape[0]), 0.0
    u = uniform(f"{component}:{name}", numel)
    return torch.from_numpy((offset + scale * u).astype(np.float32)).reshape(shape)


def with_formula_weights(model, component):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(formula(name, tuple(p.shape), component))
    return model.eval()


def formula_input(name, shape):
    return torch.from_numpy(uniform(name, int(np.prod(shape))).astype(np.float32)).reshape(shape)


# ---- the tiny models ---------------------------------------------------------------------------------------------------


def transformer(component, channels=16, heads=2, ffn=40, layers=2):
    return with_formula_weights(WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=16, in_channels=channels, out_channels=channels,
        text_dim=32, freq_dim=256, ffn_dim=ffn, num_layers=layers, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64), component)


def text_encoder():
    return with_formula_weights(UMT5EncoderModel(UMT5Config(
        vocab_size=256, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, relative_attention_num_buckets=32,
        relative_attention_max_distance=128, feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0)), "text_encoder")


def vae21():
    return with_formula_weights(AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=VAE21_MEAN, latents_std=VAE21_STD), "vae")


def vae22():
    return with_formula_weights(AutoencoderKLWan(
        base_dim=4, decoder_base_dim=4, z_dim=48, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        is_residual=True, in_channels=12, out_channels=12, patch_size=2, scale_factor_temporal=4, scale_factor_spatial=16,
        latents_mean=VAE22_MEAN, latents_std=VAE22_STD), "vae")


def unipc(shift):
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, num_train_timesteps=1000,
                                   solver_order=2)


def dump_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def write_index(root, scheduler, experts=1, boundary=None, expand=False):
    """model_index.json and scheduler/, as WanPipeline.save_pretrained writes them."""
    dump_json(os.path.join(root, "model_index.json"), {
        "_class_name": "WanPipeline", "_diffusers_version": "0.42.1", "boundary_ratio": boundary, "expand_timesteps": expand,
        "scheduler": ["diffusers", type(scheduler).__name__], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"], "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if experts == 2 else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"]})
    scheduler.save_pretrained(os.path.join(root, "scheduler"))


def link(root, name, target):
    os.symlink(os.path.relpath(target, root), os.path.join(root, name))


def make_repositories(out, tokenizer):
    """family -> path of its repository. Components that families share are links."""
    roots = {}
    for family in ("wan21", "wan21-sharded", "wan21-bf16", "wan22-a14b", "wan22-ti2v"):
        roots[family] = os.path.join(out, family, "repo")
        os.makedirs(roots[family])
        link(roots[family], "tokenizer", tokenizer)
    base = roots["wan21"]
    write_index(base, unipc(3.0))
    transformer("transformer").save_pretrained(base + "/transformer")
    text_encoder().save_pretrained(base + "/text_encoder")
    vae21().save_pretrained(base + "/vae")

    # The same weights over several files, and an Euler solver as the repository's own.
    root = roots["wan21-sharded"]
    write_index(root, FlowMatchEulerDiscreteScheduler(shift=7.0))
    transformer("transformer").save_pretrained(root + "/transformer", max_shard_size="40KB")
    text_encoder().save_pretrained(root + "/text_encoder", max_shard_size="40KB")
    link(root, "vae", base + "/vae")

    # Stored in bfloat16; a configuration of an older library: keys missing, keys nobody knows.
    root = roots["wan21-bf16"]
    write_index(root, unipc(5.0))
    transformer("transformer").to(torch.bfloat16).save_pretrained(root + "/transformer")
    text_encoder().to(torch.bfloat16).save_pretrained(root + "/text_encoder")
    link(root, "vae", base + "/vae")
    path = root + "/transformer/config.json"
    with open(path) as f:
        config = json.load(f)
    for key in ("added_kv_proj_dim", "image_dim", "pos_embed_seq_len", "in_channels", "out_channels", "freq_dim", "eps"):
        del config[key]
    dump_json(path, config | {"window_size": [-1, -1], "add_img_emb": False})

    # The experts differ in width, depth and inner width.
    root = roots["wan22-a14b"]
    write_index(root, unipc(3.0), experts=2, boundary=0.875)
    link(root, "transformer", base + "/transformer")
    transformer("transformer_2", heads=3, ffn=24, layers=3).save_pretrained(root + "/transformer_2")
    link(root, "text_encoder", base + "/text_encoder")
    link(root, "vae", base + "/vae")

    root = roots["wan22-ti2v"]
    write_index(root, unipc(5.0), expand=True)
    transformer("transformer", channels=48).save_pretrained(root + "/transformer")
    link(root, "text_encoder", base + "/text_encoder")
    vae22().save_pretrained(root + "/vae")
    return roots


# ---- pipelines ---------------------------------------------------------------------------------------------------------


def case(name, solver="unipc", shift=3.0, steps=4, guidance=5.0, seed=42, dtype="float32", size=(32, 48, 9), prompt=PROMPT, negative="",
         guidance_2=None):
    height, width, frames = size
    settings = {"width": width, "height": height, "num_frames": frames, "num_inference_steps": steps, "guidance_scale": guidance,
                "flow_shift": shift, "solver": solver, "seed": seed}
    if guidance_2 is not None:
        settings["guidance_scale_2"] = guidance_2
    return {"name": name, "dtype": dtype, "prompt": prompt, "negative_prompt": negative, "settings": settings}


SMALL = (32, 32, 5)
CASES = {
    "wan21": [
        case("unipc"),
        case("unipc-bf16", dtype="bfloat16"),
        case("unipc-no-guidance", guidance=1.0, prompt=LONG_PROMPT, size=SMALL),
        case("unipc-1-step", steps=1, size=SMALL),
        case("unipc-2-steps", steps=2, size=SMALL, negative=NEGATIVE),
        case("unipc-9-steps-shift-12", steps=9, shift=12.0, size=SMALL, negative=NEGATIVE, seed=2**32 + 5),
        case("unipc-legacy", solver="unipc-legacy", size=SMALL),
        case("euler", solver="euler", shift=5.0),
        case("euler-bf16", solver="euler", shift=5.0, dtype="bfloat16"),
        case("euler-no-guidance", solver="euler", shift=3.0, steps=3, guidance=0.5, prompt=LONG_PROMPT, size=SMALL),
        case("euler-native", solver="euler-native", shift=5.0, size=SMALL),
        case("frames-7-become-5", size=(16, 32, 7), steps=2),
        case("one-frame", size=(48, 16, 1), steps=3),
        case("empty-prompt", size=SMALL, steps=2, prompt="", negative=NEGATIVE),
        case("long-prompt", size=SMALL, steps=2, prompt=LONG_PROMPT),
    ],
    "wan21-sharded": [case("euler-shift-7", solver="euler", shift=7.0, size=SMALL)],
    "wan21-bf16": [
        case("stored-bf16-run-fp32", shift=5.0, size=SMALL),
        case("stored-bf16-run-bf16", shift=5.0, size=SMALL, dtype="bfloat16"),
    ],
    "wan22-a14b": [
        case("two-scales", steps=6, guidance=4.0, guidance_2=3.0, prompt=LONG_PROMPT),
        case("two-scales-bf16", steps=6, guidance=4.0, guidance_2=3.0, prompt=LONG_PROMPT, dtype="bfloat16"),
        case("one-scale", steps=6, guidance=4.0, prompt=LONG_PROMPT, size=SMALL),
        case("boundary-tie", steps=10, guidance=4.0, guidance_2=3.0, size=SMALL),  # step 4 has t = 875 = 0.875 * 1000
        case("second-scale-1", steps=4, guidance=4.5, guidance_2=1.0, prompt=LONG_PROMPT, size=SMALL),
        case("first-scale-1", steps=4, guidance=1.0, guidance_2=6.0, prompt=LONG_PROMPT, size=SMALL),  # no guidance at all
        case("shift-12", steps=8, shift=12.0, guidance=4.0, guidance_2=3.0, prompt=LONG_PROMPT, size=SMALL),
        case("euler", solver="euler", shift=5.0, steps=5, guidance=4.0, guidance_2=3.0, size=SMALL, negative=NEGATIVE),
    ],
    "wan22-ti2v": [
        case("unipc", shift=5.0, size=(32, 64, 9)),
        case("unipc-bf16", shift=5.0, size=(32, 64, 9), dtype="bfloat16"),
        case("no-guidance", shift=5.0, steps=3, guidance=1.0, size=(64, 32, 5)),
        case("euler", solver="euler", shift=5.0, size=(64, 32, 5), negative=NEGATIVE),
        case("euler-bf16", solver="euler", shift=5.0, size=(64, 32, 5), dtype="bfloat16"),
        case("rounds-48x80-to-32x64", shift=5.0, steps=2, size=(48, 80, 5)),
    ],
}


def scheduler_for(solver, shift):
    """A scheduler whose set_timesteps(n) makes the solver's grid; the older grids are diffusers' own arithmetic on given levels."""
    scheduler = unipc(shift) if solver.startswith("unipc") else FlowMatchEulerDiscreteScheduler(shift=shift)
    original = scheduler.set_timesteps
    if solver == "unipc-legacy":
        scheduler.set_timesteps = lambda n, device=None: original(sigmas=np.linspace(0.999, 0, n + 1)[:-1], device=device)
    elif solver == "euler-native":
        scheduler.set_timesteps = lambda n, device=None: original(sigmas=np.linspace(1, 0, n + 1)[:-1], device=device)
    return scheduler


def load(root, dtype):
    dtype = getattr(torch, dtype)
    vae = AutoencoderKLWan.from_pretrained(root + "/vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(root, torch_dtype=dtype, vae=vae)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.dtype == dtype and pipe.text_encoder.dtype == dtype and pipe.vae.dtype == torch.float32
    return pipe


def run_case(pipe, c):
    s = c["settings"]
    pipe.scheduler = scheduler_for(s["solver"], s["flow_shift"])
    steps = []

    def record(pipe, i, t, tensors):
        steps.append(tensors["latents"].float().clone())
        return {}

    video = pipe(c["prompt"], negative_prompt=c["negative_prompt"], height=s["height"], width=s["width"], num_frames=s["num_frames"],
                 num_inference_steps=s["num_inference_steps"], guidance_scale=s["guidance_scale"],
                 guidance_scale_2=s.get("guidance_scale_2"), generator=torch.Generator("cpu").manual_seed(s["seed"]), output_type="np",
                 callback_on_step_end=record).frames[0]
    with torch.no_grad():
        embeds = pipe.encode_prompt(c["prompt"], do_classifier_free_guidance=False, max_sequence_length=512)[0][0].float()
    rows = int((embeds.abs().sum(1) > 0).sum())
    tensors = {"latents": torch.cat(steps), "video": torch.from_numpy(video), "prompt_embeds": embeds[:rows].clone()}
    assert all(torch.isfinite(t).all() for t in tensors.values()), c["name"]
    timesteps = [float(t) for t in pipe.scheduler.timesteps]
    return tensors, timesteps


def make_pipelines(out, tokenizer):
    shutil.rmtree(out, ignore_errors=True)
    roots = make_repositories(out, tokenizer)
    for family, cases in CASES.items():
        folder = os.path.join(out, family)
        pipes, manifest, videos = {}, [], {}
        for c in cases:
            if c["dtype"] not in pipes:
                pipes[c["dtype"]] = load(roots[family], c["dtype"])
            tensors, timesteps = run_case(pipes[c["dtype"]], c)
            save_file({k: t.contiguous() for k, t in tensors.items()}, os.path.join(folder, c["name"] + ".safetensors"))
            manifest.append(c | {"file": c["name"] + ".safetensors", "timesteps": timesteps})
            videos[c["name"]] = tensors["video"]
            v = tensors["video"]
            nearest = min([((v - w).abs().max().item(), (v - w).abs().mean().item(), n) for n, w in videos.items()
                           if n != c["name"] and w.shape == v.shape], default=None)
            print(f"{family}/{c['name']}: video {tuple(v.shape)} mean {v.mean():.4f} std {v.std():.4f}; nearest other "
                  + ("none" if nearest is None else f"{nearest[2]}: max {nearest[0]:.4f} mean {nearest[1]:.5f}"), flush=True)
        dump_json(os.path.join(folder, "manifest.json"), {"repo": "repo", "cases": manifest})


# ---- components --------------------------------------------------------------------------------------------------------


def make_transformer(path, root, per_token):
    """x [1,C,T,h,w], text [1,L,32], t.* , and the outputs as float32; block0.* is the residual stream after the first block."""
    channels, frames, height, width = (48, 2, 4, 6) if per_token else (16, 5, 8, 10)  # no two RoPE axes alike
    x = formula_input("input.hidden_states", (1, channels, frames, height, width))
    text = formula_input("input.encoder_hidden_states", (1, 12, 32))
    tensors = {"x": x, "text": text}
    tokens, clean = frames * height * width // 4, height * width // 4
    if per_token:
        times = {"t500": torch.full((1, tokens), 500.0),
                 "first-frame-clean": torch.cat([torch.zeros(1, clean), torch.full((1, tokens - clean), 731.0)], 1)}
    else:
        times = {"t999": torch.tensor([999]), "t500": torch.tensor([500]), "t0": torch.tensor([0]), "t857.6923": torch.tensor([857.6923])}
    for dtype, key in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        model = WanTransformer3DModel.from_pretrained(root + "/transformer", torch_dtype=dtype)
        first = {}
        model.blocks[0].register_forward_hook(lambda m, a, y: first.update(y=y.float().clone()))
        for name, t in times.items():
            with torch.no_grad():
                y = model(x.to(dtype), t, text.to(dtype), return_dict=False)[0]
            tensors["t." + name] = t.float()
            tensors[f"{key}.{name}"] = y.float()
            tensors[f"block0.{key}.{name}"] = first["y"]
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)


def make_text_encoder(path, root):
    """ids.* int64 [L] without padding; *.fp32, *.bf16: the last hidden state's valid rows [L,32] with the ids padded to 512 and masked, as
    diffusers runs it; *.fp32.unpadded: the L ids alone."""
    sequences = {"prompt": [5, 17, 33, 2, 60, 61, 9, 40, 1], "end": [1], "long": [(7 * i) % 250 + 3 for i in range(299)] + [1],
                 "full": [(11 * i) % 250 + 3 for i in range(511)] + [1]}
    tensors = {}
    for dtype, key in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        model = UMT5EncoderModel.from_pretrained(root + "/text_encoder", dtype=dtype)
        for name, ids in sequences.items():
            n = len(ids)
            padded = torch.zeros(1, 512, dtype=torch.int64)
            padded[0, :n] = torch.tensor(ids)
            with torch.no_grad():
                y = model(padded, (torch.arange(512) < n).long()[None]).last_hidden_state[0, :n].float()
                tensors[f"{name}.{key}"] = y
                if dtype == torch.float32 and n < 512:
                    tensors[f"{name}.fp32.unpadded"] = model(padded[:, :n]).last_hidden_state[0]
            tensors["ids." + name] = torch.tensor(ids)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)


def make_schedulers(path):
    """Grids, and traces of x' = v(x, t) from a fixed start."""
    def velocity(x, t, dtype):
        return (0.5 * x + 0.25 * torch.sin(3 * x) + 0.001 * t).to(dtype)

    grids, traces = [], []
    for solver in ("unipc", "unipc-legacy", "euler", "euler-native"):
        for shift in (1.0, 3.0, 5.0, 12.0):
            for n in (1, 2, 3, 4, 6, 10, 20, 50):
                scheduler = scheduler_for(solver, shift)
                scheduler.set_timesteps(n)
                grids.append({"solver": solver, "shift": shift, "steps": n, "sigmas": scheduler.sigmas.tolist(),
                              "timesteps": scheduler.timesteps.tolist()})
    options = [{}, {"solver_order": 1}, {"disable_corrector": [0]}, {"disable_corrector": [0, 1, 3]}]
    for solver in ("unipc", "unipc-legacy", "euler", "euler-native"):
        for config in options if solver == "unipc" else [{}]:
            for shift, n in ((3.0, 1), (3.0, 2), (3.0, 3), (5.0, 6), (12.0, 20)):
                for dtype in (torch.float32, torch.bfloat16):
                    scheduler = scheduler_for(solver, shift)
                    for key, value in config.items():
                        scheduler.register_to_config(**{key: value})
                        setattr(scheduler, key, value)
                    scheduler.set_timesteps(n)
                    scheduler.set_begin_index(0)
                    x = torch.tensor([1, -0.5, 0.25, 2, 0.125]).view(1, 5, 1)  # UniPC wants batch, channels, rest
                    rows = []
                    for t in scheduler.timesteps:
                        x = scheduler.step(velocity(x.float(), float(t), dtype), t, x, return_dict=False)[0]
                        rows.append(x.float().flatten().tolist())
                    assert np.isfinite(rows).all()
                    traces.append({"solver": solver, "shift": shift, "steps": n, **config, "velocity_dtype": str(dtype)[6:],
                                   "sample_dtype": str(x.dtype)[6:], "samples": rows})
    with open(path, "w") as f:
        lines = lambda rows: ",\n  ".join(json.dumps(r) for r in rows)
        f.write('{"start": [1, -0.5, 0.25, 2, 0.125],\n "velocity": "0.5 x + 0.25 sin(3 x) + 0.001 t in float32, then cast to velocity_dtype",\n'
                f' "grids": [\n  {lines(grids)}],\n "traces": [\n  {lines(traces)}]}}\n')


def make_components(out, pipelines):
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    make_transformer(out + "/transformer.safetensors", pipelines + "/wan21/repo", per_token=False)
    make_transformer(out + "/transformer_per_token.safetensors", pipelines + "/wan22-ti2v/repo", per_token=True)
    make_text_encoder(out + "/text_encoder.safetensors", pipelines + "/wan21/repo")
    make_schedulers(out + "/schedulers.json")


def main():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=os.path.join(here, "tests", "goldens"))
    parser.add_argument("--tokenizer", default=os.path.join(here, "assets", "shapes", "tokenizer"))
    parser.add_argument("--only", choices=["pipelines", "components"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only != "components":
        make_pipelines(args.out + "/pipelines", args.tokenizer)
    if args.only != "pipelines":
        make_components(args.out + "/components", args.out + "/pipelines")


if __name__ == "__main__":
    main()
