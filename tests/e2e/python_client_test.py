#!/usr/bin/env python3
"""The public API as somebody with gRPC and nothing of ours sees it: reflection, health, events, errors, cancellation, a lost worker.

    .deps/venv/bin/python tests/e2e/python_client_test.py build/release/bin/dlo-serve configs/shapes.yaml
"""

import hashlib
import os
import signal
import sys
import tempfile
import time
import unittest

import grpc
from dlo_api import Api, Server
from grpc_health.v1 import health_pb2

PROMPT = "a red circle moving right on a black background"
FAST = {"num_inference_steps": 4, "seed": 3}


class PythonClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.data = tempfile.TemporaryDirectory(prefix="dlo-test-")
        cls.server = Server(BINARY, ["--config", CONFIG, "--data-dir", cls.data.name])
        cls.addClassCleanup(cls.server.stop)
        cls.api = Api(cls.server.address)
        cls.addClassCleanup(cls.api.close)
        cls.api.wait_serving()

    def assert_refused(self, code, **fields):
        with self.assertRaises(grpc.RpcError) as raised:
            list(self.api.generate(**fields))
        self.assertEqual(raised.exception.code(), code, raised.exception.details())
        return raised.exception

    def test_reflection_lists_the_services(self):
        self.assertLessEqual({"dlo.v1.VideoGeneration", "grpc.health.v1.Health"}, set(self.api.services()))

    def test_health_answers_for_the_server_and_the_service(self):
        for service in ("", "dlo.v1.VideoGeneration"):
            answer = self.api.health.Check(health_pb2.HealthCheckRequest(service=service))
            self.assertEqual(answer.status, health_pb2.HealthCheckResponse.SERVING, service)
        with self.assertRaises(grpc.RpcError) as raised:
            self.api.health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        self.assertEqual(raised.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_events_tell_the_whole_request(self):
        steps, states, data, jobs = [], [], bytearray(), []
        for event in self.api.generate(request_id="my-video", prompt=PROMPT, settings=FAST):
            kind = event.WhichOneof("event")
            if kind == "progress":
                steps.append(event.progress.step)
                self.assertEqual(event.progress.num_steps, 4)
            elif kind == "chunk":
                self.assertEqual(event.chunk.offset, len(data))
                self.assertLessEqual(len(event.chunk.data), 1 << 20)
                data += event.chunk.data
            else:
                jobs.append(event.job)
                states.append(type(event.job).DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number[event.job.state].name)
        self.assertEqual([s for s in steps if s > 0], [1, 2, 3, 4])
        order = ["JOB_STATE_QUEUED", "JOB_STATE_ADMITTED", "JOB_STATE_ENCODING_TEXT", "JOB_STATE_DENOISING", "JOB_STATE_DECODING",
                 "JOB_STATE_SUCCEEDED"]
        self.assertEqual(sorted(set(states), key=order.index), sorted(set(states), key=states.index), "states in order")
        self.assertEqual(states[-1], "JOB_STATE_SUCCEEDED")
        for job in jobs:
            self.assertEqual(job.id, "my-video")
        settings, result = jobs[-1].settings, jobs[-1].result
        self.assertEqual((settings.width, settings.height, settings.num_frames, settings.fps), (128, 128, 17, 8))
        self.assertEqual((settings.guidance_scale, settings.flow_shift, settings.solver, settings.seed), (5, 3, "unipc", 3))
        self.assertEqual(result.size_bytes, len(data))
        self.assertEqual(result.sha256, hashlib.sha256(data).hexdigest())
        self.assertEqual(result.media_type, "video/mp4")
        self.assertEqual(data[4:8], b"ftyp")
        self.assertGreater(result.times.denoise.ToTimedelta().total_seconds(), 0)
        self.assertGreater(result.ranks[0].host_bytes_peak, 10 << 20)

    def test_equal_requests_give_equal_bytes_and_seeds_differ(self):
        request = {"prompt": PROMPT, "settings": FAST, "output_format": "OUTPUT_FORMAT_SAFETENSORS"}
        first, _ = self.api.video(**request)
        again, _ = self.api.video(**request)
        other, _ = self.api.video(**{**request, "settings": {**FAST, "seed": 4}})
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_validate_only_forecasts_and_runs_nothing(self):
        request = {"prompt": PROMPT, "settings": FAST}
        _, ran = self.api.video(**request)
        events = list(self.api.generate(validate_only=True, request_id="asked", **request))
        self.assertEqual(len(events), 1)
        job = events[0].job
        self.assertEqual((job.id, job.settings), ("", ran.settings))
        self.assertFalse(ran.HasField("forecast"))
        forecast = job.forecast
        self.assertEqual([(run.component, run.passes) for run in forecast.plan], [("text_encoder", 2), ("transformer", 4)])
        self.assertEqual((forecast.transfer, forecast.bus_bytes), ("none", 0))
        self.assertGreater(forecast.denoise_flops, 0)
        self.assertGreater(forecast.run_time.ToTimedelta().total_seconds(), 0)

    def test_an_unset_seed_is_chosen_and_reported(self):
        settings = {"num_inference_steps": 1}
        seeds = {self.api.video(prompt=PROMPT, settings=settings)[1].settings.seed for _ in range(2)}
        self.assertEqual(len(seeds), 2)

    def test_every_wrong_field_is_named(self):
        error = self.assert_refused(grpc.StatusCode.INVALID_ARGUMENT, prompt="",
                                    settings={"height": 130, "num_inference_steps": 0, "solver": "heun", "fps": -1})
        violations = self.api.violations(error)
        self.assertLessEqual({"settings.height", "settings.num_inference_steps", "settings.solver", "settings.fps"}, set(violations))
        self.assertIn("130", violations["settings.height"])
        self.assertIn("heun", violations["settings.solver"])

    def test_unknown_extra_keys_and_bad_ids_are_refused(self):
        error = self.assert_refused(grpc.StatusCode.INVALID_ARGUMENT, prompt=PROMPT, request_id="no spaces", extra={"wings": 2})
        violations = self.api.violations(error)
        self.assertIn("request_id", violations)
        self.assertTrue(any("wings" in field + text for field, text in violations.items()), violations)

    def test_a_cancelled_request_stops_and_the_next_one_runs(self):
        call = self.api.generate(prompt=PROMPT, settings={"num_inference_steps": 1000, "seed": 1})
        for event in call:
            if event.WhichOneof("event") == "progress" and event.progress.step >= 2:
                break
        call.cancel()
        started = time.monotonic()
        _, job = self.api.video(prompt=PROMPT, settings={"num_inference_steps": 1, "seed": 1})
        self.assertEqual(job.settings.num_inference_steps, 1)
        self.assertLess(time.monotonic() - started, 30, "the worker went on with the cancelled request")

    def test_a_lost_worker_fails_its_request_and_is_replaced(self):
        with Server(BINARY, ["--config", CONFIG, "--data-dir", self.data.name + "/lost"]) as server:
            api = Api(server.address)
            api.wait_serving()
            worker = next(pid for pid in server.pids() if pid != server.process.pid)
            call = api.generate(prompt=PROMPT, settings={"num_inference_steps": 1000})
            with self.assertRaises(grpc.RpcError) as raised:
                for event in call:
                    if event.WhichOneof("event") == "progress" and event.progress.step == 1:
                        os.kill(worker, signal.SIGKILL)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNAVAILABLE, raised.exception.details())
            self.assertTrue(raised.exception.details())
            api.wait_serving()
            data, _ = api.video(prompt=PROMPT, settings={"num_inference_steps": 1})
            self.assertEqual(data[4:8], b"ftyp")
            self.assertNotIn(worker, server.pids())
            self.assertEqual(server.stop(), 0, server.output())
            api.close()


if __name__ == "__main__":
    BINARY, CONFIG = sys.argv.pop(1), sys.argv.pop(1)
    unittest.main(verbosity=2)
