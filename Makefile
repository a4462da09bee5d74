# One target per task. `make` alone lists them.
#
#   make demo          a demonstration on this machine, in a minute
#   make test          every test
#
# Both name missing packages and install them (Debian: by apt, as root or by sudo without a password), or only list them
# (SWITCHYARD_NO_INSTALL=1).

CARGO ?= cargo
# rustup's folder, for shells that have not read ~/.cargo/env.
export PATH := $(PATH):$(HOME)/.cargo/bin

# Cargo's target directory, for the shell of a recipe.
TARGET_DIR = $$($(CARGO) metadata --format-version 1 --no-deps --locked | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the tasks
	@echo "Tasks:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Settings: HOLD=1 (demo), TIME=60 (fuzz: seconds for each target; soak: seconds in all), SEEDS=10000 (sim), COUNT=100000 (soak-scripts), ARGS=... (demo, bench-peers, soak: more flags)"

.PHONY: demo
demo: ## a demonstration with real servers, in a minute; HOLD=1 keeps it running for redis-cli
	@scripts/install-deps.sh demo
	@echo "building the router (minutes the first time, seconds later)"
	@$(CARGO) build --locked --profile fast -p switchyard
	@target_dir=$(TARGET_DIR); \
	    exec "$$target_dir/fast/switchyard" demo $(if $(filter-out 0,$(HOLD)),--hold) $(ARGS)

.PHONY: test
test: ## every test: units, properties, and end to end against real servers and client libraries
	@scripts/install-deps.sh test
	@CARGO="$(CARGO)" scripts/test.py $(ARGS)

.PHONY: planted
planted: ## plants bugs in moves, hot copies, planner and autoscaler, one at a time: the tests must find each
	@scripts/install-deps.sh build
	$(CARGO) test --locked -p switchyard-sim -p switchyard-policy --features planted-bugs,research --test planted --test planner --test fleet --test switchkv planted -- --nocapture

.PHONY: test-large
test-large: ## tests with values of 512 MB, which need 2 GB of memory
	@scripts/install-deps.sh test
	$(CARGO) test --workspace --locked --test e2e -- --ignored --test-threads=1

.PHONY: test-upgrade
test-upgrade: ## today's state directory with the build that introduced its formats, and back (builds both; needs the git history)
	@scripts/install-deps.sh demo
	@CARGO="$(CARGO)" scripts/test-upgrade.py $(ARGS)

.PHONY: build
build: ## the optimised binary, in target/release/switchyard
	@scripts/install-deps.sh build
	$(CARGO) build --release --locked -p switchyard

STATIC := $(shell uname -m)-unknown-linux-musl
.PHONY: package
package: ## a tarball and a .deb of a static binary, in target/package
	@scripts/install-deps.sh package
	$(CARGO) build --release --locked --target $(STATIC) -p switchyard
	@target_dir=$(TARGET_DIR); \
	    scripts/package.sh "$$target_dir/$(STATIC)/release/switchyard" "$$target_dir/package"

.PHONY: fmt
fmt: ## format the code
	$(CARGO) fmt --all

.PHONY: lint
lint: ## the checks of CI besides the tests: formatting, and clippy without a warning; also advice on the English of changed lines
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --features research --locked -- -D warnings
	$(CARGO) clippy -p switchyard -p switchyard-product -p switchyard-control --all-targets --locked -- -D warnings
	$(CARGO) clippy -p switchyard-policy -p switchyard-sim --all-targets --features planted-bugs,research --locked -- -D warnings
	@base=$$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || echo HEAD); \
	    scripts/plain-english --change "$$base" 2>/dev/null || true

CHECKS ?=
.PHONY: deny
deny: ## licences, advisories, bans and sources of the dependencies; CHECKS="bans licenses" only these
	@scripts/install-deps.sh deny
	@PATH="$(TARGET_DIR)/tools/bin:$$PATH" $(CARGO) deny --workspace check $(CHECKS)

.PHONY: bench-peers
bench-peers: ## the router compared with twemproxy, HAProxy and Envoy in one run; writes docs/results/benchmarks.md
	@scripts/install-deps.sh bench
	$(CARGO) build --release --locked -p switchyard -p switchyard-lab
	@target_dir=$(TARGET_DIR); \
	    exec "$$target_dir/release/switchyard-lab" peers --out docs/results/benchmarks.md $(ARGS)

.PHONY: bench-hot-keys
bench-hot-keys: ## gain from hot copies, and their cost if no key is hot; writes docs/results/hot-keys.md
	@scripts/install-deps.sh bench
	$(CARGO) build --release --locked -p switchyard -p switchyard-lab
	@target_dir=$(TARGET_DIR); \
	    exec "$$target_dir/release/switchyard-lab" hot-keys --out docs/results/hot-keys.md $(ARGS)

.PHONY: bench-costs
bench-costs: ## cost per request of TLS, a limit on keys, a limit of the user, and a restricted user
	@scripts/install-deps.sh bench
	$(CARGO) build --release --locked -p switchyard -p switchyard-lab
	@target_dir=$(TARGET_DIR); \
	    exec "$$target_dir/release/switchyard-lab" peers --no-install --rows '50 clients' --tls \
	        --variant 'limit=--config $(CURDIR)/scripts/bench/limits.toml' \
	        --variant 'user bound=--set clients.default-user-rules=requests-per-second=100000000' \
	        --variant 'user rules=--set clients.default-user-rules=-@dangerous' \
	        --only 'switchyard,switchyard by TLS,switchyard limit,switchyard user bound,switchyard user rules,direct' $(ARGS)

