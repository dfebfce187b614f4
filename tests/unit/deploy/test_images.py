"""deploy/Containerfile: what each image holds, and what it does not."""

from __future__ import annotations

import re

import pytest

from tandem import __version__
from tests.support.cluster.containerfile import CONTAINERFILE, STAGES
from tests.support.cluster.manifests import known_variables
from tests.support.repository import ROOT

DEPLOY = ROOT / "deploy"
MODULES = {
    "drafter": "drafter_svc",
    "target": "target_svc",
    "target-vllm": "target_svc",
    "orchestrator": "orchestrator",
}
BUILDS = {"orchestrator": "build-base", "target-vllm": "build-vllm"}


@pytest.mark.parametrize("name", MODULES)
def test_an_image_holds_what_it_runs_and_no_more(name: str) -> None:
    stage, module = STAGES[name], MODULES[name]
    assert f'ENTRYPOINT ["python", "-m", "{module}"]' in stage
    assert f"COPY --from=code /app/{module}/ {module}/" in stage
    assert "COPY --from=code /app/tandem/ tandem/" in stage
    for other in set(MODULES.values()) - {module}:
        assert other not in stage
    assert f"COPY --from={BUILDS.get(name, 'build-inference')} " in stage
    assert "inference" not in STAGES["build-base"]


def test_every_recipe_runs_with_the_models_of_its_image() -> None:
    """RECIPE=forest takes the second drafter from SECOND_MODEL."""
    for model in ("drafter", "boosted"):
        assert f"COPY models/{model}/ models/{model}/" in STAGES["drafter"]
    assert "COPY models/target/ models/target/" in STAGES["target"]
    assert "COPY models/" not in STAGES["orchestrator"]


@pytest.mark.parametrize("name", MODULES)
def test_nothing_runs_as_root_or_installs_in_the_last_stage(name: str) -> None:
    # A GPU's kernels need a compiler.
    runtime = "runtime" if name == "orchestrator" else "runtime-inference"
    assert f"FROM {runtime} AS {name}\n" in CONTAINERFILE
    assert STAGES["runtime-inference"].endswith("USER 65532:65532\n\n")
    assert "USER 65532:65532" in STAGES["runtime"]
    for stage in (STAGES["runtime"], STAGES[name]):
        assert "RUN " not in stage
        assert stage.count("USER ") <= 1


def test_what_is_installed_is_pinned_by_its_hash() -> None:
    for build in ("build", "build-base", "build-inference", "build-vllm"):
        assert "--require-hashes" in STAGES[build]


def test_code_is_compiled_where_it_may_be_written() -> None:
    """The root is read-only, and bytecode is not written again at each start."""
    assert "compileall" in STAGES["code"]
    assert "UV_COMPILE_BYTECODE=1" in STAGES["build"]
    for variable in ("HOME=/tmp", "XDG_CACHE_HOME=/tmp/", "HF_HOME=/tmp/"):
        assert variable in STAGES["runtime"]


def test_an_image_asks_no_model_hub() -> None:
    """No policy of deploy/kubernetes lets it through; a wrong path is to fail at once."""
    assert "HF_HUB_OFFLINE=1" in STAGES["runtime"]


def test_what_is_copied_is_in_the_context() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.M)
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    for path in " ".join(copied).split():
        assert f"!{path.rstrip('/')}" in ignored


def test_the_base_is_pinned_and_the_version_is_ours() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", CONTAINERFILE, re.M)
    assert re.search(r":3\.\d+\.\d+-slim-\w+$", base)
    assert f"ARG VERSION={__version__}\n" in CONTAINERFILE


def test_images_read_settings_that_there_are() -> None:
    used = set(re.findall(r"\bTANDEM_[A-Z_]+", CONTAINERFILE))
    assert used
    assert used <= known_variables()
