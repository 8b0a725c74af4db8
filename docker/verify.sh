#!/usr/bin/env bash
# Builds and runs the deployment for real, as root, on a Debian machine without a running engine: base image, build, indexer, server, kill, reload, down.
# Everything that it starts lives in one temporary folder and is stopped and removed at the end. Usage: docker/verify.sh
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
cache=$here/.cache/docker
work=$(mktemp -d)
python=${PYTHON:-$here/.venv/bin/python}
mkdir -p "$cache" "$work/models" "$work/data"

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { say "FAILED: $*"; exit 1; }

# Debian's client builds with BuildKit by itself; a newer one elsewhere on PATH may lack its plugin.
export PATH=/usr/bin:$PATH
export DOCKER_HOST=unix://$work/docker.sock DOCKER_CONFIG=$work/config DOCKER_BUILDKIT=1
compose() { docker compose --file "$here/docker/compose.yaml" --env-file "$work/env" --profile cpu "$@"; }

finish() {
    code=$?
    trap - EXIT
    set +e  # clean up to the end, whatever fails
    [ -S "$work/docker.sock" ] && [ -f "$work/env" ] && compose down --timeout 10 >/dev/null 2>&1
    if [ -f "$work/pid" ]; then kill "$(cat "$work/pid")" 2>/dev/null; for _ in $(seq 50); do [ -f "$work/pid" ] || break; sleep 0.2; done; fi
    grep "$work" /proc/self/mounts | cut -d' ' -f2 | sort -r | xargs -r umount 2>/dev/null
    rm -rf "$work"
    if [ -e "$work" ] || grep -q "$work" /proc/self/mounts || { [ -n "${engine:-}" ] && kill -0 "$engine" 2>/dev/null; }; then say "FAILED: something was left in $work"; code=1; fi
    [ "$code" = 0 ] && say "engine stopped, everything removed; $SECONDS s in all"
    exit "$code"
}
trap finish EXIT