.PHONY: compat
compat: ## public compatibility suites, from checkouts given by COMPAT_SUITE=DIR and VALKEY_TESTS=DIR; see docs/results/compatibility.md
	@scripts/install-deps.sh test
	$(CARGO) build --locked --profile fast -p switchyard
	@target_dir=$(TARGET_DIR); \
	    venv=$$target_dir/compat-venv; \
	    [ -x $$venv/bin/python ] || { python3 -m venv $$venv && $$venv/bin/pip install --quiet "redis>=4.3.4,<6" pyyaml; }; \
	    exec $$venv/bin/python scripts/compat/compat.py --switchyard "$$target_dir/fast/switchyard" --out docs/results/compatibility.md $(ARGS)

.PHONY: compat-clients
compat-clients: ## suites of client libraries, from checkouts given by REDIS_PY=DIR, GO_REDIS=DIR and IOREDIS=DIR; see CONTRIBUTING.md
	@scripts/install-deps.sh test
	$(CARGO) build --locked --profile fast -p switchyard
	@target_dir=$(TARGET_DIR); \
	    exec python3 scripts/compat/clients.py --switchyard "$$target_dir/fast/switchyard" --cache "$$target_dir/compat-clients" \
	        --out docs/results/compatibility.md $(ARGS)

SEEDS ?= 10000
.PHONY: sim
sim: ## moves in a simulated world: SEEDS seeds in each scenario, and every planted bug must be found
	$(CARGO) build --locked --profile fast -p switchyard-lab
	@target_dir=$(TARGET_DIR); \
	    "$$target_dir/fast/switchyard-lab" sim sweep --seeds $(SEEDS) $(ARGS)
	@$(MAKE) planted

KEYS ?= 10000
.PHONY: twemproxy-placement
twemproxy-placement: ## places KEYS keys with a real nutcracker, every hash and distribution: each key on the same server
	SWITCHYARD_PLACEMENT_KEYS=$(KEYS) $(CARGO) test --locked -p switchyard-control --test nutcracker -- --nocapture

TIME ?= 60
.PHONY: soak
soak: ## moves with faults for TIME seconds, under clients whose histories must be linearizable
	@scripts/install-deps.sh test
	$(CARGO) build --locked --profile fast -p switchyard -p switchyard-lab
	@target_dir=$(TARGET_DIR); \
	    (cd tests-clients/history-check && go build -buildvcs=false -o "$$target_dir/history-check" .) && \
	    exec "$$target_dir/fast/switchyard-lab" soak --checker "$$target_dir/history-check" --time $(TIME)s $(ARGS)

COUNT ?= 100000
.PHONY: soak-scripts
soak-scripts: ## COUNT random scripts and functions: replies as from one server, and no key at a wrong node
	@scripts/install-deps.sh test
	SWITCHYARD_E2E_SCRIPTS=$(COUNT) $(CARGO) test --locked -p switchyard --test e2e script_generator:: -- --nocapture

.PHONY: miri
miri: ## tests of `unsafe` blocks with Miri (needs a nightly toolchain)
	@$(CARGO) +nightly miri --version >/dev/null 2>&1 || { echo "missing: Miri; get it with: rustup component add miri rust-src --toolchain nightly" >&2; exit 1; }
	@# Not sys::send_batch: Miri has no io_uring.
	$(CARGO) +nightly miri test --locked -p switchyard-router --lib sys::heap::

.PHONY: sbom
sbom: ## name, version, licence and source of every dependency of the binary
	@$(CARGO) tree --locked -p switchyard -e normal --target all --prefix none --format '{p} | {l} | {r}' | sort -u

.PHONY: fuzz
fuzz: ## each fuzz target for TIME seconds (needs a nightly toolchain; builds cargo-fuzz first if it is missing)
	@scripts/install-deps.sh fuzz
	@$(CARGO) +nightly --version >/dev/null 2>&1 || { echo "missing: a nightly toolchain; get it with: rustup toolchain install nightly" >&2; exit 1; }
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { echo "building cargo-fuzz, once ..."; $(CARGO) install --locked cargo-fuzz; }
	@# New inputs go to target/; the seeds in fuzz/corpus are reviewed and committed.
	@cd fuzz && set -e; for target in $$($(CARGO) +nightly fuzz list --fuzz-dir .); do \
	    echo "== $$target, $(TIME) s"; \
	    mkdir -p "../target/fuzz-corpus/$$target" "corpus/$$target"; \
	    $(CARGO) +nightly fuzz run --fuzz-dir . "$$target" "../target/fuzz-corpus/$$target" "corpus/$$target" -- \
	        -max_total_time=$(TIME) -timeout=10 -rss_limit_mb=2048; \
	done

.PHONY: fuzz-corpus
fuzz-corpus: ## copies the few inputs of `make fuzz` that reach all of its code to fuzz/corpus, for a commit
	@cd fuzz && set -e; for target in $$($(CARGO) +nightly fuzz list --fuzz-dir .); do \
	    few=$$(mktemp -d); \
	    $(CARGO) +nightly fuzz run --fuzz-dir . "$$target" "$$few" "../target/fuzz-corpus/$$target" "corpus/$$target" -- \
	        -set_cover_merge=1 -use_counters=0; \
	    rm -f "corpus/$$target"/found-*; \
	    for input in "$$few"/*; do mv "$$input" "corpus/$$target/found-$$(basename "$$input" | cut -c1-12)"; done; \
	    rmdir "$$few"; \
	done
