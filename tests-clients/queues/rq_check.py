"""Runs RQ on several queues behind a router with the preset `rq`. Usage: rq_check.py HOST:PORT"""

import sys
from datetime import timedelta

from redis import Redis
from rq import Queue, Retry, SimpleWorker
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry

host, port = sys.argv[1].split(":")
checks = 0


def equal(actual, expected, what):
    global checks
    assert actual == expected, f"{what}: {actual!r} instead of {expected!r}"
    checks += 1


def double(n):
    return 2 * n


def fail():
    raise ValueError("as planned")


def main():
    connection = Redis(host=host, port=int(port))
    queues = [Queue(name, connection=connection) for name in ("high", "default", "low")]
    jobs = [queue.enqueue("rq_check.double", n) for queue in queues for n in range(20)]
    many = queues[1].enqueue_many([Queue.prepare_data("rq_check.double", (n,)) for n in range(20)])
    dependent = queues[2].enqueue("rq_check.double", 100, depends_on=[jobs[0], jobs[-1]])
    failing = queues[0].enqueue("rq_check.fail")
    retried = queues[1].enqueue("rq_check.fail", retry=Retry(max=1))
    unwanted = queues[2].enqueue("rq_check.double", 1)
    unwanted.cancel()
    scheduled = queues[1].enqueue_in(timedelta(hours=1), "rq_check.double", 1)
    # The worker waits for all queues in one command.
    SimpleWorker(queues, connection=connection).work(burst=True, logging_level="ERROR")
    for job in jobs + many + [dependent]:
        found = Job.fetch(job.id, connection=connection)
        equal(found.get_status(), "finished", "status of a job")
        equal(found.return_value(), 2 * job.args[0], "result of a job")
    equal(failing.get_status(refresh=True), "failed", "a failed job")
    equal(retried.get_status(refresh=True), "failed", "a retried job")
    equal(unwanted.get_status(refresh=True), "canceled", "a cancelled job")
    equal(scheduled.get_status(refresh=True), "scheduled", "a scheduled job")
    equal([len(queue) for queue in queues], [0, 0, 0], "lengths of the queues")
    equal(len(FailedJobRegistry("high", connection=connection)), 1, "failed jobs")
    equal(len(FinishedJobRegistry("default", connection=connection)), 40, "finished jobs")
    equal({queue.name for queue in Queue.all(connection=connection)}, {"high", "default", "low"}, "all queues")
    print(f"ok: {checks} checks")


if __name__ == "__main__":
    main()
