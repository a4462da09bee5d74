#!/usr/bin/env python3
"""Runs every test of the workspace; a failed test runs again alone, up to twice.

A test that passes alone is printed as flaky at the end, and the run passes, so that a busy machine does not fail the run.

    scripts/test.py [--filter TEXT] [--times N]

--filter runs only the tests whose names contain TEXT. --times repeats the run, for tests that fail sometimes.
"""

import argparse
import json
import os
import re
import subprocess
import sys

CARGO = os.environ.get("CARGO", "cargo")
FAILED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED")
SUMMARY = re.compile(r"^test result: .*? (\d+) passed; (\d+) failed; (\d+) ignored;")
NOT_TRIED = re.compile(r"not tried here: .*")


def binaries():
    """Returns (name, executable, folder) of each test binary, in cargo's build order."""
    built = subprocess.run([CARGO, "test", "--workspace", "--features", "research", "--locked", "--no-run",
                            "--message-format=json-render-diagnostics"], stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(built.returncode)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    return [(f"{os.path.basename(os.path.dirname(made['manifest_path']))}/{made['target']['name']}", made["executable"],
             os.path.dirname(made["manifest_path"]))
            for made in messages if made.get("executable") and made.get("profile", {}).get("test")]


def run(executable, folder, args):
    """Runs a test binary and shows its output. Returns the exit code and the lines."""
    lines = []
    env = dict(os.environ, CARGO_MANIFEST_DIR=folder)
    with subprocess.Popen([executable, *args], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace") as process:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, lines


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--filter", default="", metavar="TEXT", help="only the tests whose names contain TEXT")
    options.add_argument("--times", type=int, default=1, metavar="N", help="repeat the run")
    options = options.parse_args()
    passed, failed, flaky, not_tried = 0, [], [], set()
    for name, executable, folder in binaries() * options.times:
        print(f"\n== {name}", flush=True)
        code, lines = run(executable, folder, [options.filter] if options.filter else [])
        sums = [found for found in map(SUMMARY.match, lines) if found]
        passed += sum(int(found[1]) for found in sums)
        not_tried.update(found[0] for found in map(NOT_TRIED.search, lines) if found)
        again = [found[1] for found in map(FAILED.match, lines) if found]
        if not sums or code not in (0, 101) or (code == 101) != bool(again) or sum(int(found[2]) for found in sums) != len(again):
            failed.append(f"{name}: exit code {code}, {len(again)} failures named: it did not come to its end as a test runner does")
        for test in again:
            for attempt in (1, 2):
                print(f"\n== {name}: {test} alone, attempt {attempt} of 2", flush=True)
                code, lines = run(executable, folder, [test, "--exact"])
                if code == 0 and any(found and found[1] == "1" for found in map(SUMMARY.match, lines)):
                    flaky.append(f"{name}: {test}")
                    passed += 1
                    break
            else:
                failed.append(f"{name}: {test}")
    print()
    for what, tests in (("flaky (failed, then passed alone)", flaky), ("not tried", sorted(not_tried)), ("FAILED", failed)):
        for test in tests:
            print(f"{what}: {test}")
    skipped = f", {len(not_tried)} skipped" if not_tried else ""
    print(f"{passed} passed, {len(failed)} failed{skipped}")
    sys.exit(1 if failed or passed == 0 else 0)


if __name__ == "__main__":
    main()
