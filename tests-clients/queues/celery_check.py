"""Runs Celery behind a router, with the preset `celery` or without rules. Usage: celery_check.py HOST:PORT"""

import ctypes
import os
import signal
import subprocess
import sys

from celery import Celery, chord, group

# The worker imports this module as well.
url = os.environ.setdefault("CELERY_CHECK_URL", f"redis://{sys.argv[1]}/0")
app = Celery("celery_check", broker=url, backend=url)
app.conf.update(task_acks_late=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
checks = 0


def equal(actual, expected, what):
    global checks
    assert actual == expected, f"{what}: {actual!r} instead of {expected!r}"
    checks += 1


@app.task
def double(n):
    return 2 * n


@app.task
def add(numbers):
    return sum(numbers)


@app.task(bind=True, max_retries=2)
def flaky(self, n):
    if self.request.retries == 0:
        raise self.retry(countdown=0.2)
    return n


def start_worker():
    """Starts a worker with events and gossip, as by default. Its name has dots, like a full host name."""
    options = ["-P", "threads", "-c", "4", "-n", "check@host.example.org", "-l", "ERROR"]
    return subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "celery_check", "worker", *options],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        # The worker ends with this process.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),
    )


def main():
    worker = start_worker()
    results = [double.apply_async((n,), priority=n % 10) for n in range(40)]
    for n, result in enumerate(results):
        equal(result.get(timeout=60), 2 * n, "result of a task")
    equal(double.apply_async((7,), countdown=0.5).get(timeout=60), 14, "a task with a countdown")
    equal(flaky.delay(5).get(timeout=60), 5, "a retried task")
    for size in range(2, 12):
        equal(group(double.s(n) for n in range(size)).delay().get(timeout=60), [2 * n for n in range(size)], "a group")
        equal(chord((double.s(n) for n in range(size)), add.s()).delay().get(timeout=60), size * (size - 1), "a chord")
    replies = app.control.ping(timeout=5)
    equal([list(reply) for reply in replies], [["check@host.example.org"]], "workers that reply to a ping")
    equal(worker.poll(), None, "the worker runs")
    worker.terminate()
    equal(worker.wait(timeout=60), 0, "the worker ends")
    equal(app.control.purge(), 0, "messages left")
    print(f"ok: {checks} checks")


if __name__ == "__main__":
    main()
