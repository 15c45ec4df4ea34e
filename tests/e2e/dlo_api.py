"""A client of dlo-serve that knows nothing of it beforehand: message classes are built from what server reflection tells.

    with Server("build/release/bin/dlo-serve", ["--config", "configs/shapes.yaml"]) as server:
        api = Api(server.address)
        for event in api.generate(prompt="a red circle moving right", settings={"seed": 1}):
            print(event.WhichOneof("event"))

Needs grpcio, grpcio-reflection and grpcio-health-checking (scripts/bootstrap --test puts them into .deps/venv), nothing generated.
"""

import os
import re
import signal
import subprocess
import tempfile
import time

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


class Server:
    """A running dlo-serve in a process of its own. `address` is known once it listens; leaving the block ends it."""

    def __init__(self, binary, args=(), env=None, timeout=30):
        self.log = tempfile.NamedTemporaryFile(prefix="dlo-serve-", suffix=".log")
        self.started = time.monotonic()
        self.process = subprocess.Popen([binary, *args, "--listen", "127.0.0.1:0"], stdout=self.log, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})})
        self.address = self._wait_for_address(timeout)

    def _wait_for_address(self, timeout):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = re.search(r"serving on (\S+:\d+)", self.output())
            if found:
                return found.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.002)
        self.stop()
        raise RuntimeError(f"dlo-serve ended or did not listen within {timeout} s:\n{self.output()}")

    def output(self):
        with open(self.log.name, encoding="utf-8", errors="replace") as f:
            return f.read()

    def pids(self):
        """dlo-serve and the processes below it."""
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as f:
                        waiting += [int(child) for child in f.read().split()]
            except FileNotFoundError:
                pass  # ended meanwhile
        return found

    def stop(self, timeout=30):
        """Asks it to end; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Api:
    """One connection. Messages are classes of the server's own descriptors."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 8 << 20)])
        self.reflection = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = descriptor_pool.DescriptorPool(self.reflection)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def close(self):
        self.channel.close()

    def message(self, full_name):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(full_name))

    def services(self):
        return list(self.reflection.get_services())

    def wait_serving(self, timeout=60):
        """Returns when the health service says SERVING; raises after `timeout` seconds."""
        stream = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
        for response in stream:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                stream.cancel()
                return
        raise RuntimeError("the health stream ended")

    def generate(self, timeout=120, **fields):
        """The call object of VideoGeneration.Generate; iterate over its events. `fields` as in the message's JSON form."""
        return self.stream("Generate", timeout, **fields)

    def timeline(self, job_id, timeout=120):
        """The Chrome trace of a job that was sent with trace."""
        return b"".join(chunk.data for chunk in self.stream("DownloadResult", timeout, id=job_id, timeline=True))

    def stream(self, name, timeout, **fields):
        """The call object of a method that answers with a stream."""
        service = self.pool.FindServiceByName("dlo.v1.VideoGeneration")
        method = service.FindMethodByName(name)
        request = json_format.ParseDict(fields, message_factory.GetMessageClass(method.input_type)(), descriptor_pool=self.pool)
        call = self.channel.unary_stream(f"/{service.full_name}/{method.name}",
                                         request_serializer=lambda m: m.SerializeToString(),
                                         response_deserializer=message_factory.GetMessageClass(method.output_type).FromString)
        return call(request, timeout=timeout)

    def unary(self, name, timeout=30, **fields):
        """The answer of a method with one."""
        service = self.pool.FindServiceByName("dlo.v1.VideoGeneration")
        method = service.FindMethodByName(name)
        request = json_format.ParseDict(fields, message_factory.GetMessageClass(method.input_type)(), descriptor_pool=self.pool)
        call = self.channel.unary_unary(f"/{service.full_name}/{method.name}",
                                        request_serializer=lambda m: m.SerializeToString(),
                                        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString)
        return call(request, timeout=timeout)

    def video(self, **fields):
        """Runs a request to its end: (bytes, last Job)."""
        data, job = bytearray(), None
        for event in self.generate(**fields):
            kind = event.WhichOneof("event")
            if kind == "chunk":
                if event.chunk.offset != len(data):
                    raise RuntimeError(f"chunk at {event.chunk.offset}, expected {len(data)}")
                data += event.chunk.data
            elif kind == "job":
                job = event.job
        return bytes(data), job

    def violations(self, error):
        """{field: description} of the BadRequest in a grpc.RpcError's details; None without one."""
        details = dict(error.trailing_metadata()).get("grpc-status-details-bin")
        if details is None:
            return None
        for any_detail in self.message("google.rpc.Status").FromString(details).details:
            if any_detail.type_url.endswith("/google.rpc.BadRequest"):
                bad = self.message("google.rpc.BadRequest").FromString(any_detail.value)
                return {v.field: v.description for v in bad.field_violations}
        return None
