#!/usr/bin/env python3
"""Runs the test suites of public client libraries against a plain server and against Switchyard with two nodes, and compares.

The libraries are not part of this project. Their suites run from checkouts:

    REDIS_PY=DIR    github.com/redis/redis-py   (its tests need a virtual environment, made at the first run)
    GO_REDIS=DIR    github.com/redis/go-redis   (needs go)
    IOREDIS=DIR     github.com/redis/ioredis    (needs node and npm)

The suites expect their server at port 6379, and some start servers at other fixed ports. Each therefore runs in its own network
namespace (`unshare`), where nothing else listens; downloads happen before.

Only tests that the plain server passes count. A test that only the router fails runs once more alone, if the suite supports that, and does not
count if it passes then. All others must have an entry in reasons.txt, as in compat.py. With `--out` and all three suites, the results go
between their markers in docs/results/compatibility.md.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from datetime import date

import compat

HERE = os.path.dirname(os.path.abspath(__file__))
PORT = 6379
# Tests that need other servers than one plain server: clusters, Sentinels, modules, TLS in containers.
MARKERS = "not onlycluster and not redismod and not ssl and not fixed_client and not multidb_integration"
# Likewise for go-redis, and features of Redis 8 that Valkey lacks.
OTHER_SERVERS = (
    "ClusterClient|cluster races|Command Tips|Ring|Sentinel|JSON|RediSearch|FT\\.|[Pp]robabilistic|[Tt]ime ?[Ss]eries|TLS|[Vv]ector|Universal"
    "|HIMPORT|HotKeys|Array Commands"
)


class RedisPy:
    name, variable = "redis-py", "REDIS_PY"

    def __init__(self, checkout, cache):
        self.checkout, self.python = checkout, os.path.join(cache, "redis-py", "bin", "python")

    def prepare(self):
        if not os.path.exists(self.python):
            subprocess.run([sys.executable, "-m", "venv", os.path.dirname(os.path.dirname(self.python))], check=True)
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", os.path.join(self.checkout, "dev_requirements.txt"), "-e", self.checkout], check=True)

    def run(self, out, only=()):
        command = [self.python, "-m", "pytest", "-q", "-m", MARKERS, "--timeout", "60", "-p", "no:cacheprovider", "--junitxml", out]
        command += only or ["tests", "--ignore=tests/test_scenario", "--ignore=tests/test_asyncio/test_scenario"]
        run(command, self.checkout)
        return self.read(out)

    def read(self, out):
        outcomes = {}
        for case in xml.parse(out).getroot().iter("testcase"):
            path = case.get("classname").replace(".", "/")
            kinds = {child.tag for child in case}
            if "skipped" not in kinds:
                outcomes[f"{path}::{case.get('name')}"] = not kinds & {"failure", "error"}
        return outcomes

    def again(self, out, names):
        """Runs tests by their pytest names. A last path component with a capital is the class."""
        chosen = []
        for name in names:
            path, test = name.split("::", 1)
            head, last = os.path.split(path)
            chosen.append(f"{head}.py::{last}::{test}" if last[:1].isupper() else f"{path}.py::{test}")
        return self.run(out, chosen)


class GoRedis:
    name, variable = "go-redis", "GO_REDIS"

    def __init__(self, checkout, cache):
        self.checkout, self.binary = checkout, os.path.join(cache, "go-redis.test")

    def prepare(self):
        subprocess.run(["go", "test", "-c", "-o", self.binary, "."], cwd=self.checkout, check=True)

    def run(self, out, only=()):
        # "Redis Enterprise" is one server at one address. Otherwise the suite needs clusters, rings and Sentinels from containers.
        environment = {"RE_CLUSTER": "true", "REDIS_VERSION": "7.2"}
        command = [self.binary, "-test.run", "TestGinkgoSuite", "-ginkgo.no-color", "-ginkgo.json-report", out, "-ginkgo.skip", OTHER_SERVERS]
        run(command + [f"-ginkgo.focus=^{compat.re.escape(name)}$" for name in only], self.checkout, environment)
        return self.read(out)

    def read(self, out):
        with open(out, encoding="utf-8") as file:
            specs = json.load(file)[0]["SpecReports"] or []
        texts = ((" ".join([*(s["ContainerHierarchyTexts"] or []), s["LeafNodeText"]]), s) for s in specs if s["LeafNodeType"] == "It")
        return {text: spec["State"] == "passed" for text, spec in texts if spec["State"] not in ("skipped", "pending")}

    def again(self, out, names):
        return self.run(out, [f"go-redis {name}" for name in names])


class Ioredis:
    name, variable = "ioredis", "IOREDIS"

    def __init__(self, checkout, _):
        # File of each test that has passed at either target.
        self.checkout, self.files = checkout, {}

    def prepare(self):
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"], cwd=self.checkout, check=True)

    def run(self, out):
        return self.mocha(out, ["test/unit/**/*.ts", "test/functional/**/*.ts"])

    def again(self, out, failed):
        """Runs file by file, because a failing hook ends the run, also if another test has thrown late."""
        results = {}
        for number, file in enumerate(sorted({self.files[name] for name in failed})):
            results |= self.mocha(f"{out}-{number}", [file])
        return results

    def mocha(self, out, files):
        command = ["npx", "mocha", "--no-experimental-strip-types", "--reporter", "json", "--reporter-option", f"output={out}"]
        run([*command, "test/helpers/*.ts", *files], self.checkout, {"TS_NODE_TRANSPILE_ONLY": "true", "NODE_ENV": "test"})
        if not os.path.exists(out):
            return {}
        with open(out, encoding="utf-8") as file:
            report = json.load(file)
        self.files |= {test["fullTitle"]: test["file"] for test in report["passes"]}
        # Tests after a failing hook are in neither list.
        return {t["fullTitle"]: True for t in report["passes"]} | {t["fullTitle"]: False for t in report["failures"]}


def run(command, folder, environment=()):
    """Runs a suite. Ignores its exit code, because the report has the failed tests."""
    log = subprocess.DEVNULL if not os.environ.get("COMPAT_LOG") else open(os.environ["COMPAT_LOG"], "ab")
    subprocess.run(command, cwd=folder, env={**os.environ, **dict(environment)}, stdout=log, stderr=log, timeout=3600, check=False)


def commit_of(checkout):
    done = subprocess.run(["git", "-C", checkout, "describe", "--tags", "--always", "--match", "v*"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown commit"


def main():
    suites = [RedisPy, GoRedis, Ioredis]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--switchyard", required=True, help="the binary")
    parser.add_argument("--server", default="valkey-server", help="server of the nodes, and the plain one")
    parser.add_argument("--cache", required=True, help="folder for what the suites need installed or built")
    parser.add_argument("--out", help="file whose section between the markers is replaced by the results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    for suite in suites:
        parser.add_argument(f"--{suite.name}", default=os.environ.get(suite.variable), help=f"checkout ({suite.variable})")
    args = parser.parse_args()
    os.makedirs(args.cache, exist_ok=True)
    given = vars(args)
    chosen = [s(given[s.name.replace("-", "_")], os.path.abspath(args.cache)) for s in suites if given[s.name.replace("-", "_")]]
    if not chosen:
        raise SystemExit("nothing to run: give REDIS_PY=DIR, GO_REDIS=DIR or IOREDIS=DIR (see CONTRIBUTING.md)")
    if not args.inside:
        for suite in chosen:
            suite.prepare()
        os.execvp("unshare", ["unshare", "--map-root-user", "--net", sys.executable, *sys.argv, "--inside"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    compare(args, chosen, len(chosen) == len(suites))


def compare(args, chosen, all_of_them):
    reasons, rows, lines, unexplained, seen, used = compat.read_reasons(), [], [], 0, [], set()
    server, switchyard = shutil.which(args.server), os.path.abspath(args.switchyard)
    if server is None:
        sys.exit(f"{args.server} is not installed; name a server with --server PATH")
    reports = tempfile.mkdtemp(prefix="compat-clients-")
    for suite in chosen:
        seen.append(f"{suite.name} {commit_of(suite.checkout)}")
        with compat.Target(server, port=PORT):
            expected = suite.run(os.path.join(reports, f"{suite.name}-plain"))
        with compat.Target(server, switchyard, port=PORT):
            got = suite.run(os.path.join(reports, f"{suite.name}-router"))
            failed = [name for name, passed in expected.items() if passed and not got.get(name, False)]
            if failed and hasattr(suite, "again"):
                again = suite.again(os.path.join(reports, f"{suite.name}-again"), failed)
                failed = [name for name in failed if not again.get(name, False)]
        whole = sum(expected.values())
        if not whole:
            raise SystemExit(f"{suite.name}: the plain server passes nothing, so nothing was measured (COMPAT_LOG=FILE keeps what it says)")
        rows.append(f"| {suite.name} | {whole:,} | {whole - len(failed):,} | {compat.percent(whole - len(failed), whole)} |\n")
        print(rows[-1], end="", flush=True)
        explained = []
        for name in failed:
            reason = compat.reason_for(reasons, suite.name, name)
            unexplained += not reason
            used.add((suite.name, reason))
            # ioredis repeats a test for each protocol.
            shown = compat.re.sub(r" \(RESP\d/\w+\)", "", name)
            explained.append((suite.name, shown, (reason or "**not explained**").removeprefix("SKIP ")))
        lines += [f"| {u} | {compat.table_cell(n)} | {r} |\n" for u, n, r in compat.together(explained)]
    version = subprocess.run([switchyard, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    report = io.StringIO()
    report.write(f"Measured on {date.today()}: {version}; {', '.join(seen)}; nodes: {version_of(server)}.\n\n")
    report.write("| Suite | a plain server passes | of these Switchyard passes | |\n|---|---|---|---|\n" + "".join(rows))
    report.write("\n| Suite | Test that only the router fails | Why |\n|---|---|---|\n" + "".join(lines))
    print(report.getvalue())
    for unit, pattern, reason in reasons:
        if unit in [suite.name for suite in chosen] and (unit, reason) not in used:
            print(f"a reason that nothing needs: {unit} | {pattern.pattern}", file=sys.stderr)
    if args.out and all_of_them:
        compat.write_between(args.out, "<!-- clients: made by make compat-clients -->\n", "<!-- end of clients -->\n", report.getvalue())
    raise SystemExit(1 if unexplained else 0)


def version_of(server):
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return " ".join([words[0], *(w.removeprefix("v=") for w in words if w.startswith("v="))])


if __name__ == "__main__":
    main()
