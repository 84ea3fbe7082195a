# `make` lists what there is. Needs cargo, a C compiler, curl, and for the tests python3.

CARGO = cargo
MODEL = models/all-MiniLM-L6-v2
# Of `make soak`.
SEED = 20261121
RATE = 40

.PHONY: help build wheel address program cuda gpu-check models demo demo-images demo-generate demo-speech demo-python unit test test-without-lint models-of-tests test-rabbitmq-4 check-deploy check-rust-version soak bench bench-parts fuzz lint fmt default-settings image

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

# How many of the crates are compiled is shown in a log too.
build: export CARGO_TERM_PROGRESS_WHEN = always
build: export CARGO_TERM_PROGRESS_WIDTH = 80
build: ## the program: target/release/sconce; the first time takes 10 to 16 minutes on two cores
	@test -x target/release/sconce || echo "compiling sconce first: 10 to 16 minutes on two cores" >&2
	$(CARGO) build --release --locked

wheel: build ## what pip installs, the program and the Python client: target/dist/*.whl
	scripts/ensure-pip
	scripts/release wheel
	scripts/release package $$(uname -m)-unknown-linux-gnu target/release/sconce

address: ## say in all files where releases are published: make address REPOSITORY=https://github.com/owner/sconce
	scripts/release set_address "$(REPOSITORY)"

# Looked for once, when a demo needs it.
INSTALLED = $(eval INSTALLED := $(shell scripts/installed-program))$(INSTALLED)
PROGRAM = $(or $(INSTALLED),target/release/sconce)
program:
	@if [ -n "$(INSTALLED)" ]; then echo "using $(INSTALLED), which is of this commit" >&2; else $(MAKE) build; fi

cuda: ## with CUDA in it, without a toolkit: target/cuda/release/sconce; CUDA_COMPUTE_CAP=80
	scripts/build-cuda

gpu-check: ## on a machine with a GPU and PyTorch: what it computes, and how fast: make gpu-check ARGS="--rounds 3"
	scripts/gpu-check $(ARGS)

models: ## fetch the default model into models/
	scripts/fetch-model

demo: program models ## embed 820 texts without a broker and show which sentences are alike
	examples/demo/run "$(PROGRAM)" $(MODEL)

demo-images: program ## classify six photographs, and order answers to questions, without a broker
	scripts/fetch-efficientnet
	examples/demo/images "$(PROGRAM)" models/efficientnet-lite0
	examples/demo/rerank "$(PROGRAM)"

demo-generate: program ## answer a dozen questions and summarise three texts, streamed, without a broker
	scripts/fetch-smollm2
	examples/demo/generate "$(PROGRAM)" models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf

demo-speech: program ## transcribe real recordings, speak sentences and transcribe them, without a broker
	scripts/fetch-whisper
	scripts/fetch-recordings
	scripts/fetch-hibari
	examples/demo/speech "$(PROGRAM)" models/whisper-tiny.en models/recordings
	examples/demo/speak "$(PROGRAM)" models/hibari models/whisper-tiny.en

demo-python: program models ## the first demo by a class in Python, with sentence-transformers; makes its .venv of some gigabytes
	examples/demo/python "$(PROGRAM)" $(MODEL)

# The models are fetched while clippy computes.
test: ## install what tests need (RabbitMQ), then lint and test everything
	scripts/setup-tests
	scripts/side-by-side target/models-of-tests.log '$(MAKE) lint' '$(MAKE) models-of-tests'
	$(MAKE) test-without-lint

UNIT = architecture offline pages request_memory
unit: ## the tests that need no broker, no network and no weights: about a minute, once compiled
	$(CARGO) test --locked --workspace --lib $(UNIT:%=--test %)

# Twice the cores: most tests over RabbitMQ wait. The Python client is tested meanwhile.
TEST_THREADS = $(shell echo $$((2 * $$(nproc))))
test-without-lint: ## the tests of `make test` alone
	scripts/setup-tests
	$(MAKE) models-of-tests
	$(CARGO) test --locked --workspace --no-run
	scripts/side-by-side target/check-python.log \
		'RUST_TEST_THREADS=$(TEST_THREADS) $(CARGO) test --locked --workspace' \
		'scripts/check-openai target/debug/sconce && scripts/check-python target/debug/sconce'

models-of-tests:
	scripts/fetch-model
	scripts/fetch-efficientnet
	scripts/fetch-smollm2
	scripts/fetch-gemma3
	scripts/fetch-whisper
	scripts/fetch-recordings
	scripts/fetch-hibari
	scripts/fetch-splade

soak: SECONDS = 3600
# The hostile requesters come alone and last, and in a release build: latencies are judged.
soak: ## an hour of faults, then forty minutes of hostile requesters: make soak SECONDS=1200 SEED=7 RATE=40
	scripts/setup-tests
	scripts/fetch-model
	scripts/fetch-efficientnet
	scripts/fetch-smollm2
	scripts/fetch-whisper
	scripts/fetch-recordings
	SOAK_SECONDS=$(SECONDS) SOAK_SEED=$(SEED) SOAK_RATE=$(RATE) \
		$(CARGO) test --locked --test soak -- --nocapture a_storm_of_faults
	SOAK_SECONDS=$(SECONDS) SOAK_SEED=$(SEED) \
		$(CARGO) test --locked --release --test soak -- --nocapture --test-threads=1 hostile_requesters

test-rabbitmq-4: ## the broker tests over RabbitMQ 4, which needs docker and the image
	SCONCE_TEST_RABBITMQ_IMAGE=rabbitmq:4-management $(CARGO) test --locked --test rabbitmq

bench: ## Celery, sentence-transformers, ONNX Runtime and us: make bench ROUNDS=3 TEXTS=1000 CORES=0,1
	benches/peers/run

# One thread, as a worker on its core has.
bench-parts: models ## kernels, forward passes, codec and batcher alone, by criterion
	scripts/fetch-efficientnet
	scripts/fetch-whisper
	RAYON_NUM_THREADS=1 CANDLE_NUM_THREADS=1 $(CARGO) bench --locked --workspace

lint: ## lock files, dependencies, formatting, clippy, documentation; warnings are errors
	@for manifest in Cargo.toml examples/Cargo.toml fuzz/Cargo.toml; do \
		$(CARGO) metadata --locked --format-version 1 --manifest-path $$manifest >/dev/null \
			|| { echo "$$manifest: run 'cargo update --workspace --manifest-path $$manifest'" >&2; exit 1; }; \
	done
	scripts/check-dependencies
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --workspace --no-default-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

RUST_VERSION = $(shell sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml)
check-rust-version: ## compile with the oldest Rust that is supported: `rust-version` in Cargo.toml; needs rustup
	rustup toolchain install $(RUST_VERSION) --profile minimal
	cargo +$(RUST_VERSION) check --locked --workspace --all-targets

check-deploy: ## deploy/, the compose file and the workflows, by promtool, Prometheus, schemas, systemd and linters
	scripts/check-deploy

SECONDS = 60
fuzz: SECONDS = 60
fuzz: ## fuzz every decoder for a minute each, or SECONDS=600; no nightly compiler needed
	scripts/fuzz $(SECONDS)

default-settings: ## write config/default.toml and the list of options in docs/models.md from their definitions
	WRITE_DEFAULT_SETTINGS=1 $(CARGO) test --locked --lib -- the_default_file_is_made the_docs_list_the_options

fmt: ## format the sources
	$(CARGO) fmt --all

image: ## the container image: sconce
	docker build -t sconce --build-arg SCONCE_COMMIT=$$(git rev-parse --short=12 HEAD) .
