#!/usr/bin/env bash
# Build serve and train-cpu and try them in the engine that answers; says why where none does.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! docker info >/dev/null 2>&1; then
    echo "images-test: skipped, no container engine answers at ${DOCKER_HOST:-/var/run/docker.sock}"
    exit 0
fi
docker/build.sh serve train-cpu
"${PYTHON:-python3}" -m pytest -n0 tests/docker
