#!/usr/bin/env bash
# Runs a script as root on a copy of this machine, booted by a real systemd. The machine itself is not changed.
#
#   scripts/sandbox.sh SCRIPT [FILE...]
#
# The copy is a temporary overlay with its own namespaces: processes, mounts, network, host name. The script runs in /sandbox,
# next to the files, and its output appears here. Exit code 77: this machine does not allow it (it needs root and mounts).
# Exit code 76: the package in the message is missing.
set -euo pipefail

cannot() {
    echo "no sandbox: $*" >&2
    exit 77
}

lacks() {
    echo "no sandbox: $*" >&2
    exit 76
}

# Starts the first process of the copy.
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

if [ "${1-}" = --boot ]; then
    boot "$2"
fi
if [ $# -eq 0 ]; then
    echo "usage: $0 SCRIPT [FILE...]" >&2
    exit 2
fi
[ "$(id -u)" -eq 0 ] || cannot "only root can mount"
for tool in unshare nsenter ip; do
    command -v "$tool" >/dev/null || lacks "$tool is not here (packages util-linux and iproute2)"
done
[ -x /lib/systemd/systemd ] || lacks "systemd is not here (package systemd)"

work=$(mktemp -d)
unshared=
end() {
    if [ -n "$unshared" ]; then
        kill -9 "$unshared" 2>/dev/null || true
        wait "$unshared" 2>/dev/null || true
    fi
    umount -l "$work/root" "$work" 2>/dev/null || true
    rmdir "$work"
}
trap end EXIT
# A tmpfs, because a container's root is an overlay, and an overlay cannot lie on an overlay.
mount -t tmpfs tmpfs "$work" 2>/dev/null || cannot "mounts are not allowed"
root=$work/root
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root" 2>/dev/null || cannot "overlays are not allowed"
mkdir "$root/sandbox"
cp "$@" "$root/sandbox"

# All processes of the copy end with its first process, which ends with this script.
unshare --pid --fork --kill-child --mount --uts --ipc --net --cgroup "$0" --boot "$root" >"$work/console" 2>&1 </dev/null &
unshared=$!
for _ in $(seq 600); do
    first=$(cut -d ' ' -f 1 "/proc/$unshared/task/$unshared/children" 2>/dev/null) || true
    enter=(nsenter -t "${first:-0}" -m -p -n -u -i chroot "$root")
    # Compares the output: before systemd is the first process, `systemctl` sees a chroot, does nothing and succeeds.
    if [ -n "$first" ] && [ "$("${enter[@]}" systemctl is-active basic.target 2>/dev/null)" = active ]; then
        "${enter[@]}" env -C /sandbox -i PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/root TERM=dumb PAGER=cat \
            DEBIAN_FRONTEND=noninteractive bash "$(basename "$1")" </dev/null
        exit
    fi
    kill -0 "$unshared" 2>/dev/null || break
    sleep 0.1
done
cat "$work/console" >&2
cannot "systemd does not run in namespaces"
