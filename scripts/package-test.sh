#!/usr/bin/env bash
# Installs a .deb and runs its service under a real systemd, without touching this machine.
#
#   scripts/package-test.sh FILE.deb
#
# A copy of this machine's files (an overlay that is thrown away) is booted by systemd in namespaces of its own: processes, mounts,
# network, host name. Needs root, systemd, redis-server and Debian's dpkg. Exit code 77: this machine cannot do that.
set -euo pipefail

if [ "${1-}" != inside ]; then
    deb=$(realpath "$1")
    for tool in dpkg unshare nsenter redis-server redis-cli; do
        command -v "$tool" >/dev/null || { echo "skipped: $tool is not here" >&2; exit 77; }
    done
    [ -x /lib/systemd/systemd ] || { echo "skipped: systemd is not here" >&2; exit 77; }
    work=$(mktemp -d)
    # A tmpfs, because an overlay cannot lie on another overlay, which is what a container's root is.
    if ! { mount -t tmpfs tmpfs "$work" && mkdir "$work/upper" "$work/work" "$work/root" &&
        mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"; } 2>/dev/null; then
        umount -l "$work" 2>/dev/null || true
        rmdir "$work"
        echo "skipped: mounts are not allowed here" >&2
        exit 77
    fi
    trap 'umount -l "$work/root" "$work"; rmdir "$work"' EXIT
    cp "$deb" "$work/root/switchyard.deb"
    cp "$0" "$work/root/package-test.sh"
    chmod 755 "$work/root/package-test.sh"
    # The whole tree of processes ends with its first one, and that one with this script.
    unshare --pid --fork --kill-child --mount --uts --ipc --net --cgroup "$0" inside boot "$work/root" >"$work/console" 2>&1 </dev/null &
    unshared=$!
    trap 'kill -9 "$unshared" 2>/dev/null || true; wait "$unshared" 2>/dev/null || true; umount -l "$work/root" "$work"; rmdir "$work"' EXIT
    for _ in $(seq 300); do
        first=$(cat "/proc/$unshared/task/$unshared/children" 2>/dev/null | cut -d ' ' -f 1) || true
        if [ -n "${first-}" ] && [ "$(readlink "/proc/$first/exe" 2>/dev/null)" != "$(readlink -f /bin/bash)" ] &&
            nsenter -t "$first" -m -p -n -u -i chroot "$work/root" systemctl is-active --quiet basic.target 2>/dev/null; then
            nsenter -t "$first" -m -p -n -u -i chroot "$work/root" /package-test.sh inside check
            exit
        fi
        if ! kill -0 "$unshared" 2>/dev/null; then
            break
        fi
        sleep 0.1
    done
    cat "$work/console" >&2
    echo "skipped: systemd does not run in namespaces here" >&2
    exit 77
fi

boot() {
    mount -t proc proc "$1/proc"
    mount -t tmpfs tmpfs "$1/run"
    mount -t tmpfs tmpfs "$1/tmp"
    mount -t sysfs -o ro sysfs "$1/sys"
    mount --rbind /dev "$1/dev"
    if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
        mount -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
    else
        mount -t tmpfs tmpfs "$1/sys/fs/cgroup"
        mkdir "$1/sys/fs/cgroup/systemd"
        mount -t cgroup -o none,name=systemd cgroup "$1/sys/fs/cgroup/systemd"
    fi
    ip link set lo up
    exec chroot "$1" env container=lxc /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=no
}

fail() {
    echo "FAILED: $*" >&2
    systemctl status --no-pager switchyard >&2 || true
    journalctl --no-pager -u switchyard >&2 || true
    exit 1
}

# is WHAT EXPECTED COMMAND...
is() {
    local what=$1 expected=$2 got
    shift 2
    got=$("$@" 2>&1) || fail "$what: $* ended with $?: $got"
    [ "$got" = "$expected" ] || fail "$what: $* gave $got, not $expected"
    echo "ok: $what"
}

check() {
    export PAGER=cat DEBIAN_FRONTEND=noninteractive
    dpkg --install /switchyard.deb || fail "dpkg --install"
    is "a version" "switchyard" sh -c 'switchyard --version | cut -d " " -f 1'
    is "not started by the installation" inactive sh -c 'systemctl is-active switchyard || true'
    systemd-analyze verify /usr/lib/systemd/system/switchyard.service || fail "the unit"

    redis-server --port 6379 --save '' --daemonize yes >/dev/null
    for _ in $(seq 100); do redis-cli ping >/dev/null 2>&1 && break; sleep 0.1; done
    redis-cli set before 1 >/dev/null

    systemctl enable --now switchyard || fail "systemctl enable --now"
    is "it runs" active systemctl is-active switchyard
    is "the server's key is there" 1 redis-cli -p 6380 get before
    is "it runs as nobody in particular" switchyard sh -c 'ps -o user= -p $(systemctl show -P MainPID switchyard)'
    is "status in systemctl" yes sh -c 'systemctl show -P StatusText switchyard | grep -q node && echo yes'
    switchyard status || fail "status"

    echo 'clients.no-such-key = 1' >>/etc/switchyard.toml
    systemctl reload switchyard 2>/dev/null && fail "a reload with a mistake in the file has passed"
    sed -i '$d' /etc/switchyard.toml
    systemctl reload switchyard || fail "systemctl reload"
    is "it still runs" 1 redis-cli -p 6380 get before

    redis-server --port 7002 --save '' --daemonize yes >/dev/null
    for _ in $(seq 100); do redis-cli -p 7002 ping >/dev/null 2>&1 && break; sleep 0.1; done
    switchyard nodes add 127.0.0.1:7002 --rebalance || fail "nodes add"
    systemctl restart switchyard || fail "systemctl restart"
    is "the map outlives a restart" "2 nodes" sh -c 'switchyard nodes list --json | grep -o "\"address\":" | wc -l | sed "s/$/ nodes/"'

    systemctl stop switchyard
    is "stopped, not failed" "success 0" sh -c 'echo $(systemctl show -P Result switchyard) $(systemctl show -P ExecMainStatus switchyard)'
    echo 'nonsense = 1' >/etc/switchyard.toml
    systemctl start switchyard 2>/dev/null && fail "a start with a mistake in the file has passed"
    sleep 1
    is "a mistake is not tried again and again" 0 systemctl show -P NRestarts switchyard
    dpkg --remove switchyard || fail "dpkg --remove"
    is "removed" no sh -c 'command -v switchyard || echo no'
    is "the slot map stays" yes sh -c 'ls /var/lib/private/switchyard/* >/dev/null && echo yes'
    echo "all right"
}

"$2" "${@:3}"
