"""One address for several servers, as docker/ sets it up: vllm-router and nginx, each in front of servers of a test.

- services: docker/compose.yaml, its variables filled in
- start_router, start_nginx: `with start_router([one.base, other.base]) as url:`, url being what ocr.py's --url gets
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from running import needs
from serve import free_port, interpreter

DOCKER = Path(__file__).resolve().parents[1] / "docker"
PLACES = re.compile(r"\$\{(\w+)(?::-((?:[^{}]|\$\{[^{}]*\})*))?\}")


def filled(text: str, **given: str) -> str:
    """A text with its ${NAME:-default} filled in, as Compose does."""
    while PLACES.search(text):
        text = PLACES.sub(lambda place: given.get(place[1]) or place[2] or "", text)
    return text


def services(**given: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML, of requirements-dev.txt")
    found: dict[str, Any] = yaml.safe_load(filled((DOCKER / "compose.yaml").read_text("utf-8"), **given))["services"]
    return found


@contextlib.contextmanager
def front(command: Sequence[str | Path], port: int, limit: float = 60.0) -> Iterator[str]:
    """Runs a command that passes requests on, from when it lists its servers' models; the address of its API."""
    url = f"http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + limit
            while not lists_models(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} did not start:\n{log.read()[-3000:].decode('utf-8', 'replace')}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def lists_models(url: str) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return bool(json.load(urllib.request.urlopen(f"{url}/models", timeout=5))["data"])
    return False


@contextlib.contextmanager
def start_router(servers: Sequence[str], *flags: str) -> Iterator[str]:
    """vllm-router, its flags those of docker/compose.yaml and then `flags`. Servers: http://host:port, no path."""
    needs("router")
    python = interpreter("router")
    assert python
    port = free_port()
    command = shlex.split(services(WORKERS=" ".join(servers), ROUTER_PORT=str(port))["router"]["command"])
    own = ["--prometheus-port", str(free_port()), "--log-level", "warning"]  # of which the first would be 29000 for all
    with front([python.with_name("vllm-router"), *command, *own, *flags], port) as url:
        yield url


def nginx() -> str:
    """Debian's nginx; its folder is on root's PATH only. Skips without it."""
    return (
        shutil.which("nginx") or shutil.which("/usr/sbin/nginx") or pytest.skip("no nginx: apt-get install nginx-light")
    )


def nginx_conf(folder: Path, text: str) -> Path:
    """The configuration where nobody in particular can run it: what nginx writes stays in the folder."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    text = f"pid {folder}/pid;\nerror_log stderr;\ndaemon off;\n" + text.replace("http {\n", "http {\n" + temporary, 1)
    (folder / "nginx.conf").write_text(text, "utf-8")
    return folder / "nginx.conf"


@contextlib.contextmanager
def start_nginx(servers: Sequence[str], folder: Path, away: str = "30s") -> Iterator[str]:
    """nginx as docker/nginx.conf has it, these servers in place of its own. away: how long a dead one is left out."""
    program, port = nginx(), free_port()
    text = (DOCKER / "nginx.conf").read_text("utf-8").replace("listen 127.0.0.1:8080;", f"listen 127.0.0.1:{port};")
    lines = text.replace("fail_timeout=30s", f"fail_timeout={away}").splitlines(keepends=True)
    (at,) = (n for n, line in enumerate(lines) if line.strip().startswith("server 127.0.0.1:8000 "))
    lines[at] = "".join(lines[at].replace("127.0.0.1:8000", server.removeprefix("http://")) for server in servers)
    with front([program, "-p", folder, "-c", nginx_conf(folder, "".join(lines))], port) as url:
        yield url
