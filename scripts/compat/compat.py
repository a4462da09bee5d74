#!/usr/bin/env python3
"""Runs public compatibility suites against a plain server and against Switchyard with two nodes, and compares.

The suites are not part of this project. They run from a checkout:

    COMPAT_SUITE=DIR   github.com/tair-opensource/compatibility-test-suite-for-redis   (needs redis-py < 6 and pyyaml)
    VALKEY_TESTS=DIR   github.com/valkey-io/valkey, built (src/valkey-server)          (needs tclsh)

Only tests that the plain server passes count. Every test that only the router fails must have a line in reasons.txt:
`UNIT or * | regular expression for its name | reason`. Otherwise the exit code is 1. If the reason begins with `SKIP`, the test is
left out and counts as failed, because its effects would fail the tests after it.

A whole run (both suites, all units) with `--out` writes the results between the markers in docs/results/compatibility.md; a partial run
only prints them.

Not a part of the Rust tests, because the suites take minutes, and their code is not in this repository.
"""

import argparse
import collections
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date

HERE = os.path.dirname(os.path.abspath(__file__))

# Units of the TCL suite that apply to an external server; the first eleven are the "data units".
DATA_UNITS = ["type/string", "type/incr", "type/set", "expire", "keyspace", "bitops", "bitfield", "geo", "scan", "sort", "dump"]
OTHER_UNITS = [
    "type/hash", "type/list", "type/list-2", "type/list-3", "type/zset", "type/stream", "type/stream-cgroups", "hyperloglog",
    "multi", "protocol", "pubsub", "pubsubshard", "scripting", "functions", "querybuf", "tracking", "other",
]
# Their reasons are in the same file; see clients.py.
CLIENT_SUITES = ["redis-py", "go-redis", "ioredis"]
TAGS = "-slow -needs:debug -needs:repl -needs:config-maxmemory -needs:config-resetstat -needs:reset -needs:save -needs:pfdebug"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port, what):
    end = time.time() + 20
    while time.time() < end:
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as s:
                s.sendall(b"PING\r\n")
                if s.recv(64).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"{what} on port {port} does not answer")


class Target:
    """A plain server, or a router with some nodes. Killed on exit."""

    def __init__(self, server, router=None, nodes=2, port=None, settings=()):
        self.dir = tempfile.mkdtemp(prefix="compat-")
        self.processes = []
        ports = [self.start_server(server, port if not router else None) for _ in range(nodes if router else 1)]
        self.port = ports[0]
        if router:
            self.port = port or free_port()
            command = [router, "serve", "--listen", f"127.0.0.1:{self.port}", "--admin", f"127.0.0.1:{free_port()}"]
            # One worker for one server: several could notice the end of a connection after the next connection's command.
            command += ["--workers", str(nodes)]
            command += ["--state-dir", os.path.join(self.dir, "state"), "--config", os.path.join(HERE, "switchyard.toml")]
            for setting in settings:
                command += ["--set", setting]
            for port in ports:
                command += ["--node", f"127.0.0.1:{port}"]
            self.start(command, "router")
            wait_for(self.port, "the router")

    def start(self, command, name):
        log = open(os.path.join(self.dir, name + ".log"), "wb")
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.dir))

    def start_server(self, program, port=None):
        port = port or free_port()
        folder = os.path.join(self.dir, str(port))
        os.mkdir(folder)
        self.start([program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder, "--enable-debug-command", "yes"], str(port))
        wait_for(port, program)
        return port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


# ---- the suite of commands ----


def run_command_suite(suite, port, same_slot, version):
    """Returns {test name with its number: None, or the reason of the failure}."""
    sys.path.insert(0, suite)
    import redis_compatibility_test as t  # the checkout's

    t.args = argparse.Namespace(cluster=same_slot, specific_version=version, show_failed=True)
    t.logfile = io.StringIO()
    t.g_results = {}
    # An ordinary client for both sets; `cluster` only selects the tests whose keys share a slot.
    t.create_client("127.0.0.1", port, "", False, False)
    t.run_compatibility_tests(os.path.join(suite, "cts.json"))
    failed = {}
    for result in t.g_results.values():
        for failure in result.failed:
            failed.setdefault(failure.name, []).append(str(failure.reason))
    outcomes, seen = {}, collections.Counter()
    for line in t.logfile.getvalue().splitlines():
        match = re.match(r"test: (.*) (passed|failed)$", line)
        if match:
            name = match.group(1)
            seen[name] += 1
            reasons = failed.get(name)
            why = (reasons.pop(0) if reasons else "failed") if match.group(2) == "failed" else None
            outcomes[f"{name} #{seen[name]}" if seen[name] > 1 else name] = why
    return outcomes


