# sconce for CPUs: one binary on a slim base, run by an ordinary user. The model is
# not in the image: mount a folder (see docker-compose.yml), or give SCONCE_POOL__0__MODEL a Hugging
# Face id and a volume for HF_HOME.

FROM rust:1-bookworm AS build
WORKDIR /build
# The dependencies alone, over empty libraries: built again only when the lock file changes. They
# hold C (oniguruma, ring, mimalloc), which needs this stage's compiler and nothing at run time.
COPY Cargo.toml Cargo.lock ./
COPY crates/broker-stream/Cargo.toml crates/broker-stream/
COPY crates/kernels/Cargo.toml crates/kernels/
COPY crates/phonemes/Cargo.toml crates/phonemes/
RUN mkdir src crates/broker-stream/src crates/kernels/src crates/phonemes/src \
 && echo 'fn main() {}' > src/main.rs \
 && touch src/lib.rs crates/broker-stream/src/lib.rs crates/kernels/src/lib.rs crates/phonemes/src/lib.rs \
 && cargo build --release --locked \
 && rm -r src crates/broker-stream/src crates/kernels/src crates/phonemes/src
COPY build.rs ./
COPY crates crates
COPY src src
# For `sconce --version`, as there is no repository here: --build-arg SCONCE_COMMIT=$(git rev-parse --short=12 HEAD)
ARG SCONCE_COMMIT
# Newer than the empty ones, or cargo would take those for current.
RUN find src crates -name '*.rs' -exec touch {} + \
 && cargo build --release --locked

FROM debian:bookworm-slim
# For amqps:// and for fetching models.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /build/target/release/sconce /usr/local/bin/sconce
COPY LICENSE-APACHE LICENSE-MIT /usr/share/doc/sconce/
COPY src/model/sound/voice/LICENSE.silero /usr/share/doc/sconce/LICENSE-silero-vad
# The one folder that may be written to; a named volume mounted there takes over its owner.
RUN mkdir -p /var/cache/huggingface && chown 10001:10001 /var/cache/huggingface
ENV HF_HOME=/var/cache/huggingface
USER 10001:10001
WORKDIR /tmp
# Named, so that Docker takes no other signal for a stop: a launcher that was sent HUP is still restarted if it fails.
STOPSIGNAL SIGTERM
ENTRYPOINT ["sconce"]
CMD ["launch"]
