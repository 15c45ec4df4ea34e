#!/usr/bin/env python3
"""What a start costs and what its weights weigh, by where they come from: one table.

    .deps/venv/bin/python bench/warm_start.py [--build build/release] [--dp 4] [--scratch FOLDER] [--blocks 30] [--repeats 1]
        [--reference-python DIR/python] [--json FILE]

Makes a repository of the shape of Wan 2.1 1.3B whose transformer is stored as float32 (5.7 GB; `--blocks` makes it smaller), the same numbers
stored as bfloat16, and a store of host weights, in a new folder below `--scratch`, which it removes. Everything runs in bfloat16 on `dp`
rank-local workers. Text encoder and VAE are tiny. The rows:

    ordinary cold   the checkpoint read from the disk into private memory of each worker
    ordinary        the same from the page cache
    publication     the same with an empty store: one worker writes the artifact before it is ready
    warm cold       from the artifact, read from the disk
    warm            from the artifact in the page cache, with host_weights.mode required
    mapping         blocks in the pages of the bfloat16 checkpoint, cached

For each: seconds from the start of dlo-serve to SERVING (its first worker is ready) and until all workers are; the proportional set sizes of
all workers together after each has run a request, and how many copies of the weights that makes, less what the workers have without (measured with a
transformer of one block): of what is in an artifact, from one; of the streamed blocks, which are all that a mapping holds, from a mapping, where the
tensors outside the blocks are the workers' own; the share of checkpoint and artifact that is in the page cache before the start and after the requests
(mincore); bytes that a worker read, mapped, has on the device at most, and copied to it in a request; whether the video is that of the first row.

With `--reference-python` (of ../shared/tools/reference-env) diffusers loads the same repository once, in the same dtype, from the page cache.

Exits with 1 unless videos are equal, sums from pages of a file are at most 1.05 copies and the workers without, and the warm start needs at
most a quarter of the time of the ordinary one, both with the page cache warm.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
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

TINY = os.path.join(HERE, "tests", "goldens", "pipelines", "wan21", "repo")
INNER, FFN = 1536, 8960
RUN_BYTES = {"BF16": 2, "F32": 4}


class Numbers:
    """Floats between 2^-7 and 2^-6 or their negatives that bfloat16 holds exactly."""

    def __init__(self):
        words = 4 << 20
        bits = int.from_bytes(os.urandom(2 * words), "little")
        ones = int.from_bytes(b"\x01\x00" * words, "little")
        as_bf16 = ((bits & (ones * 0x807F)) | (ones * 0x3C00)).to_bytes(2 * words, "little")
        as_f32 = bytearray(4 * words)
        as_f32[2::4], as_f32[3::4] = as_bf16[0::2], as_bf16[1::2]
        self.words, self.bytes = words, {"BF16": memoryview(as_bf16), "F32": memoryview(as_f32)}

    def write(self, out, dtype, count, first):
        """`count` of them from a place that `first` names."""
        size, place = RUN_BYTES[dtype], first % self.words
        while count > 0:
            chunk = min(count, self.words - place)
            out.write(self.bytes[dtype][place * size:(place + chunk) * size])
            count, place = count - chunk, 0


def read_header(path):
    with open(path, "rb") as f:
        return json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))


def full_shape(name, shape):
    scaled = [{32: INNER, 40: FFN, 192: 6 * INNER}.get(d, d) for d in shape]
    if name == "condition_embedder.text_embedder.linear_1.weight":
        scaled[1] = shape[1]  # the text encoder is tiny
    return scaled


def write_repository(folder, blocks, dtype, numbers):
    """The tiny repository with a transformer of the full shape; returns the bytes that its blocks take in a run."""
    shutil.copytree(TINY, folder)
    for base, _, files in os.walk(folder):
        for file in files:
            os.chmod(os.path.join(base, file), 0o644)
    path = os.path.join(folder, "transformer", "config.json")
    with open(path) as f:
        config = json.load(f)
    config.update(attention_head_dim=128, num_attention_heads=INNER // 128, ffn_dim=FFN, num_layers=blocks)
    with open(path, "w") as f:
        json.dump(config, f)
    path = os.path.join(folder, "transformer", "diffusion_pytorch_model.safetensors")
    shapes = {}
    for name, entry in read_header(path).items():
        if name == "__metadata__" or name.startswith("blocks.1."):
            continue
        for b in range(blocks) if name.startswith("blocks.0.") else [0]:
            shapes[name.replace("blocks.0.", f"blocks.{b}.")] = full_shape(name, entry["shape"])
    header, end = {}, 0
    counts = {}
    for name, shape in shapes.items():
        counts[name] = 1
        for d in shape:
            counts[name] *= d
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + counts[name] * RUN_BYTES[dtype]]}
        end += counts[name] * RUN_BYTES[dtype]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for i, name in enumerate(shapes):
            numbers.write(out, dtype, counts[name], i * 65_537)
        out.flush()
        os.fsync(out.fileno())


def files_below(folder):
    return [os.path.join(base, name) for base, _, names in os.walk(folder) for name in names if name.endswith((".safetensors", ".bin"))]


def cached_share(folder):
    """Of the weight files' pages, how many are in the page cache; None without files."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = resident = 0
    for path in files_below(folder):
        size = os.path.getsize(path)
        if size == 0:
            continue
        fd = os.open(path, os.O_RDONLY)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        count = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        vector = ctypes.create_string_buffer(count)
        if libc.mincore(address, size, vector) != 0:
            sys.exit(f"warm_start: mincore of {path}: {os.strerror(ctypes.get_errno())}")
        libc.munmap(address, size)
        pages, resident = pages + count, resident + sum(b & 1 for b in vector.raw[:count])
    return resident / pages if pages else None


