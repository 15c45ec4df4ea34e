#!/usr/bin/env python3
"""Decodes the demo model's latents with diffusers and with us, in turns, on equal threads, and prints how the two compare.

    PYTHON bench/compare_decode.py [--build build/release] [--threads 2] [--repeats 9] [--model assets/shapes] [--latents FILE]

PYTHON has diffusers (tests/goldens/README.md). The first run of each is a warm-up; medians are compared. Processor time is the steadier
figure on a machine that does other work too.
"""

import argparse
import os
import statistics
import subprocess
import time

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="assets/shapes")
    parser.add_argument("--latents", help="a safetensors file with `latents` (default: the model's golden.safetensors)")
    args = parser.parse_args()
    latents_file = args.latents or os.path.join(args.model, "golden.safetensors")

    torch.set_num_threads(args.threads)
    vae = AutoencoderKLWan.from_pretrained(os.path.join(args.model, "vae"), torch_dtype=torch.float32).eval()
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    z = load_file(latents_file)["latents"] / std + mean

    ours = subprocess.Popen([os.path.join(args.build, "bin", "bench_decode"), args.model, latents_file, str(args.threads)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if ours.stdout.readline().strip() != "ready":
        raise SystemExit(f"bench_decode ended with code {ours.wait()}")

    def run_theirs():
        wall, processor = time.perf_counter(), time.process_time()
        with torch.no_grad():
            vae.decode(z, return_dict=False)
        return time.perf_counter() - wall, time.process_time() - processor

    def run_ours():
        ours.stdin.write("run\n")
        ours.stdin.flush()
        return tuple(float(v) for v in ours.stdout.readline().split())

    times = {"theirs": [], "ours": []}
    for _ in range(args.repeats + 1):
        times["theirs"].append(run_theirs())
        times["ours"].append(run_ours())
    ours.stdin.close()
    ours.wait()
    for i, what in enumerate(("wall", "processor")):
        a, b = (statistics.median(t[i] for t in times[side][1:]) for side in ("theirs", "ours"))
        print(f"{what:9} theirs {a:.3f} s, ours {b:.3f} s, ratio {b / a:.3f}")


if __name__ == "__main__":
    main()
