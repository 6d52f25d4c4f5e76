# One command runs all that is checked before a change lands; .ci/run is the same list on a new machine.

.PHONY: check fmt clippy test doc deploy-check instructions kubernetes faults measure trained demo bench

check: fmt clippy test doc deploy-check instructions

fmt:
	cargo fmt --check
	cargo fmt --check --manifest-path benches/decision/Cargo.toml

clippy:
	cargo clippy --locked --all-targets -- -D warnings

test:
	cargo test --locked

doc:
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --locked --no-deps --features testing --document-private-items

deploy-check:
	deploy/check

# What one decision costs, in instructions: the same on any machine.
instructions:
	benches/decision/check

# Against a real kube-apiserver, which is built first.
kubernetes:
	tests/kubernetes/run.sh

# Random faults over random traffic, and a checker; needs no other program.
SEED ?= 1
SECONDS ?= 600
faults:
	WARMROUTE_FAULTS_SEED=$(SEED) WARMROUTE_FAULTS_SECONDS=$(SECONDS) \
		cargo test --locked --test faults -- --ignored --nocapture faults_for_as_long_as_asked

# What tests measure and assert no time of: start and memory before 50 workers, the largest metrics page under load.
measure:
	cargo build --release --locked
	WARMROUTE_BIN=target/release/warmroute cargo test --release --locked --test cluster footprint -- --ignored --nocapture
	cargo test --release --locked --test metrics cost_of -- --ignored --nocapture

# The fastest binary, trained by requests over loopback: target/trained/warmroute.
trained:
	deploy/trained

demo:
	cargo run --release --locked -- demo

bench:
	cargo bench --locked
