# Tests the package like a user: installs, starts, reloads, restarts, stops and removes it. Run by scripts/sandbox.sh.
set -euo pipefail

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

dpkg --install ./*.deb || fail "dpkg --install"
is "a version" "switchyard" sh -c 'switchyard --version | cut -d " " -f 1'
is "not started by the installation" inactive sh -c 'systemctl is-active switchyard || true'
is "the binary names the file with its debug information" yes sh -c 'grep -a -q "switchyard-.*-linux-.*[.]debug" /usr/bin/switchyard && echo yes'
systemd-analyze verify /usr/lib/systemd/system/switchyard.service || fail "the unit"

redis-server --port 6379 --save '' --daemonize yes >/dev/null
for _ in $(seq 100); do redis-cli ping >/dev/null 2>&1 && break; sleep 0.1; done
redis-cli set before 1 >/dev/null

systemctl enable --now switchyard || fail "systemctl enable --now"
is "it runs" active systemctl is-active switchyard
is "the server's key is there" 1 redis-cli -p 6380 get before
is "it runs as a user of its own" switchyard sh -c 'ps -o user= -p $(systemctl show -P MainPID switchyard)'
is "status in systemctl" yes sh -c 'systemctl show -P StatusText switchyard | grep -q node && echo yes'
switchyard status || fail "status"
is "the package's file is the default one" yes sh -c 'switchyard check-config | grep -q "/etc/switchyard.toml:" && echo yes'
is "doctor looks at the state directory of the running router" 0 sh -c 'switchyard doctor 2>&1 | grep -c "its state directory is not" || true'
is "recover finds it, too" yes sh -c 'switchyard recover --dry-run 2>&1 | grep -q "a router runs on the state directory /var/lib/switchyard" && echo yes'

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
is "the slot map stays" yes sh -c 'ls /var/lib/switchyard/* >/dev/null && echo yes'
echo "all right"