say "tools"
missing=()
for tool in dockerd:docker.io mmdebstrap:mmdebstrap curl:curl; do command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}"); done
if [ ${#missing[@]} -gt 0 ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; fi
mkdir -p "$DOCKER_CONFIG/cli-plugins"
BIN=$(dirname "$python") docker/check.sh  # fetches Compose where it is missing
ln -s "$cache/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"

say "engine"
dockerd --host "$DOCKER_HOST" --data-root "$work/root" --exec-root "$work/exec" --pidfile "$work/pid" --iptables=false --ip6tables=false \
    --bridge=none --storage-driver=overlay2 --oom-score-adjust=0 >"$work/dockerd.log" 2>&1 &
engine=$!
for _ in $(seq 100); do docker version >/dev/null 2>&1 && break; sleep 0.2; done
docker version >/dev/null 2>&1 || fail "the engine did not start: $(tail -3 "$work/dockerd.log")"

if [ ! -f "$cache/base.tar" ]; then
    say "base image (once)"
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$cache/base.partial.tar"
    mv "$cache/base.partial.tar" "$cache/base.tar"
fi
docker import "$cache/base.tar" eogp-debian >/dev/null
mkdir -p "$work/base/wheels"
cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$work/base/ca.crt"
# A folder of local wheels travels into the build's base, not into the image; without one the build fetches them like everything else.
[ -d "${PIP_FIND_LINKS:-}" ] && cp "$PIP_FIND_LINKS"/*.whl "$work/base/wheels/"
printf 'FROM eogp-debian\nCOPY ca.crt /etc/ssl/certs/ca-certificates.crt\nCOPY wheels /wheels\nENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_FIND_LINKS=/wheels\n' >"$work/base/Dockerfile"
docker build --quiet --network=host --tag eogp-build "$work/base" >/dev/null

say "build"
printf 'BASE=eogp-debian\nMODELS=%s/models\nDATA=%s/data\nMODEL=mine\nSTORE=mine\nAPI_KEYS=%s/api-keys.txt\nPUBLISH=127.0.0.1:18000\nMEMORY_LIMIT=8g\n' "$work" "$work" "$work" >"$work/env"
key=verify-$RANDOM$RANDOM$RANDOM
echo "$key admin verify" >"$work/api-keys.txt"
chmod 644 "$work/api-keys.txt"
docker build --network=host --build-arg BASE=eogp-debian --build-arg BUILD_BASE=eogp-build --target cpu --file docker/Dockerfile --tag eogp:cpu . >"$work/build.log" 2>&1 || fail "build: $(tail -20 "$work/build.log")"
size() { docker image inspect --format '{{.Size}}' "$1" | awk '{printf "%.2f GB", $1/1e9}'; }
say "image size: $(size eogp:cpu), of which the base image has $(size eogp-debian)"
[ "$(docker image inspect --format '{{.Size}}' eogp:cpu)" -lt 2000000000 ] || fail "the CPU image has 2 GB or more"

say "data; train and index in containers"
"$python" examples/demo/facts.py "$work/all" >/dev/null
head -n 300 "$work/all/train.jsonl" >"$work/data/train.jsonl"
sed -n 301,330p "$work/all/train.jsonl" >"$work/data/more.jsonl"
chmod -R a+rwX "$work/data" "$work/models"
compose run --rm --volume "$work/models:/out" indexer finetune /out/mine --data /data/train.jsonl --new gpt2 --layers 2 --width 64 --heads 2 \
    --vocabulary 600 --context 64 --epochs 2 --learning-rate 2e-3 >"$work/finetune.log" 2>&1 || fail "finetune: $(tail -5 "$work/finetune.log")"
compose run --rm indexer index /store/mine --model /models/mine --data /data/train.jsonl --bytes-per-example 32 >"$work/index.log" 2>&1 ||
    fail "index: $(tail -5 "$work/index.log")"

ask() {
    curl --silent --show-error --fail --max-time 20 --header "Authorization: Bearer $key" --header 'Content-Type: application/json' \
        --data '{"queries": [{"prompt": "The capital of Albania is", "completion": " Tirana"}], "top_k": 3}' http://127.0.0.1:18000/influence
}
field() { "$python" -c "import json, sys; print(json.load(sys.stdin)$1)"; }

say "up"
compose up --detach --wait --no-build server >"$work/up.log" 2>&1 || fail "up: $(tail -5 "$work/up.log"; compose logs server | tail -5)"
first=$(ask) || fail "no answer on the published port"
say "top proponent: $(field "['results'][0]['proponents'][0]['text']" <<<"$first")"
code=$(curl --silent --output /dev/null --write-out '%{http_code}' --data '{}' --header 'Content-Type: application/json' http://127.0.0.1:18000/influence)
[ "$code" = 401 ] || fail "a request without a key was answered $code, not 401"

container=$(compose ps --quiet server)
[ "$(docker exec "$container" id -u)" = 10001 ] || fail "the server runs as another user"
docker exec "$container" touch /opt/eogp/x 2>/dev/null && fail "the root file system can be written to"
say "user 10001, root file system read-only, health: $(docker inspect --format '{{.State.Health.Status}}' "$container"), memory: $(docker stats --no-stream --format '{{.MemUsage}}' "$container")"

say "kill -9 of the server's process"
kill -9 "$(docker inspect --format '{{.State.Pid}}' "$container")"
for _ in $(seq 120); do again=$(ask 2>/dev/null) && break; sleep 0.5; done
[ "$(field "['results'][0]['proponents']" <<<"${again:-{\}}")" = "$(field "['results'][0]['proponents']" <<<"$first")" ] || fail "the server did not come back with the same answer"
say "came back; restarts: $(docker inspect --format '{{.RestartCount}}' "$container")"

say "append, reload"
before=$(field "['generation']" <<<"$first")
compose run --rm indexer append /store/mine --model /models/mine --data /data/more.jsonl >"$work/append.log" 2>&1 || fail "append: $(tail -5 "$work/append.log")"
for _ in $(seq 60); do after=$(field "['generation']" <<<"$(ask)"); [ "$after" != "$before" ] && break; sleep 0.5; done
[ "$after" != "$before" ] || fail "the server still answers from $before"
say "generation $before -> $after"

say "down and up: the store stays"
began=$SECONDS
compose down --timeout 40 >/dev/null 2>&1
say "stopped in $((SECONDS - began)) s"
compose up --detach --wait --no-build server >/dev/null 2>&1 || fail "the second up"
[ "$(field "['generation']" <<<"$(ask)")" = "$after" ] || fail "the store was lost"
compose down --timeout 40 --volumes >/dev/null 2>&1
say "all passed"
