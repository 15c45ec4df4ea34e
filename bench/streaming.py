#!/usr/bin/env python3
"""What streaming costs a denoising step on this machine's CPU: the same requests with resident and with streamed weights, in turns.

    .deps/venv/bin/python bench/streaming.py [--build build/release] [--dp 2] [--threads 1] [--transfer rank-local] [--slots 2]
        [--repeats 5] [--model FOLDER] [--size 128] [--frames 17] [--steps 20] [--json FILE]

Two servers run, one for each kind, with `dp` workers of `threads` threads each, all on the first dp * threads cores of this process. A
run sends `dp` requests at once to one of them; its figure is the longest denoising time of the run divided by the steps. Runs alternate,
the first of each is a warm-up, medians are compared. Copies are made by the same cores, so on a CPU they take time from computing: the
ratio can only come near 1 where computing exceeds copying by far. Videos of both servers are compared, too.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(HERE, "tests", "e2e"))
from dlo_api import Api, Server  # noqa: E402


def seconds(duration):
    return duration.seconds + duration.nanos / 1e9


class Side:
    """A server, and what its runs took."""

    def __init__(self, args, transfer, cores, scratch):
        flags = ["--model", args.model, "--dp", str(args.dp), "--threads", str(args.threads), "--transfer", transfer, "--dtype", args.dtype,
                 "--data-dir", os.path.join(scratch, transfer)]
        if transfer != "none":
            flags += ["--slots", str(args.slots)]
        # Children inherit the affinity of the thread that starts them.
        everything = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            self.server = Server(os.path.join(args.build, "bin", "dlo-serve"), flags, {"OMP_NUM_THREADS": str(args.threads)})
        finally:
            os.sched_setaffinity(0, everything)
        self.api = Api(self.server.address)
        self.api.wait_serving()
        self.args, self.step_ms, self.hidden, self.stall_ms, self.bus_bytes, self.digests = args, [], [], [], [], []

    def run(self, keep):
        jobs = [None] * self.args.dp

        def request(i):
            _, jobs[i] = self.api.video(prompt="a green triangle moving up on a black background", output_format="OUTPUT_FORMAT_SAFETENSORS",
                                        settings={"width": self.args.size, "height": self.args.size, "num_frames": self.args.frames,
                                                  "num_inference_steps": self.args.steps, "seed": i})

        threads = [threading.Thread(target=request, args=(i,)) for i in range(self.args.dp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in jobs:
            sys.exit("streaming: a request failed; see above")
        self.digests.append([job.result.sha256 for job in jobs])
        if not keep:
            return
        self.step_ms.append(max(seconds(job.result.times.denoise) for job in jobs) / self.args.steps * 1e3)
        stages = [s for job in jobs for rank in job.result.ranks for s in rank.streaming if s.stage == 3]  # denoising
        for s in stages:
            self.hidden.append(s.hidden_ratio)
            self.stall_ms.append((seconds(s.copy_stall) + seconds(s.gather_stall) + seconds(s.pack_stall)) / self.args.steps * 1e3)
            self.bus_bytes.append(s.bus_bytes / self.args.steps)

    def stop(self):
        self.api.close()
        self.server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(HERE, "build", "release"), help="build folder, with bin/")
    parser.add_argument("--model", default=os.path.join(HERE, "assets", "shapes"))
    parser.add_argument("--transfer", default="rank-local")
    parser.add_argument("--dtype", default="float32")
    for name, default in (("dp", 2), ("threads", 1), ("slots", 2), ("repeats", 5), ("size", 128), ("frames", 17), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="also write the samples to this file")
    args = parser.parse_args()

    cores = set(sorted(os.sched_getaffinity(0))[:args.dp * args.threads])
    if len(cores) < args.dp * args.threads:
        sys.exit(f"streaming: {args.dp} workers of {args.threads} threads need as many cores; {len(cores)} are allowed")
    with tempfile.TemporaryDirectory(prefix="dlo-bench-") as scratch:
        sides = []
        try:
            sides = [Side(args, transfer, cores, scratch) for transfer in ("none", args.transfer)]
            for i in range(args.repeats + 1):
                for side in sides:
                    side.run(keep=i > 0)
        finally:
            for side in sides:
                side.stop()
    resident, streamed = sides
    if resident.digests != streamed.digests:
        sys.exit("streaming: the videos differ")
    ratio = statistics.median(streamed.step_ms) / statistics.median(resident.step_ms)
    for name, side in (("resident", resident), (args.transfer, streamed)):
        print(f"{name:12} {statistics.median(side.step_ms):8.2f} ms a step ({min(side.step_ms):.2f}-{max(side.step_ms):.2f})")
    print(f"ratio {ratio:.3f}, target <= 1.15: {'met' if ratio <= 1.15 else 'MISSED'}; per step and rank {statistics.median(streamed.bus_bytes) / 1e6:.1f} "
          f"MB over the bus, {statistics.median(streamed.stall_ms):.2f} ms waited for, {statistics.median(streamed.hidden):.0%} hidden; "
          "videos are equal")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"resident_step_ms": resident.step_ms, "streamed_step_ms": streamed.step_ms, "ratio": ratio}, f, indent=1)
    sys.exit(ratio > 1.15)


if __name__ == "__main__":
    main()