# ---- the TCL suite ----


def run_unit(tests, unit, port, timeout, skipped=()):
    """Returns {test name with its number: passed}, and the output of the harness."""
    command = ["./runtest", "--host", "127.0.0.1", "--port", str(port), "--cluster-mode", "--ignore-encoding", "--ignore-digest"]
    command += ["--no-latency", "--durable", "--timeout", "600", "--clients", "1", "--tags", TAGS, "--single", f"unit/{unit}"]
    for pattern in skipped:
        command += ["--skiptest", f"/^{pattern}$"]
    with subprocess.Popen(command, cwd=tests, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            raw, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the whole session, because the harness has children
            raw, _ = process.communicate()
    text = re.sub(r"\x1b\[[0-9;]*m", "", raw.decode("utf-8", "replace"))
    outcomes, seen = {}, collections.Counter()
    for line in text.splitlines():
        match = re.match(r"\[(ok|err|exception)\]: (.*)$", line)
        if not match:
            continue
        name = re.sub(r" \(\d+ ms\)$", "", match.group(2))
        passed = match.group(1) == "ok"
        if not passed:
            name = re.split(r" in tests/", name)[0]
        seen[name] += 1
        outcomes[f"{name} #{seen[name]}" if seen[name] > 1 else name] = passed
    return outcomes, text


# ---- reasons ----


def read_reasons():
    reasons = []
    with open(os.path.join(HERE, "reasons.txt"), encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                unit, pattern, reason = (part.strip() for part in line.split(" | ", 2))
                reasons.append((unit, re.compile(pattern), reason))
    return reasons


def reason_for(reasons, unit, name):
    for wanted, pattern, reason in reasons:
        if wanted in ("*", unit) and pattern.fullmatch(name):
            return reason
    return None


def info_of(port):
    """Returns the fields of INFO server."""
    with socket.create_connection(("127.0.0.1", port), 5) as s:
        file = s.makefile("rb")
        s.sendall(b"INFO server\r\n")
        text = file.read(int(file.readline()[1:]) + 2).decode()
    return dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)


def commit_of(checkout):
    """Returns the commit of a checkout and its day."""
    command = ["git", "-C", checkout, "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown commit"


def together(rows):
    """Joins repeated tests (`NAME`, `NAME #2`, ...) with the same reason into one row."""
    counts = collections.Counter((unit, re.sub(r" #\d+$", "", name), reason) for unit, name, reason in rows)
    return [(unit, f"{name} (×{count})" if count > 1 else name, reason) for (unit, name, reason), count in counts.items()]


def table_cell(text):
    return re.sub(r"([|<>*_])", r"\\\1", text)


def percent(part, whole):
    return f"{100 * part / whole:.1f} %" if whole else "-"


def write_between(path, begin, end, text):
    """Replaces the text between two lines of a file."""
    with open(path, encoding="utf-8") as file:
        before, rest = file.read().split(begin)
    with open(path, "w", encoding="utf-8") as file:
        file.write(before + begin + text + end + rest.split(end)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--switchyard", required=True, help="the binary")
    parser.add_argument("--suite", default=os.environ.get("COMPAT_SUITE"), help="checkout of the suite of commands")
    parser.add_argument("--tests", default=os.environ.get("VALKEY_TESTS"), help="built checkout of Valkey")
    parser.add_argument("--server", default="redis-server", help="server for the suite of commands")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting of the router; may be repeated")
    parser.add_argument("--units", help="only these units of the TCL suite, separated by commas; `data`: the eleven data units")
    parser.add_argument("--unit-timeout", type=int, default=700, help="seconds")
    parser.add_argument("--out", help="file whose section between the markers is replaced by the results")
    parser.add_argument("--verbose", action="store_true", help="print what the TCL harness says of failures")
    args = parser.parse_args()
    whole_run = bool(args.suite and args.tests and not args.units)
    if args.out and not whole_run:
        print(f"a part of the suites: {args.out} is left as it is", file=sys.stderr)
    reasons = read_reasons()
    rows, explained, unexplained, seen, used = [], [], [], [], set()

    def note(unit, name, why):
        reason = reason_for(reasons, unit, name)
        used.add(reason)
        (explained if reason else unexplained).append((unit, name, (reason or why).removeprefix("SKIP ")))

    if args.suite:
        for set_name, same_slot, nodes in (("same-slot", True, 2), ("standalone", False, 2), ("standalone, one node", False, 1)):
            with Target(args.server) as plain:
                if not seen:
                    seen.append(f"the suite of commands ({commit_of(args.suite)}) before Redis {info_of(plain.port)['redis_version']}")
                expected = run_command_suite(args.suite, plain.port, same_slot, "7.2.0")
            with Target(args.server, args.switchyard, nodes, settings=args.set) as router:
                got = run_command_suite(args.suite, router.port, same_slot, "7.2.0")
            wanted = [name for name, why in expected.items() if why is None]
            if not wanted:
                raise SystemExit(f"commands, {set_name} set: the plain server passes nothing, so nothing was measured")
            failed = [name for name in wanted if got.get(name, "not reached") is not None]
            rows.append((f"commands, {set_name} set", len(wanted), len(wanted) - len(failed)))
            for name in failed:
                note(f"commands {set_name}", name, got.get(name, "not reached"))
            print(f"{rows[-1][0]}: {rows[-1][2]} of {rows[-1][1]}", flush=True)
    if args.tests:
        server = os.path.join(args.tests, "src/valkey-server")
        units = DATA_UNITS + OTHER_UNITS
        if args.units:
            units = DATA_UNITS if args.units == "data" else args.units.split(",")
        totals = collections.Counter()
        seen.append(f"Valkey's suite and server ({commit_of(args.tests)})")
        for unit in units:
            with Target(server) as plain:
                expected, said = run_unit(args.tests, unit, plain.port, args.unit_timeout)
            if "[1/1 done]" not in said:
                print(f"unit {unit} did not come to its end at the plain server (does another run use this checkout?)\n{said[-1000:]}")
                unexplained.append((unit, "all", "the unit did not come to its end at the plain server"))
                continue
            if not any(expected.values()):
                print(f"unit {unit}: no test of it is run", flush=True)
                continue
            with Target(server, args.switchyard, settings=args.set) as router:
                skipped = [p.pattern for wanted, p, reason in reasons if wanted in ("*", unit) and reason.startswith("SKIP ")]
                got, text = run_unit(args.tests, unit, router.port, args.unit_timeout, skipped)
            wanted = [name for name, passed in expected.items() if passed]
            failed = [name for name in wanted if not got.get(name, False)]
            if args.verbose and failed:
                print("\n".join(l for l in text.splitlines() if not re.match(r"\[(ok|ignore|skip)\]", l)), flush=True)
            for name in failed:
                note(unit, name, "failed" if name in got else "not reached: the unit ended before")
            totals["all"] += len(wanted)
            totals["all passed"] += len(wanted) - len(failed)
            if unit in DATA_UNITS:
                totals["data"] += len(wanted)
                totals["data passed"] += len(wanted) - len(failed)
            print(f"unit {unit}: {len(wanted) - len(failed)} of {len(wanted)}", flush=True)
            rows.append((f"Valkey TCL, {unit}", len(wanted), len(wanted) - len(failed)))
        if totals["data"]:
            rows.append(("Valkey TCL, the data units together", totals["data"], totals["data passed"]))
        rows.append(("Valkey TCL, together", totals["all"], totals["all passed"]))
    version = subprocess.run([args.switchyard, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    report = io.StringIO()
    report.write(f"Measured on {date.today()}: {version or args.switchyard}; {'; '.join(seen)}.\n\n")
    report.write("| Suite | a plain server passes | of these Switchyard passes | |\n|---|---|---|---|\n")
    for name, whole, part in rows:
        report.write(f"| {name} | {whole:,} | {part:,} | {percent(part, whole)} |\n")
    report.write("\n| Where | Test that only the router fails | Why |\n|---|---|---|\n")
    for unit, name, reason in together(explained) + [(u, n, "**not explained:** " + r) for u, n, r in unexplained]:
        report.write(f"| {unit} | {table_cell(name)} | {reason.replace('|', chr(92) + '|')} |\n")
    print(report.getvalue())
    if whole_run:
        for unit, pattern, reason in reasons:
            if reason not in used and unit not in CLIENT_SUITES:
                print(f"a reason that nothing needs: {unit} | {pattern.pattern}", file=sys.stderr)
    if args.out and whole_run:
        write_between(args.out, "<!-- results: made by make compat -->\n", "<!-- end of results -->\n", report.getvalue())
    if not args.suite and not args.tests:
        raise SystemExit("nothing to run: give COMPAT_SUITE=DIR or VALKEY_TESTS=DIR (see docs/results/compatibility.md)")
    raise SystemExit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
