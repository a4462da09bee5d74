"""Reads two successive pages of /metrics with Prometheus's client library.

    metrics.py EARLIER LATER

Both parsers of the library must accept them: the strict one of OpenMetrics, and the one of the older text format.
"""

import math
import re
import sys

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

EXPECTED = {
    "switchyard_build": "info",
    "switchyard_clients_max": "gauge",
    "switchyard_errors": "counter",
    "switchyard_moves_keys_moved": "counter",
    "switchyard_node_slots": "gauge",
    "switchyard_command_latency_seconds": "histogram",
    "process_cpu_seconds": "counter",
    "process_resident_memory_bytes": "gauge",
    "process_virtual_memory_bytes": "gauge",
    "process_open_fds": "gauge",
    "process_max_fds": "gauge",
    "process_start_time_seconds": "gauge",
}

checks = 0


def check(good, why):
    global checks
    checks += 1
    if not good:
        sys.exit(f"wrong: {why}")


def quantile(share, buckets):
    """Returns a quantile like Prometheus's histogram_quantile. Buckets are (upper bound, cumulative count), the last one for +Inf."""
    wanted = share * buckets[-1][1]
    place = next(i for i, (_, count) in enumerate(buckets) if count >= wanted)
    if place == len(buckets) - 1:
        return buckets[-2][0]
    low, before = buckets[place - 1] if place else (0.0, 0.0)
    high, count = buckets[place]
    return low + (high - low) * (wanted - before) / (count - before)


def read(text):
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(text)}
    older = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    strict = [sample for family in families.values() for sample in family.samples]
    check(len(older) == len(strict), f"{len(older)} samples by one parser, {len(strict)} by the other")
    return families


def histograms(family):
    """Returns buckets, sum and count by labels."""
    found = {}
    for sample in family.samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        one = found.setdefault(labels, {"buckets": []})
        if sample.name.endswith("_bucket"):
            one["buckets"].append((float(sample.labels["le"]), sample.value))
        else:
            one[sample.name[len(family.name) + 1 :]] = sample.value
    return found


def look(families):
    helps = {}
    computed = 0
    for name, family in families.items():
        check(re.match("[A-Z1].{9}", family.documentation), f"help of {name}: {family.documentation}")
        check(not re.search(r"\b(the same|these|of them)\b", family.documentation, re.I), f"help of {name} needs another: {family.documentation}")
        check(helps.setdefault(family.documentation, name) == name, f"{name} and {helps[family.documentation]} have one help text")
        if family.type != "histogram":
            continue
        for labels, one in histograms(family).items():
            buckets = one["buckets"]
            check(buckets[-1][0] == math.inf, f"{name}{labels} does not end in +Inf")
            check(buckets == sorted(buckets), f"{name}{labels} is not cumulative")
            check(buckets[-1][1] == one["count"] > 0, f"{name}{labels}: +Inf and count differ, or are 0")
            for share in (0.5, 0.99):
                value = quantile(share, buckets)
                check(0 < value <= buckets[-2][0], f"{name}{labels}: quantile {share} is {value}")
                computed += 1
    check(computed >= 10, f"only {computed} quantiles could be computed")
    for name, kind in EXPECTED.items():
        check(name in families and families[name].type == kind, f"{name} is no {kind}")
        check(families[name].samples, f"{name} has no sample")


def main():
    earlier, later = (read(open(path, encoding="utf-8").read()) for path in sys.argv[1:3])
    look(later)
    def samples(families):
        kinds = ("counter", "histogram")
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families.values() if f.type in kinds for s in f.samples}
    after = samples(later)
    for series, value in samples(earlier).items():
        check(series in after, f"{series} is gone")
        check(after[series] >= value, f"{series} has fallen from {value} to {after[series]}")
    started = [f["process_start_time_seconds"].samples[0].value for f in (earlier, later)]
    check(started[0] == started[1], f"started at {started}")
    print(f"ok: {checks} checks")


main()
