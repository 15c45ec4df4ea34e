#!/usr/bin/env python3
"""Writes tests/goldens/vae: what diffusers' AutoencoderKLWan computes with formula weights, beside the cases of models.md 9.1 b.

    PYTHON tools/make_vae_goldens.py [--out tests/goldens/vae]

PYTHON is an environment with diffusers 0.42.1 and torch 2.11 (tests/goldens/README.md). Every expected value is diffusers' own. Weights and
inputs follow the formula of tests/support/hash_weights.h, so a file holds outputs only. Runs on one thread: a second run gives the same bytes.
"""

import argparse
import pathlib

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from formula import uniform
from safetensors.torch import save_file

WAN21 = {"base_dim": 4, "z_dim": 16, "num_res_blocks": 1}
WAN22 = {"base_dim": 4, "z_dim": 12, "num_res_blocks": 1, "in_channels": 12, "out_channels": 12, "is_residual": True, "patch_size": 2,
         "scale_factor_spatial": 16, "latents_mean": [0.0] * 12, "latents_std": [1.0] * 12}

# Odd sizes, uneven widths and time factors, tiles that are not square and whose last ones are narrower than the blended overlap.
# `tiles`: height, width, stride height, stride width in pixels.
CASES = {
    "wan21-uneven": {"config": {**WAN21, "dim_mult": [1, 3, 2, 4]}, "latents": [3, 5, 3], "pixels": [9, 24, 40], "tiles": [24, 16, 16, 8]},
    "wan21-time-first": {"config": {**WAN21, "dim_mult": [1, 2, 2, 2], "temperal_downsample": [True, True, False]}, "latents": [3, 3, 5],
                         "pixels": [5, 40, 24], "tiles": [32, 24, 8, 16]},
    "wan21-long": {"config": {**WAN21, "dim_mult": [1, 1, 1, 1]}, "latents": [7, 1, 2], "pixels": [25, 8, 16], "tiles": None},
    "wan22-uneven": {"config": {**WAN22, "decoder_base_dim": 6, "dim_mult": [1, 2, 4, 4]}, "latents": [3, 3, 5], "pixels": [9, 48, 32],
                     "tiles": [32, 48, 16, 32]},
    "wan22-time-first": {"config": {**WAN22, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [True, False, True]}, "latents": [3, 2, 3],
                         "pixels": [9, 32, 48], "tiles": None},
}


def formula_input(name, shape):
    return torch.from_numpy(uniform(name, int(np.prod(shape))).astype(np.float32)).view(shape)


def formula_weight(name, shape):
    scale, offset = 1.0 / np.sqrt(np.prod(shape[1:], dtype=np.float64)), 0.0
    if name.endswith(".bias"):
        scale = 0.1
    elif name.endswith(".gamma"):
        scale, offset = 0.1, 1.0
    values = offset + scale * uniform(name, int(np.prod(shape)))
    return torch.from_numpy(values.astype(np.float32)).view(tuple(shape))


def build(config):
    vae = AutoencoderKLWan(**config).eval()
    vae.load_state_dict({name: formula_weight(name, list(p.shape)) for name, p in vae.state_dict().items()})
    return vae


@torch.no_grad()
def run(case):
    config = case["config"]
    vae = build(config)
    z = formula_input("input.latents", [1, config["z_dim"], *case["latents"]])
    pixels = formula_input("input.pixels", [1, 3, *case["pixels"]])
    tensors = {"decoded": vae.decode(z).sample, "encoded": vae.encode(pixels).latent_dist.mode()}
    if case["tiles"]:
        height, width, stride_height, stride_width = case["tiles"]
        vae.enable_tiling(height, width, stride_height, stride_width)
        tensors["decoded_tiled"] = vae.decode(z).sample
    return {name: t.contiguous() for name, t in tensors.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/goldens/vae"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        tensors = run(case)
        save_file(tensors, args.out / f"{name}.safetensors")
        for key, t in tensors.items():
            print(f"{name} {key} {list(t.shape)} mean {t.mean():.4f} std {t.std():.4f} clamped {(t.abs() == 1).float().mean():.4f}")


if __name__ == "__main__":
    main()
