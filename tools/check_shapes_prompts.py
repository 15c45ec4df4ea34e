#!/usr/bin/env python3
"""Shows that diffusers' own videos of the end-to-end test's prompts show what the test asks of ours.

    PYTHON tools/check_shapes_prompts.py        # PYTHON: see tests/goldens/README.md

Generates every prompt of tests/e2e/shapes_prompts.json with diffusers in float32 and bfloat16 (VAE in float32) and prints the measures of
tools/shapes/evaluate.py, which tests/e2e/shape_measure.cc follows. Exits 1 if one differs from what the file expects.
"""

import json
import os
import sys

import torch
from diffusers import AutoencoderKLWan, WanPipeline

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(HERE, "tools", "shapes"))
from evaluate import analyse  # noqa: E402


def main():
    repo = os.path.join(HERE, "assets", "shapes")
    with open(os.path.join(HERE, "tests", "e2e", "shapes_prompts.json")) as f:
        prompts = json.load(f)
    misses = 0
    for dtype in (torch.float32, torch.bfloat16):
        vae = AutoencoderKLWan.from_pretrained(repo + "/vae", torch_dtype=torch.float32)
        pipe = WanPipeline.from_pretrained(repo, torch_dtype=dtype, vae=vae)
        pipe.set_progress_bar_config(disable=True)
        for p in prompts:
            video = pipe(p["prompt"], height=128, width=128, num_frames=17, num_inference_steps=20, guidance_scale=5.0,
                         generator=torch.Generator("cpu").manual_seed(p["seed"]), output_type="np").frames[0]
            seen = analyse(video)
            ok = all(seen[k] == p[k] for k in ("color", "background", "motion"))
            misses += not ok
            print(f"{'ok  ' if ok else 'MISS'} {str(dtype)[6:]:8} seed {p['seed']}  {p['prompt']}: {seen['color']} on {seen['background']}, "
                  f"{seen['motion']} (dx, dy, growth: {seen.get('delta')})", flush=True)
    sys.exit(misses > 0)


if __name__ == "__main__":
    main()
