#!/usr/bin/env python3
"""Runs the same work on diffusers and on us, in turns, on the same cores, and prints how the two compare.

    .deps/venv/bin/python bench/compare.py --reference /tmp/ref/bin/python [--build build/release] [--only request,denoise,text,start,memory]
        [--repeats 5] [--threads 2] [--json FILE]

REFERENCE is a Python with diffusers (tests/goldens/README.md). Both halves may use the same cores and as many threads; runs alternate
(theirs, ours, theirs, ...), the first of each is a warm-up, medians are compared. What is measured:

request   a video on the demo model (128x128, 17 frames, 20 steps, guidance 5). Ours: dlo-serve and its worker, from the gRPC call to the last
          byte of the MP4 at the client. Theirs: WanPipeline's call in a warm process, to frames as a numpy array (no video encoding). Processor
          time, the steadier figure on a busy machine, is that of all processes of a side.
denoise   a step of a transformer as wide as Wan 2.1 1.3B (8 layers, 1,500 tokens, random weights), with and without guidance, in the
          middle of a request. The results of all steps are compared too.
text      a prompt of 20 tokens through a UMT5 of 8 layers, 1024 wide (theirs: padded to 512 rows, as WanPipeline does).
start     from starting the process to SERVING on the demo model, after one start that fills the page cache. Theirs, for comparison: from
          starting Python to a loaded pipeline.
memory    peak resident memory over the requests of `request`. Ours: VmHWM of dlo-serve and dlo-worker summed (libraries that both
          map count twice), and beside it the largest proportional set size seen. Theirs: VmHWM of the process.
"""

import argparse
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(HERE, "tests", "e2e"))
from dlo_api import Api, Server  # noqa: E402

REQUEST = {"prompt": "a green triangle moving up on a black background", "width": 128, "height": 128, "num_frames": 17,
           "num_inference_steps": 20, "guidance_scale": 5.0, "seed": 2}
NAMES = {"F32": "float32", "BF16": "bfloat16"}
GIB = 1 << 30


