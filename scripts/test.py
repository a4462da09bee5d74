#!/usr/bin/env python3
"""Runs every test of the workspace with cargo-nextest, and a part of the end-to-end tests with other servers.

    scripts/test.py [ARGUMENTS OF cargo nextest run]

A failed test runs again alone, up to twice. A test that passes alone is printed as flaky. More than two flaky tests fail
the run: a busy machine may disturb one or two, but a bug of a test must not hide behind its repetitions.

Other servers are the programs target/tools/servers/*, which scripts/install-deps.sh installs. With arguments, only the
first run takes place.
"""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

CARGO = os.environ.get("CARGO", "cargo")
FLAKY_MAX = 2
# Tests mostly wait for servers.
THREADS = os.environ.get("RUST_TEST_THREADS", str(3 * (os.cpu_count() or 1)))
# Profiles of .config/nextest.toml, and beginnings of the names of servers.
OTHER_SERVERS = ("redis", "valkey")
# Exit code of nextest after failed tests. Other codes are errors of the build or of nextest.
TESTS_FAILED = 100
NOT_TRIED = re.compile(r"not tried here: .*")


def directories():
    """Returns cargo's target directory, and that of nextest, which is in the workspace."""
    metadata = json.loads(subprocess.run([CARGO, "metadata", "--format-version", "1", "--no-deps", "--locked"], check=True,
                                         stdout=subprocess.PIPE, text=True).stdout)
    return metadata["target_directory"], os.path.join(metadata["workspace_root"], "target", "nextest")


def give_up(problem):
    """Ends the run as failed, because its counts are unknown."""
    print(f"\nFAILED: {problem}\n0 passed, 1 failed")
    sys.exit(1)


class Run:
    """Counts of one or several runs of nextest."""

    def __init__(self, report):
        self.report = report
        self.passed, self.failed, self.not_tried = 0, [], set()

    def nextest(self, profile, arguments, env):
        """Runs tests. Returns the names (binary, test) of failed ones, and adds the rest to the counts."""
        report = os.path.join(self.report, profile, "junit.xml")
        if os.path.exists(report):
            os.remove(report)
        command = [CARGO, "nextest", "run", "--workspace", "--features", "research", "--locked", "--profile", profile, *arguments]
        code = subprocess.run(command, env=dict(os.environ, **env)).returncode
        if code not in (0, TESTS_FAILED) or not os.path.exists(report):
            give_up(f"cargo nextest ended with {code}, without a report")
        failed = []
        for case in xml.parse(report).getroot().iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append((case.get("classname"), case.get("name")))
            else:
                self.passed += 1
            for output in (*case.iter("system-out"), *case.iter("system-err")):
                self.not_tried.update(NOT_TRIED.findall(output.text or ""))
        if (code == TESTS_FAILED) != bool(failed):
            give_up(f"cargo nextest ended with {code}, but its report has {len(failed)} failed tests")
        return failed

    def with_repetitions(self, profile, arguments, env):
        """Runs tests, and failed ones again. Returns the flaky ones."""
        again, flaky = self.nextest(profile, ["--test-threads", THREADS, *arguments], env), []
        for attempt in (1, 2):
            if not again:
                break
            print(f"\n== {len(again)} failed: alone, attempt {attempt} of 2", flush=True)
            alone = " | ".join(f"(binary_id(={binary}) & test(={test}))" for binary, test in again)
            failed = self.nextest(profile, ["--test-threads", "1", "--filterset", alone], env)
            flaky += [test for test in again if test not in failed]
            again = failed
        self.failed += again
        return flaky


def main():
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        sys.exit(__doc__)
    directory, reports = directories()
    os.environ["PATH"] = os.path.join(directory, "tools", "bin") + os.pathsep + os.environ["PATH"]
    run = Run(reports)
    flaky = run.with_repetitions("default", arguments, {})
    servers = os.path.join(directory, "tools", "servers")
    installed = sorted(os.listdir(servers)) if os.path.isdir(servers) else []
    for profile in OTHER_SERVERS if not arguments else []:
        server = next((server for server in installed if server.startswith(profile)), None)
        if server is None:
            run.not_tried.add(f"not tried here: the end-to-end tests with another {profile}-server (not installed)")
            continue
        print(f"\n== a part of the end-to-end tests with {server}", flush=True)
        flaky += run.with_repetitions(profile, [], {"SWITCHYARD_E2E_SERVER": os.path.join(servers, server)})
    print()
    for what, tests in (("flaky (failed, then passed alone)", flaky), ("not tried", sorted(run.not_tried)),
                        ("FAILED", run.failed)):
        for test in tests:
            print(f"{what}: {test if isinstance(test, str) else ': '.join(test)}")
    if len(flaky) > FLAKY_MAX:
        print(f"FAILED: {len(flaky)} flaky tests; at most {FLAKY_MAX} are accepted. Repeat with: cargo nextest run TEST --stress-count 20")
    skipped = f", {len(run.not_tried)} skipped" if run.not_tried else ""
    print(f"{run.passed} passed, {len(run.failed)} failed{skipped}")
    sys.exit(1 if run.failed or len(flaky) > FLAKY_MAX or run.passed == 0 else 0)


if __name__ == "__main__":
    main()
