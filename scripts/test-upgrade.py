#!/usr/bin/env python3
"""Tests a downgrade and an upgrade: today's state directory with the build that introduced its formats, and back.

    scripts/test-upgrade.py [--commit COMMIT] [--old BINARY] [--new BINARY]

Builds the older binary in a temporary worktree of COMMIT. By default that is the newest commit that changed `FORMAT` of the
store or of the journal. In each scenario today's binary fills real servers and changes its state directory. Then the older
binary starts with that directory: it serves every key and can move slots, or it refuses, and names the file and the reason.
Then today's binary starts again: no key is lost, moved or changed, and slots can move.

Needs redis-server. $CARGO replaces cargo.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CARGO = os.environ.get("CARGO", "cargo")
# File that defines each format, and start of the line with its number.
FORMATS = [("crates/control/src/store/redb.rs", "pub const FORMAT: u64 ="),
           ("crates/control/src/journal/frames.rs", "pub(super) const FORMAT: u32 =")]
# Parts of the errors of a refusal. Early builds, before any release, know only the last two.
REFUSALS = ["does not support", "knows formats up to", "unknown field", "unknown variant"]
TOKEN = "token-of-the-upgrade-test"
KEYS = 600
LIMIT_S = 120


def git(*args):
    return subprocess.run(["git", "-C", ROOT, *args], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def introducing_commit():
    """Returns the newest commit that changed the number of a format."""
    commits = set()
    for path, definition in FORMATS:
        with open(os.path.join(ROOT, path), encoding="utf-8") as source:
            line = next(line.strip() for line in source if line.startswith(definition))
        commits.add(git("log", "-1", "--format=%H", f"-S{line}", "--", path))
    if "" in commits:
        sys.exit("the history does not have the commits that introduced the formats: fetch all of it, or give --old")
    return git("rev-list", "--no-walk=sorted", *commits).splitlines()[0]


def build(folder, target):
    """Builds the binary of the source in `folder`, and returns its path."""
    print(f"building {folder}", flush=True)
    env = dict(os.environ, CARGO_TARGET_DIR=target)
    subprocess.run([CARGO, "build", "--locked", "-p", "switchyard"], cwd=folder, env=env, check=True)
    return os.path.join(target, "debug", "switchyard")


@contextlib.contextmanager
def older_binary(commit):
    """Yields the binary of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "source")
        git("worktree", "add", "--detach", source, commit)
        try:
            yield build(source, os.path.join(ROOT, "target", "upgrade"))
        finally:
            git("worktree", "remove", "--force", source)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(port, *words):
    """Sends one command, and returns its reply: bytes, a number, a list or None. An error reply is a RuntimeError."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded))
        with connection.makefile("rb") as replies:
            return read_reply(replies)


def read_reply(replies):
    line = replies.readline()
    if not line:
        raise ConnectionError("the connection was closed")
    kind, rest = line[:1], line[1:].rstrip(b"\r\n")
    if kind == b"-":
        raise RuntimeError(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else replies.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return [read_reply(replies) for _ in range(int(rest))]
    return rest


def until(what, condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {LIMIT_S} s: {what}")
        time.sleep(0.05)


def answers(port):
    try:
        return call(port, "PING") == b"PONG"
    except (OSError, RuntimeError):
        return False


class Refused(Exception):
    """The router has refused to start. The text is its log."""


class Fleet:
    """Servers, a state directory, and the router that runs on it, if any."""

    def __init__(self, folder):
        self.folder = folder
        self.state = os.path.join(folder, "state")
        self.processes = []
        # In the order of their names, in which the first map divides the slots.
        self.nodes = sorted((self.start_server() for _ in range(3)), key=str)
        self.router = None
        self.keys = {}
        # Number of a node that may get all slots of node 0.
        self.target = 1
        self.token_file = os.path.join(folder, "token")
        with open(self.token_file, "w", encoding="utf-8") as file:
            file.write(TOKEN + "\n")
        os.chmod(self.token_file, 0o600)
        self.users_file = os.path.join(folder, "users")
        with open(self.users_file, "w", encoding="utf-8") as file:
            file.write("user default on nopass ~* &* +@all\n")
        os.chmod(self.users_file, 0o600)

    def start_server(self):
        port = free_port()
        self.processes.append(subprocess.Popen(
            ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", self.folder],
            stdout=subprocess.DEVNULL))
        until("a server replies", lambda: answers(port))
        return port

    def address(self, number):
        return f"127.0.0.1:{self.nodes[number]}"

    def start(self, binary):
        """Starts the router with its first two nodes, as an operator would; further nodes are in the state directory."""
        self.binary, self.port, self.admin = binary, free_port(), free_port()
        arguments = ["serve", "--state-dir", self.state, "--listen", f"127.0.0.1:{self.port}", "--admin",
                     f"127.0.0.1:{self.admin}", "--admin-token-file", self.token_file, "--workers", "2",
                     "--set", f"clients.users-file={self.users_file}", "--node", self.address(0), "--node", self.address(1)]
        with open(os.path.join(self.folder, "log"), "w+", encoding="utf-8") as log:
            self.router = subprocess.Popen([binary, *arguments], stdout=log, stderr=subprocess.STDOUT)
            until("the router serves or ends", lambda: self.router.poll() is not None or self.serves())
            if self.router.poll() is not None:
                self.router = None
                log.seek(0)
                raise Refused(log.read())

    def serves(self):
        try:
            return answers(self.port) and call(self.port, "DBSIZE") >= 0
        except (OSError, RuntimeError):
            return False

    def stop(self):
        self.router.send_signal(signal.SIGTERM)
        code = self.router.wait(LIMIT_S)
        self.router = None
        assert code == 0, f"the router ended with {code}"

    def run(self, *arguments):
        """Runs a subcommand with the binary of the running router. Returns its exit code and output."""
        done = subprocess.run([self.binary, *arguments, "--admin", f"127.0.0.1:{self.admin}"], timeout=LIMIT_S, text=True,
                              env=dict(os.environ, SWITCHYARD_ADMIN_TOKEN=TOKEN), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    def cli(self, *arguments):
        code, output = self.run(*arguments)
        assert code == 0, f"switchyard {' '.join(arguments)}: {output}"

    def write(self, prefix, count):
        for number in range(count):
            key, value = f"{prefix}:{number}", f"value of {prefix} {number}"
            call(self.port, "SET", key, value)
            self.keys[key] = value.encode()

    def move_all(self, source, target):
        """Moves all slots of a node, after the end of moves in progress."""
        words = ["move", "--from", self.address(source), "--to", self.address(target), "--all", "--wait"]

        def done():
            code, output = self.run(*words)
            # Every version points to the move that has the slots.
            assert code == 0 or "see `switchyard moves`" in output, f"switchyard {' '.join(words)}: {output}"
            return code == 0

        until("the slots have moved", done)

    def check(self):
        """Each key has its value, and is at one node only."""
        for key, value in self.keys.items():
            found = call(self.port, "GET", key)
            assert found == value, f"{key} is {found}, not {value}"
        assert call(self.port, "DBSIZE") == len(self.keys)
        until("each key is at one node", lambda: sum(call(node, "DBSIZE") for node in self.nodes) == len(self.keys))

    def slots(self):
        """Returns the number of slots of each node."""
        nodes = [dict(zip(node[::2], node[1::2])) for node in call(self.port, "SWITCHYARD", "NODES")]
        return {node[b"node"]: node[b"slots"] for node in nodes}

    def end(self):
        for process in self.processes + [self.router] * (self.router is not None):
            process.kill()
            process.wait()


def slots(fleet):
    """Moved slots, a node that has joined, a drained node, automation that is off, a user."""
    fleet.target = 2
    fleet.cli("nodes", "add", fleet.address(2), "--rebalance", "--wait")
    fleet.cli("nodes", "drain", fleet.address(1), "--wait")
    fleet.cli("automation", "off")
    call(fleet.port, "ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read")
    call(fleet.port, "ACL", "SAVE")


def open_move(fleet):
    """A move that is in progress when the router stops."""
    fleet.target = 2
    fleet.cli("nodes", "add", fleet.address(2))
    fleet.cli("move", "--from", fleet.address(0), "--to", fleet.address(2), "--slots", "0-4000", "--max-rate", "1kb")
    until("a key has moved", lambda: call(fleet.nodes[2], "DBSIZE") > 0)


def single_keys(fleet):
    """Keys that live apart from their slots."""
    fleet.cli("move", "--from", fleet.address(0), "--to", fleet.address(1), "--keys", "today:1*", "--wait")


def run(scenario, old, new):
    """Runs a scenario. Returns what the older binary did."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(folder)
        try:
            fleet.start(new)
            fleet.write("today", KEYS)
            scenario(fleet)
            fleet.stop()
            try:
                fleet.start(old)
                outcome = "serves"
                fleet.check()
                fleet.write("older", KEYS // 10)
                fleet.move_all(0, fleet.target)
                fleet.check()
                owned = fleet.slots()
                fleet.stop()
            except Refused as refusal:
                lines = [line for line in str(refusal).splitlines() if any(reason in line for reason in REFUSALS)]
                assert lines, f"the older binary does not start, and names no reason that is documented:\n{refusal}"
                assert fleet.state in lines[0], f"the error names no file: {lines[0]}"
                outcome, owned = f"refuses: {lines[0].replace(folder, '...')}", None
            fleet.start(new)
            fleet.check()
            assert owned is None or fleet.slots() == owned, f"slots were {owned}, and are {fleet.slots()}"
            fleet.write("again", KEYS // 10)
            fleet.move_all(fleet.target, 0)
            fleet.check()
            fleet.stop()
            return outcome
        except BaseException:
            with open(os.path.join(folder, "log"), encoding="utf-8") as log:
                sys.stderr.write(log.read())
            raise
        finally:
            fleet.end()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--commit", help="commit of the older binary")
    options.add_argument("--old", metavar="BINARY", help="the older binary, instead of a build")
    options.add_argument("--new", metavar="BINARY", help="today's binary, instead of a build")
    options = options.parse_args()
    if not shutil.which("redis-server"):
        sys.exit("missing: redis-server")
    with contextlib.ExitStack() as stack:
        new = options.new or build(ROOT, os.path.join(ROOT, "target"))
        old = options.old or stack.enter_context(older_binary(options.commit or introducing_commit()))
        for scenario in (slots, open_move, single_keys):
            print(f"{scenario.__name__}: {run(scenario, old, new)}", flush=True)
    print("all passed")


if __name__ == "__main__":
    main()
