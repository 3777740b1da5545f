"""docker/ and the commands of the README: compose.yaml as Docker reads it, flags as vLLM's own parser takes them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fronts import DOCKER, nginx, nginx_conf, services
from running import needs
from serve import interpreter

import ocr

ROOT = Path(__file__).resolve().parents[1]

SERVERS = {
    "nvfp4-mtp": "ragarwal/chandra-ocr-2-nvfp4-mtp",
    "no-mtp": "ragarwal/chandra-ocr-2-nvfp4-mtp",
    "bf16": "datalab-to/chandra-ocr-2",
    "fp8": "datalab-to/chandra-ocr-2",
    "nvfp4": "dangvansam/chandra-ocr-2-NVFP4",
}


def healthcheck(service: dict[str, Any]) -> str:
    return " ".join(service["healthcheck"]["test"])


def test_every_profile_is_there() -> None:
    assert services().keys() == {*SERVERS, "client", "router", "nginx"}
    for name, service in services().items():
        assert service["profiles"] == [name]


@pytest.mark.parametrize("name", SERVERS)
def test_a_server(name: str) -> None:
    service = services()[name]
    assert service["command"][0] == SERVERS[name]
    assert all(isinstance(word, str) for word in service["command"])
    assert service["image"] == "docker.io/vllm/vllm-openai:v0.33.0"
    assert service["restart"] == "unless-stopped" and service["ipc"] == "host"
    assert "HF_TOKEN" in service["environment"]
    assert service["volumes"] == ["~/.cache/huggingface:/root/.cache/huggingface"]
    assert "127.0.0.1:8000/v1/models" in healthcheck(service).replace('f"http://{host}', "127.0.0.1")
    assert ("--speculative-config" in " ".join(service["command"])) == (name == "nvfp4-mtp")


def test_one_variable_says_how_many_gpus() -> None:
    for name in SERVERS:
        service = services(GPUS="8")[name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["count"] == 8 and device["capabilities"] == ["gpu"]
        assert "--data-parallel-size=8" in service["command"]


def test_nothing_is_published_beyond_this_machine() -> None:
    for name, service in services().items():
        assert service["network_mode"] == "host" and "ports" not in service, name
        command = service.get("command", "")
        words = command if isinstance(command, list) else shlex.split(command)
        if name in SERVERS:
            assert "--host=127.0.0.1" in words
        elif name == "router":
            assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "listen 127.0.0.1:8080;" in (DOCKER / "nginx.conf").read_text("utf-8")


def test_images_are_pinned() -> None:
    text = (DOCKER / "compose.yaml").read_text("utf-8") + (DOCKER / "Dockerfile").read_text("utf-8")
    images = re.findall(r"(?:^\s*image: |FROM )(\S+)", text, re.MULTILINE)
    assert len(images) >= 5
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_the_router() -> None:
    router = services(WORKERS="http://a:8000 http://b:8000")["router"]
    words = shlex.split(router["command"])
    at = words.index("--worker-urls")
    assert words[at + 1 : at + 3] == ["http://a:8000", "http://b:8000"]
    assert words[words.index("--policy") + 1] == "power_of_two"
    assert "--disable-circuit-breaker" not in words
    assert "/v1/models" in healthcheck(router)
    assert re.search(r"vllm-router==\d+\.\d+\.\d+", router["build"]["dockerfile_inline"])


def test_the_client() -> None:
    client = services()["client"]
    assert client["read_only"] and client["tmpfs"] == ["/tmp"] and client["cap_drop"] == ["ALL"]
    assert client["user"] not in ("root", "0", "0:0")
    lines = (DOCKER / "Dockerfile").read_text("utf-8").splitlines()
    assert 'ENTRYPOINT ["python", "/app/ocr.py"]' in lines and "USER 1000:1000" in lines
    for line in lines:
        if line.startswith("COPY"):
            for file in line.split()[1:-1]:
                assert (ROOT / file).exists() and f"!{file}" in (DOCKER / "Dockerfile.dockerignore").read_text("utf-8")


def test_compose_is_as_its_specification_says() -> None:
    """No docker is needed for this: a key that is misspelt or in the wrong place is found by the published schema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DOCKER / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_docker_reads_the_file() -> None:
    if not shutil.which("docker"):
        pytest.skip("no docker")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker has no compose")
    command = ["docker", "compose", "-f", str(DOCKER / "compose.yaml"), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GPUS": "2"}, check=False)
    assert done.returncode == 0, done.stderr


def test_nginx_reads_its_file(tmp_path: Path) -> None:
    conf = nginx_conf(tmp_path, (DOCKER / "nginx.conf").read_text("utf-8"))
    done = subprocess.run([nginx(), "-t", "-c", conf], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- flags


def shell_commands(text: str) -> list[list[str]]:
    """The commands of a Markdown file's code blocks, their continued lines joined."""
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(line, comments=True) for line in lines if line.count("'") % 2 == 0 and line.count('"') % 2 == 0]


def vllm_flags(command: list[str]) -> list[str] | None:
    """What `vllm serve` gets from a command, its model first; None for another command."""
    while command and re.match(r"[A-Z_]+=", command[0]):
        command = command[1:]
    if command[:2] == ["vllm", "serve"]:
        return command[2:]
    image = next((at for at, word in enumerate(command) if "vllm/vllm-openai" in word), None)
    return command[image + 1 :] if image is not None and "docker" in command else None


def server_commands() -> dict[str, list[str]]:
    found = {f"compose {name}": services()[name]["command"] for name in SERVERS}
    for file in sorted(ROOT.glob("*.md")) + sorted(DOCKER.glob("*.md")):
        for number, command in enumerate(shell_commands(file.read_text("utf-8"))):
            if flags := vllm_flags(command):
                found[f"{file.name} {number}"] = [re.sub(r"\$\{?\w+\}?", "1", flag) for flag in flags]
    return found


PARSE = """
import json, sys
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
make_arg_parser(parser.add_subparsers().add_parser("serve"))
parsed = {}
for name, flags in json.load(sys.stdin).items():
    try:
        args = parser.parse_args(["serve", *flags])
        wanted = "host", "served_model_name", "max_model_len"
        parsed[name] = {flag: getattr(args, flag) for flag in wanted}
    except (SystemExit, ValueError) as e:
        parsed[name] = {"refused": str(e)}
print("PARSED", json.dumps(parsed))
"""


def parse(commands: dict[str, list[str]]) -> tuple[dict[str, Any], str]:
    needs("vllm")
    done = subprocess.run(
        [str(interpreter("vllm")), "-c", PARSE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("PARSED ")), None)
    assert line, done.stderr[-2000:]
    return json.loads(line.removeprefix("PARSED ")), done.stderr


@pytest.mark.server
def test_vllm_takes_every_flag() -> None:
    commands = server_commands()
    wrong = {"a wrong flag": [*commands["compose bf16"], "--max-model-length-x=1"]}
    parsed, errors = parse(commands | wrong)
    assert "refused" in parsed.pop("a wrong flag")
    for name, got in parsed.items():
        assert "refused" not in got, f"{name}: {got} {errors[-2000:]}"
        assert got["host"] == "127.0.0.1", f"{name} listens to everybody"
        assert got["served_model_name"] == ["chandra"], name
        assert got["max_model_len"] >= ocr.MAX_TOKENS + ocr.PROMPT_TOKENS, name


def test_commands_are_found_in_markdown() -> None:
    text = "```sh\ndocker run --gpus all \\\n  docker.io/vllm/vllm-openai:v1 m/x --limit '{\"a\": 1}'\nls\n```\n"
    (docker, ls) = shell_commands(text)
    assert vllm_flags(docker) == ["m/x", "--limit", '{"a": 1}'] and vllm_flags(ls) is None
    assert vllm_flags(["A_MODE=x", "vllm", "serve", "m"]) == ["m"] and vllm_flags([]) is None
