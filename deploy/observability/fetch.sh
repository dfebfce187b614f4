#!/usr/bin/env bash
# Gets Jaeger and Prometheus for `make observability-check` into .cache/bin, where they are missing.
# Jaeger is built with Go (some minutes); Prometheus is Debian's package, unpacked and not installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin="$PWD/.cache/bin"
mkdir -p "$bin"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

if ! PATH="$bin:$PATH" command -v jaeger-all-in-one >/dev/null; then
  command -v go >/dev/null || { echo "building Jaeger needs Go" >&2; exit 1; }
  # Its go.mod has a `replace`, with which `go install` refuses it: it becomes our module's own.
  jaeger=github.com/jaegertracing/jaeger version=v1.76.0
  cd "$work"
  go mod init fetch 2>/dev/null
  source="$(go mod download -json "$jaeger@$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')"
  sed 's#^module .*#module fetch#' "$source/go.mod" > go.mod
  cp "$source/go.sum" go.sum
  chmod u+w go.mod go.sum
  go mod edit -require "$jaeger@$version"
  echo "building Jaeger $version"
  GOFLAGS=-mod=mod go build -trimpath -ldflags "-s -w" -o "$bin/jaeger-all-in-one" "$jaeger/cmd/all-in-one"
fi

if ! PATH="$bin:$PATH" command -v promtool >/dev/null; then
  cd "$work"
  echo "fetching Prometheus"
  apt-get download --quiet prometheus
  dpkg -x prometheus_*.deb unpacked
  cp unpacked/usr/bin/prometheus unpacked/usr/bin/promtool "$bin"
fi