def drop_cache(*folders):
    """Takes the weight files out of the page cache; nobody may have them mapped."""
    os.sync()
    for folder in folders:
        for path in files_below(folder):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def fill_cache(*folders):
    for folder in folders:
        for path in files_below(folder):
            with open(path, "rb", buffering=0) as f:
                while f.read(8 << 20):
                    pass


def pss_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("Pss:"))


class Start:
    """One start of dlo-serve, some requests, and its end."""

    def __init__(self, args, name, repository, flags, scratch, store=None):
        self.name = name
        watched = {"checkpoint": repository, **({"artifact": os.path.join(store, "artifacts")} if store else {})}
        self.cached_before = {kind: cached_share(folder) for kind, folder in watched.items()}
        data = tempfile.mkdtemp(prefix="data-", dir=scratch)
        command = ["--model", repository, "--dp", str(args.dp), "--transfer", "rank-local", "--dtype", "bfloat16", "--data-dir", data, *flags]
        if store:
            command += ["--host-weights-root", store]
        self.server = Server(os.path.join(args.build, "bin", "dlo-serve"), command, {"OMP_NUM_THREADS": "1"}, timeout=600)
        self.serving_s = time.monotonic() - self.server.started
        self.api = Api(self.server.address)
        try:
            self.ranks = self.wait_all(args.dp)
            self.all_s = time.monotonic() - self.server.started
            # Twice: in the first round a worker may have got two.
            jobs = [job for _ in range(2) for job in self.round(args.dp)]
            self.digests = {job.result.sha256 for job in jobs}
            usage = [rank for job in jobs for rank in job.result.ranks]
            self.device_bytes = max(rank.device_bytes_peak for rank in usage)
            self.bus_bytes = max(rank.bus_bytes for rank in usage)
            workers = [pid for pid in self.server.pids() if pid != self.server.process.pid]
            self.pss = sum(pss_bytes(pid) for pid in workers)
            self.cached_after = {kind: cached_share(folder) for kind, folder in watched.items()}
        finally:
            self.api.close()
            code = self.server.stop(timeout=60)
        if code != 0:
            sys.exit(f"warm_start: dlo-serve ended with {code}:\n{self.server.output()}")

    def wait_all(self, dp):
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            status = self.api.unary("GetStatus")
            if sum(rank.ready for rank in status.ranks) == dp:
                return list(status.ranks)
            time.sleep(0.01)
        sys.exit(f"warm_start: not all workers became ready:\n{self.server.output()}")

    def round(self, dp):
        jobs = [None] * dp

        def request(i):
            _, jobs[i] = self.api.video(prompt="a square", output_format="OUTPUT_FORMAT_SAFETENSORS",
                                        settings={"width": 16, "height": 16, "num_frames": 1, "num_inference_steps": 2, "guidance_scale": 1,
                                                  "seed": 1})

        threads = [threading.Thread(target=request, args=(i,)) for i in range(dp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in jobs:
            sys.exit(f"warm_start: a request failed:\n{self.server.output()}")
        return jobs

    def outcome(self):
        return "/".join(sorted({rank.startup.outcome for rank in self.ranks}))

    def phases(self):
        """Of the slowest worker."""
        slowest = max(self.ranks, key=lambda rank: rank.startup.duration.ToMicroseconds())
        return {phase.phase: phase.time.ToMicroseconds() / 1e6 for phase in slowest.startup.phases if phase.time.ToMicroseconds() > 0}


DIFFUSERS = """
import sys, time, torch
started = time.monotonic()
from diffusers import WanPipeline
imported = time.monotonic()
WanPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16)
loaded = time.monotonic()
pss = next(int(line.split()[1]) << 10 for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
print(imported - started, loaded - imported, pss)
"""


def time_diffusers(python, repository):
    started = time.monotonic()
    run = subprocess.run([python, "-c", DIFFUSERS, repository], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"warm_start: diffusers cannot load the repository:\n{run.stderr}")
    imports, load, pss = run.stdout.split()[-3:]
    return {"process_s": time.monotonic() - started, "import_s": float(imports), "load_s": float(load), "pss": int(pss)}


def percent(shares):
    return " ".join(f"{kind[0]}:{'-' if share is None else f'{share:.0%}'}" for kind, share in shares.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(HERE, "build", "release"), help="build folder, with bin/")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="on a disk with 15 GB of room")
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=1, help="of ordinary and warm, of which medians are compared")
    parser.add_argument("--reference-python", help="a Python with diffusers")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()

    scratch = tempfile.mkdtemp(prefix="dlo-warm-start-", dir=args.scratch)
    try:
        run(args, scratch)
    finally:
        shutil.rmtree(scratch)