class Half:
    """One side of a comparison: a process that answers a line for a line."""

    def __init__(self, argv, cores):
        self.started = time.perf_counter()
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                        env=environment(cores), preexec_fn=lambda: os.sched_setaffinity(0, cores))
        if self.process.stdout.readline().strip() != "ready":
            sys.exit(f"compare: {' '.join(argv)} ended with code {self.process.wait()}; run it by hand to see why")
        self.seconds_to_ready = time.perf_counter() - self.started

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer:
            sys.exit(f"compare: the process of {self.process.args} ended with code {self.process.wait()}")
        return answer

    def run(self, argument=""):
        return float(self.ask(f"run {argument}".strip()))

    def pids(self):
        return [self.process.pid]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def environment(cores):
    return {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1"}


class Samples:
    """Seconds of one side's runs by the clock, and of the processors of its processes (`pids` a function)."""

    def __init__(self, run, pids=lambda: []):
        self.run, self.pids, self.seconds, self.cpu = run, pids, [], []

    def take(self, keep):
        cpu = cpu_seconds(self.pids())
        seconds = self.run()
        if keep:
            self.seconds.append(seconds)
            self.cpu.append(cpu_seconds(self.pids()) - cpu)


def alternate(theirs, ours, repeats):
    for i in range(repeats + 1):
        for side in (theirs, ours):
            side.take(keep=i > 0)


def cpu_seconds(pids):
    """User and system time of the processes so far."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as f:
            ticks += sum(int(n) for n in f.read().rsplit(")", 1)[1].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def read_floats(path, name):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        begin, end = header[name]["data_offsets"]
        f.seek(begin, 1)
        return struct.unpack(f"<{(end - begin) // 4}f", f.read(end - begin))


def relative_difference(a, b):
    """Root mean square of the difference over that of the reference."""
    if len(a) != len(b):
        sys.exit(f"compare: results of {len(a)} and {len(b)} values")
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a)) ** 0.5


class Memory(threading.Thread):
    """Peaks over all processes of a server: of each one's resident set, summed; and of the proportional set size of all."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.pss_peak, self.done = server, 0, threading.Event()

    def run(self):
        while not self.done.wait(0.1):
            self.pss_peak = max(self.pss_peak, sum(field(p, "smaps_rollup", "Pss:") for p in self.server.pids()))

    def finish(self):
        self.done.set()
        self.join()
        return sum(field(p, "status", "VmHWM:") for p in self.server.pids()), self.pss_peak


def field(pid, name, key):
    try:
        with open(f"/proc/{pid}/{name}") as f:
            return next((int(line.split()[1]) * 1024 for line in f if line.startswith(key)), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Comparison:
    def __init__(self, args):
        self.args = args
        self.cores = set(sorted(os.sched_getaffinity(0))[:args.threads])
        if len(self.cores) < args.threads:
            sys.exit(f"compare: {args.threads} threads asked for, {len(self.cores)} cores allowed")
        self.scratch = tempfile.TemporaryDirectory(prefix="dlo-bench-")
        self.data = args.data or self.scratch.name + "/data"
        self.rows = []

    def row(self, what, unit, theirs, ours, target, target_is_ratio=True, note=""):
        """`theirs` and `ours` are numbers or lists of samples."""
        theirs, ours = ([v] if isinstance(v, (int, float)) else v for v in (theirs, ours))
        middle = [statistics.median(v) for v in (theirs, ours)]
        value = middle[1] / middle[0] if target_is_ratio else middle[1]
        self.rows.append({"what": what, "unit": unit, "diffusers": middle[0], "ours": middle[1], "ratio": middle[1] / middle[0],
                          "target": f"{'ratio' if target_is_ratio else unit} <= {target}", "met": value <= target,
                          "diffusers_samples": theirs, "ours_samples": ours, "note": note})
        print(format_row(self.rows[-1]), flush=True)

    def time_row(self, what, theirs, ours, target, note=""):
        cpu = [statistics.median(side.cpu) for side in (theirs, ours)]
        self.row(what, "s", theirs.seconds, ours.seconds, target,
                 note=f"processor time {cpu[0]:.2f} s and {cpu[1]:.2f} s, ratio {cpu[1] / max(cpu[0], 1e-9):.3f}{note}")

    def reference(self, *argv):
        return Half([self.args.reference, os.path.join(HERE, "bench", "reference_worker.py"), *map(str, argv)], self.cores)

    def bench_components(self, *argv):
        return Half([os.path.join(self.args.build, "bin", "bench_components"), *map(str, argv)], self.cores)

    def serve(self, dtype):
        data = tempfile.mkdtemp(dir=self.scratch.name)
        # Children inherit the affinity of the thread that starts them.
        everything = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            return Server(os.path.join(self.args.build, "bin", "dlo-serve"),
                          ["--model", self.args.model, "--dtype", NAMES[dtype], "--threads", str(self.args.threads), "--data-dir", data],
                          environment(self.cores))
        finally:
            os.sched_setaffinity(0, everything)

    def request(self, with_memory):
        settings = {k: v for k, v in REQUEST.items() if k != "prompt"}
        for dtype in self.args.dtypes:
            theirs = self.reference("request", self.args.model, dtype, self.args.threads)
            with self.serve(dtype) as server:
                api = Api(server.address)
                api.wait_serving()
                memory = Memory(server)
                if with_memory:
                    memory.start()

                def ours():
                    start = time.perf_counter()
                    data, _ = api.video(prompt=REQUEST["prompt"], settings=settings)
                    assert data[4:8] == b"ftyp"
                    return time.perf_counter() - start

                sides = Samples(lambda: theirs.run(json.dumps(REQUEST)), theirs.pids), Samples(ours, server.pids)
                alternate(*sides, self.args.repeats)
                self.time_row(f"whole request, demo model, {NAMES[dtype]}", *sides, 0.8)
                if with_memory:
                    hwm, pss = memory.finish()
                    peak = int(theirs.ask("memory"))
                    self.row(f"peak resident memory, {NAMES[dtype]}", "GiB", peak / GIB, hwm / GIB, 0.6,
                             note=f"proportional set size at most {pss / GIB:.3f} GiB")
                api.close()
            theirs.close()

    def prepare(self):
        if not os.path.exists(self.data + "/inputs.safetensors"):
            os.makedirs(self.data, exist_ok=True)
            subprocess.run([self.args.reference, os.path.join(HERE, "bench", "reference_worker.py"), "prepare", self.data], check=True,
                           stderr=subprocess.DEVNULL)

    def component(self, what, theirs, ours, repeats, target):
        # Both are loaded; the one that waits holds no core.
        sides = [Samples(half.run, half.pids) for half in (theirs, ours)]
        alternate(*sides, repeats)
        results = []
        for half, name in ((theirs, "theirs"), (ours, "ours")):
            path = f"{self.scratch.name}/{name}.safetensors"
            half.ask("save " + path)
            results.append(read_floats(path, "result"))
            half.close()
        self.time_row(what, *sides, target, note=f"; results differ by {relative_difference(*results):.1e} of their size")

    def denoise(self):
        self.prepare()
        inputs = self.data + "/inputs.safetensors"
        for dtype in self.args.dtypes:
            for branches in (1, 2):
                self.component(f"denoise step, {NAMES[dtype]}, {'with' if branches == 2 else 'no'} guidance",
                               self.reference("denoise", self.data, dtype, self.args.threads, branches),
                               self.bench_components("denoise", self.data + "/denoise", inputs, dtype, self.args.threads, branches),
                               self.args.repeats, 1.0)

    def text(self):
        self.prepare()
        inputs = self.data + "/inputs.safetensors"
        for dtype in self.args.dtypes:
            self.component(f"text encoding, 20 tokens, {NAMES[dtype]}", self.reference("text", self.data, dtype, self.args.threads),
                           self.bench_components("text", self.data + "/text", inputs, dtype, self.args.threads), 2 * self.args.repeats, 0.2)

    def start(self):
        def ours():
            with self.serve(self.args.dtypes[0]) as server:
                api = Api(server.address)
                api.wait_serving()
                seconds = time.monotonic() - server.started
                api.close()
            return seconds

        def theirs():
            half = self.reference("request", self.args.model, self.args.dtypes[0], self.args.threads)
            half.close()
            return half.seconds_to_ready

        sides = Samples(theirs), Samples(ours)
        alternate(*sides, self.args.repeats)
        self.row(f"process start to SERVING, demo model, {NAMES[self.args.dtypes[0]]}", "s", *(side.seconds for side in sides), 1.0,
                 target_is_ratio=False)


LINE = "{:45} {:>25} {:>25} {:4} {:>6}  {:13} {:6} {}"


def format_row(r):
    def figure(middle, samples):
        return f"{middle:.3f}" + (f" ({min(samples):.3f}-{max(samples):.3f})" if len(samples) > 1 else "")
    return LINE.format(r["what"], figure(r["diffusers"], r["diffusers_samples"]), figure(r["ours"], r["ours_samples"]), r["unit"],
                       f"{r['ratio']:.3f}", r["target"], "met" if r["met"] else "MISSED", r["note"]).rstrip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", required=True, help="a Python with diffusers")
    parser.add_argument("--build", default=os.path.join(HERE, "build", "release"), help="build folder, with bin/")
    parser.add_argument("--model", default=os.path.join(HERE, "assets", "shapes"), help="the demo model's repository")
    parser.add_argument("--only", default="request,denoise,text,start,memory", help="comma-separated")
    parser.add_argument("--dtypes", default="F32,BF16", help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", help="keep the random weights of denoise and text (1 GB) here")
    parser.add_argument("--json", help="also write rows with all samples to this file")
    args = parser.parse_args()
    args.dtypes = args.dtypes.split(",")
    only = args.only.split(",")
    unknown = set(only) - {"request", "denoise", "text", "start", "memory"}
    if unknown or set(args.dtypes) - set(NAMES):
        parser.error("known: --only request,denoise,text,start,memory and --dtypes F32,BF16")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    comparison = Comparison(args)
    print(f"cores {sorted(comparison.cores)}, {args.threads} threads a side, median of {args.repeats} after a warm-up, in turns\n")
    print(LINE.format("median (range)", "diffusers", "ours", "", "ratio", "target", "", "").rstrip())
    if "start" in only:
        comparison.start()
    if "request" in only or "memory" in only:
        comparison.request(with_memory="memory" in only)
    if "text" in only:
        comparison.text()
    if "denoise" in only:
        comparison.denoise()
    if args.json:
        with open(args.json, "w") as f:
            json.dump(comparison.rows, f, indent=1)
    sys.exit(not all(r["met"] for r in comparison.rows))


if __name__ == "__main__":
    main()
