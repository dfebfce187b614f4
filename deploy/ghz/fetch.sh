#!/usr/bin/env bash
# Builds ghz with Go into .cache/bin for `make load`, where there is none yet (some minutes).
set -euo pipefail
cd "$(dirname "$0")/../.."
bin="$PWD/.cache/bin"
version=v0.121.0

if PATH="$bin:$PATH" command -v ghz >/dev/null; then
  exit 0
fi
if ! command -v go >/dev/null; then
  echo "there is no ghz, and building it needs Go 1.23 or newer (https://go.dev/dl): install Go and run this again," >&2
  echo "or put the ghz of https://github.com/bojand/ghz/releases/tag/$version on the PATH" >&2
  exit 1
fi
mkdir -p "$bin"
echo "building ghz $version into .cache/bin"
GOBIN="$bin" nice go install "github.com/bojand/ghz/cmd/ghz@$version"
