# One command runs all that is checked before a change lands; .ci/run is the same list on a new machine.

.PHONY: check fmt clippy test doc deploy-check demo bench

check: fmt clippy test doc deploy-check

fmt:
	cargo fmt --check

clippy:
	cargo clippy --locked --all-targets -- -D warnings

test:
	cargo test --locked

doc:
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --locked --no-deps --features testing --document-private-items

deploy-check:
	deploy/check

demo:
	cargo run --release --locked -- demo

bench:
	cargo bench --locked