def run(args, scratch):
    numbers = Numbers()
    stored_f32, stored_bf16, single, single_bf16 = (os.path.join(scratch, name) for name in ("float32", "bfloat16", "single", "single-bfloat16"))
    write_repository(stored_f32, args.blocks, "F32", numbers)
    write_repository(stored_bf16, args.blocks, "BF16", numbers)
    write_repository(single, 1, "F32", numbers)
    write_repository(single_bf16, 1, "BF16", numbers)
    store = os.path.join(scratch, "store")

    def start(name, repository, flags=(), with_store=False):
        row = Start(args, name, repository, list(flags), scratch, store if with_store else None)
        print(f"{name}: {row.serving_s:.2f} s to SERVING, {row.all_s:.2f} s until all are ready", file=sys.stderr)
        return row

    def mode(name):
        return ["--host-weights-mode", name]

    # What a worker has beside the model's weights.
    start("(one block, to publish)", single, mode("preferred"), True)
    empty = start("(one block)", single, mode("required"), True)
    artifact_bytes = sum(os.path.getsize(path) for path in files_below(os.path.join(store, "artifacts")))
    empty_pss = empty.pss - artifact_bytes
    shutil.rmtree(store)
    fill_cache(single_bf16)
    empty = start("(one block, mapped)", single_bf16)
    empty_mapped_pss = empty.pss - empty.ranks[0].startup.mapped_bytes

    rows = []
    drop_cache(stored_f32)
    rows.append(start("ordinary cold", stored_f32))
    fill_cache(stored_f32)
    ordinary = [start("ordinary", stored_f32) for _ in range(args.repeats)]
    rows.append(ordinary[-1])
    rows.append(start("publication", stored_f32, mode("preferred"), True))
    drop_cache(store)
    rows.append(start("warm cold", stored_f32, mode("required"), True))
    warm = [start("warm", stored_f32, mode("required"), True) for _ in range(args.repeats)]
    rows.append(warm[-1])
    artifact_bytes = sum(os.path.getsize(path) for path in files_below(os.path.join(store, "artifacts")))
    shutil.rmtree(store)
    fill_cache(stored_bf16)
    mapping = start("mapping", stored_bf16)  # the tiny text encoder is stored as float32
    rows.append(mapping)
    mapped_bytes = mapping.ranks[0].startup.mapped_bytes

    mb = 1e6
    print(f"{args.dp} workers, {os.cpu_count()} cores; checkpoint {sum(map(os.path.getsize, files_below(stored_f32))) / mb:.0f} MB float32, one copy as it "
          f"runs {artifact_bytes / mb:.0f} MB, of which streamed {mapped_bytes / mb:.0f} MB; {args.dp} workers without it {empty_pss / mb:.0f} MB, without the "
          f"streamed part in a mapping {empty_mapped_pss / mb:.0f} MB")
    print(f"{'start':14} {'outcome':20} {'SERVING s':>9} {'all s':>7} {'PSS MB':>8} {'copies':>7} {'read MB':>8} {'mapped MB':>9} {'device MB':>9} "
          f"{'bus MB':>8}  cached before; after        video")
    failures = []
    for row in rows:
        same = row.digests == rows[0].digests and len(row.digests) == 1
        copy_bytes, without = (mapped_bytes, empty_mapped_pss) if row is mapping else (artifact_bytes, empty_pss)
        copies = (row.pss - without) / copy_bytes
        bound = 1.05 * copy_bytes + without
        startup = row.ranks[0].startup
        print(f"{row.name:14} {row.outcome():20} {row.serving_s:9.2f} {row.all_s:7.2f} {row.pss / mb:8.0f} {copies:7.2f} {startup.read_bytes / mb:8.0f} "
              f"{startup.mapped_bytes / mb:9.0f} {row.device_bytes / mb:9.1f} {row.bus_bytes / mb:8.0f}  {percent(row.cached_before)}; "
              f"{percent(row.cached_after)}   {'equal' if same else 'DIFFERS'}")
        print(f"{'':14} {' '.join(f'{name} {seconds:.3f}' for name, seconds in row.phases().items())}")
        if not same:
            failures.append(f"{row.name}: the video differs")
        if row.name in ("warm", "warm cold", "mapping") and row.pss > bound:
            failures.append(f"{row.name}: {row.pss / mb:.0f} MB, more than {bound / mb:.0f} MB")
    diffusers = None
    if args.reference_python:
        fill_cache(stored_f32)
        diffusers = time_diffusers(args.reference_python, stored_f32)
        print(f"{'diffusers':14} {'one process':20} load {diffusers['load_s']:.2f} s, with imports {diffusers['process_s']:.2f} s; "
              f"PSS {diffusers['pss'] / mb:.0f} MB")
    ratio = statistics.median(r.serving_s for r in warm) / statistics.median(r.serving_s for r in ordinary)
    ratio_all = statistics.median(r.all_s for r in warm) / statistics.median(r.all_s for r in ordinary)
    print(f"warm / ordinary, page cache warm: {ratio:.3f} to SERVING, {ratio_all:.3f} until all are ready (target <= 0.25)")
    if ratio > 0.25:
        failures.append("the warm start is too slow")
    print("; ".join(failures) if failures else "all targets met")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"rows": [{"name": r.name, "outcome": r.outcome(), "serving_s": r.serving_s, "all_s": r.all_s, "pss": r.pss,
                                 "device_bytes": r.device_bytes, "bus_bytes": r.bus_bytes, "cached_before": r.cached_before,
                                 "cached_after": r.cached_after, "phases": r.phases()} for r in rows],
                       "empty_pss": empty_pss, "copy_bytes": artifact_bytes, "empty_mapped_pss": empty_mapped_pss, "mapped_bytes": mapped_bytes,
                       "ratio": ratio, "diffusers": diffusers}, f, indent=1)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
