"""Runs Celery behind a router with the preset `celery`. Usage: celery_check.py HOST:PORT"""

import sys

from celery import Celery, chord, group
from celery.contrib.testing.worker import start_worker

url = f"redis://{sys.argv[1]}/0"
app = Celery("check", broker=url, backend=url)
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


def main():
    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False, loglevel="ERROR"):
        results = [double.apply_async((n,), priority=n % 10) for n in range(40)]
        for n, result in enumerate(results):
            equal(result.get(timeout=60), 2 * n, "result of a task")
        equal(double.apply_async((7,), countdown=0.5).get(timeout=60), 14, "a task with a countdown")
        equal(flaky.delay(5).get(timeout=60), 5, "a retried task")
        for size in range(2, 12):
            equal(group(double.s(n) for n in range(size)).delay().get(timeout=60), [2 * n for n in range(size)], "a group")
            equal(chord((double.s(n) for n in range(size)), add.s()).delay().get(timeout=60), size * (size - 1), "a chord")
        replies = app.control.ping(timeout=5)
        equal(len(replies), 1, "workers that reply to a ping")
    equal(app.control.purge(), 0, "messages left")
    print(f"ok: {checks} checks")


if __name__ == "__main__":
    main()
