#!/usr/bin/env bash
# Build images of routewright and print their sizes: docker/build.sh [serve|train|train-cpu ...]   (all of them unless named)
# REGISTRY: what comes before routewright-<target> (localhost). PYTHON_IMAGE: the base, by digest in a release (docs/cluster.md).
# TORCH_FROM: pip options that find PyTorch without CUDA. Each image's bill of materials goes to dist/<target>.cdx.json.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git describe --always --dirty --abbrev=40 --match= 2>/dev/null || echo unknown)
arguments=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
for name in PYTHON_IMAGE TORCH_FROM PIP_INDEX_URL; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done

mkdir -p dist
[ $# -gt 0 ] || set -- serve train-cpu train
for target; do
    image=${REGISTRY:-localhost}/routewright-$target:$version
    docker build ${DOCKER_BUILD_OPTIONS:-} "${arguments[@]}" --target "$target" --tag "$image" --file docker/Dockerfile .
    container=$(docker create "$image")
    docker cp --quiet "$container:/opt/routewright/sbom.cdx.json" "dist/$target.cdx.json"
    docker rm "$container" >/dev/null
    echo "$image: $(($(docker image inspect --format '{{.Size}}' "$image") / 1000000)) MB, dist/$target.cdx.json lists its packages"
done
