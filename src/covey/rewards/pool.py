"""Processes that run reward functions, each of which can be killed: a hang ends its worker, not the training.

One thread starts the workers, hands out jobs, watches deadlines and replaces what died. A job is some responses to one
prompt under one function; results come back one response at a time, so it is known which response a worker was busy
with when its time ran out: that one is a timeout, and the rest of the job goes to another worker.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from covey.rewards.execute import FunctionSpec, Outcome

log = logging.getLogger(__name__)

GRACE_S = 1.0  # between the soft limit inside the worker and the kill
START_LIMIT_S = 300.0  # a reward file may import much
_MAX_FAILED_STARTS = 3


@dataclass
class _Job:
    index: int  # of the function's spec
    responses: list[str]
    row: dict[str, Any]
    extras: list[dict[str, Any]]
    future: Future[list[Outcome]]
    outcomes: list[Outcome | None] = field(default_factory=list)

    def missing(self) -> list[int]:
        return [i for i, outcome in enumerate(self.outcomes) if outcome is None]


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    link: connection.Connection
    deadline: float
    ready: bool = False
    job: _Job | None = None
    positions: list[int] = field(default_factory=list)  # places in the job of the responses it was sent


class Pool:
    """Scores jobs in `num_workers` processes. Thread-safe; close() it."""

    def __init__(self, specs: list[FunctionSpec], num_workers: int) -> None:
        """Start the workers without waiting for them; see ready()."""
        self._specs = specs
        self._num_workers = num_workers
        self._queue: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._started: Future[list[tuple[str, bool]]] = Future()
        self._failed_starts = 0
        self._closing = False
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()

    def ready(self) -> list[tuple[str, bool]]:
        """(form, is_async) of every function, once a worker has loaded them; ValueError when one cannot be."""
        return self._started.result()

    def submit(
        self, index: int, responses: list[str], row: dict[str, Any], extras: list[dict[str, Any]]
    ) -> Future[list[Outcome]]:
        """Score `responses` with function `index`; the future's outcomes are in their order."""
        job = _Job(index, responses, row, extras, Future(), [None] * len(responses))
        with self._lock:
            self._queue.append(job)
        self._wake()
        return job.future

    def close(self) -> None:
        """Kill the workers. Jobs that are not finished never are. Closing twice is once."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except BlockingIOError:
            return  # the buffer is full of wake-ups already

    def _serve(self) -> None:
        try:
            while not self._closing:
                while len(self._workers) < self._num_workers and not self._started_badly():
                    self._workers.append(self._start())
                self._hand_out()
                now = time.monotonic()
                deadlines = [w.deadline for w in self._workers if w.job or not w.ready]
                wait_s = max(0.0, min(deadlines) - now) if deadlines else None
                for source in connection.wait([self._wake_read, *(w.link for w in self._workers)], wait_s):
                    if source is self._wake_read:
                        self._wake_read.recv(4096)
                    else:
                        self._receive(next(w for w in self._workers if w.link is source))
                for worker in [w for w in self._workers if (w.job or not w.ready) and w.deadline <= time.monotonic()]:
                    self._lose(
                        worker, "timeout", f"no result within the time limit; worker {worker.process.pid} killed"
                    )
        finally:
            self._fail_start(ValueError("the reward workers were stopped"))
            for worker in self._workers:
                _kill(worker)

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, "-m", "covey.rewards.worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        link = connection.Connection(ours.detach())
        link.send(([os.getcwd() if entry == "" else entry for entry in sys.path], self._specs))
        return _Worker(process, link, time.monotonic() + START_LIMIT_S)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.job is not None:
                continue
            with self._lock:
                if not self._queue:
                    return
                job = self._queue.popleft()
            worker.job, worker.positions = job, job.missing()
            responses = [job.responses[i] for i in worker.positions]
            worker.deadline = self._deadline(job, len(responses))
            try:
                worker.link.send((id(job), job.index, responses, job.row, [job.extras[i] for i in worker.positions]))
            except (BrokenPipeError, ConnectionResetError):  # it died while idle, so the job is not to blame
                worker.job = None
                with self._lock:
                    self._queue.appendleft(job)
                self._remove(worker)
                self._wake()
                return

    def _deadline(self, job: _Job, num_responses: int) -> float:
        _, is_async = self._started.result()[job.index]
        return time.monotonic() + self._specs[job.index].limit_s(num_responses, is_async) + GRACE_S

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.link.recv()
        except (EOFError, ConnectionResetError):
            self._lose(worker, "error", "the worker process ended")
            return
        if message[0] == "failed":
            self._fail_start(ValueError(message[1]))
            self._remove(worker)
        elif message[0] == "ready":
            worker.ready = True
            self._failed_starts = 0
            if not self._started.done():
                self._started.set_result(message[1])
        else:
            _, _, index, outcome = message
            job = worker.job
            assert job is not None
            job.outcomes[worker.positions[index]] = outcome
            worker.deadline = self._deadline(job, len(worker.positions) - index - 1)
            if not job.missing():
                worker.job = None
                job.future.set_result([outcome for outcome in job.outcomes if outcome is not None])

    def _lose(self, worker: _Worker, status: str, why: str) -> None:
        """The worker is dead or has to die: blame the response it was busy with, requeue the others."""
        self._remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            code = worker.process.returncode
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._fail_start(ValueError(f"reward workers do not start (exit code {code}); see their output above"))
            return
        job = worker.job
        if job is None:
            return
        code = worker.process.returncode
        together = self._specs[job.index].batch or self._started.result()[job.index][1]
        blamed = job.missing() if together else job.missing()[:1]
        detail = why if status == "timeout" else f"{why} (exit code {code})"
        for position in blamed:
            kind = "timeout" if status == "timeout" else f"worker died, exit code {code}"
            job.outcomes[position] = Outcome("timeout" if status == "timeout" else "error", error=kind, detail=detail)
        if job.missing():
            with self._lock:
                self._queue.appendleft(job)
        else:
            job.future.set_result([outcome for outcome in job.outcomes if outcome is not None])

    def _fail_start(self, error: ValueError) -> None:
        self._failed_starts = _MAX_FAILED_STARTS
        if not self._started.done():
            self._started.set_exception(error)
        with self._lock:
            jobs, self._queue = list(self._queue), deque()
        for job in itertools.chain(jobs, (w.job for w in self._workers if w.job)):
            if not job.future.done():
                job.future.set_exception(error)

    def _started_badly(self) -> bool:
        return self._failed_starts >= _MAX_FAILED_STARTS

    def _remove(self, worker: _Worker) -> None:
        _kill(worker)
        self._workers.remove(worker)


def _kill(worker: _Worker) -> None:
    """End the worker and whatever it started in its process group, and reap it."""
    try:
        os.killpg(worker.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        log.debug("reward worker %d was gone already", worker.process.pid)
    worker.process.wait()
    worker.link.close()
