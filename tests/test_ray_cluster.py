"""ocr_ray.py on Ray itself, started on this machine: parity, kills, a router before two servers, a store with keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fronts import start_router
from running import a_pdf, block, environment, tree, until
from standin import Answer, Request, Standin, Status
from test_check import right

import ocr

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def requires(module: str, what: str) -> Any:
    """A package of CI's environment; elsewhere the test is skipped without it."""
    if os.environ.get("CI") == "true":
        return __import__(module)
    return pytest.importorskip(module, reason=f"{module} is not installed: pip install -r {what}")


requires("ray", "requirements-ray.txt")
from pyarrow import parquet  # noqa: E402

import ocr_ray  # noqa: E402

SCRIPT = Path(ocr_ray.__file__)


def says(request: Request) -> Answer:
    return Answer(block(f"this is {request.page}"))


class Started:
    """`python ocr_ray.py ...` with a temporary folder of its own, where a node keeps its pages."""

    def __init__(self, tmp_path: Path, *args: Any, url: str, **env: str):
        self.node = tmp_path / "node"
        self.node.mkdir(exist_ok=True)
        self.log = tmp_path / "stderr"
        # Ray's own folder has to have a short name.
        env |= {"TMPDIR": str(self.node), "RAY_TMPDIR": tempfile.gettempdir()}
        command = [sys.executable, str(SCRIPT), *map(str, args), "--url", url, "--json"]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(**env)
            )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """The driver, Ray and all that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def readers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return [child for child in children if "Map(Reader)" in " ".join(command_line(child))]
        return []

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Exit code, record and what was said."""
        out, _ = self.process.communicate(timeout=240)
        return self.process.returncode, json.loads(out) if out.startswith("{") else {}, self.log.read_text("utf-8")


def command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def run(tmp_path: Path, *args: Any, url: str, **env: str) -> tuple[int, dict[str, Any], str]:
    with Started(tmp_path, *args, url=url, **env) as started:
        return started.end()


def rows_in(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows by document's name and page; none may be there twice."""
    rows = [
        row for file in sorted((folder / "pages").glob("*.parquet")) for row in parquet.read_table(file).to_pylist()
    ]
    found = {(Path(row["document"]).name, row["page"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def a_shelf(folder: Path, documents: int, pages: int) -> Path:
    folder.mkdir()
    for i in range(documents):
        a_pdf(folder / f"d{i:02d}.pdf", pages, text=f"shelf {i} page")
    return folder


def test_pages_are_ocrs_own_and_stay_done(tmp_path: Path) -> None:
    shelf = a_shelf(tmp_path / "shelf", 6, 9)
    (shelf / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")

    def reads(request: Request) -> Answer | Status:
        return Status(400, "no such page") if int(request.page[:8], 16) % 16 == 0 else right(request) or says(request)

    with Standin(reads) as server:
        plain = ocr.run([shelf], tmp_path / "plain", ocr.Settings(url=server.url, check=False))
        server.reset()
        code, record, said = run(tmp_path, shelf, "--out", tmp_path / "rows", "--rows", "8", url=server.url)
        assert code == ocr.EXIT_INCOMPLETE, said
        counts = {status: plain.summary["pages"][status] for status in ("ok", "suspect", "failed")}
        assert record["pages"] == counts | {"cached": 0, "missing": 0} and counts["failed"]
        assert len(server.requests) == 54 + 2, "a request a page, and two test pages"
        assert "broken.pdf: the PDF is damaged" in said and "no such page" in said and "Traceback" not in said
        rows = rows_in(tmp_path / "rows")
        assert len(rows) == 54
        for (name, number), row in rows.items():
            page = tmp_path / "plain" / Path(name).stem / "pages" / f"{number:04d}.md"
            assert row["markdown"] == (page.read_text("utf-8") if page.exists() else None)
        exported = tmp_path / "exported"
        assert ocr_ray.main([str(tmp_path / "rows"), "--export", str(exported), "-q"]) == ocr.EXIT_INCOMPLETE
        texts = {name for name in tree(tmp_path / "plain") if name.endswith((".md", ".html"))}
        assert {name: tree(exported)[name] for name in texts} == {
            name: tree(tmp_path / "plain")[name] for name in texts
        }
        # Only what failed is asked again.
        server.answer = says
        server.reset()
        code, record, _ = run(tmp_path, shelf, "--out", tmp_path / "rows", "--no-check", url=server.url)
        assert len(server.requests) == counts["failed"] and record["in all"] == {"ok": 54, "suspect": 0, "failed": 0}
        assert len(rows_in(tmp_path / "rows")) == 54 and code == ocr.EXIT_INCOMPLETE


def test_a_killed_reader_costs_no_page(tmp_path: Path) -> None:
    shelf = a_shelf(tmp_path / "shelf", 8, 25)
    options = ("--out", tmp_path / "rows", "--rows", "16", "--concurrency", "16", "--no-check")
    with (
        Standin(says, seconds=0.8, jitter=0.5) as server,
        Started(tmp_path, shelf, *options, url=server.url) as started,
    ):
        for asked in (40, 110):
            until(lambda asked=asked: len(server.requests) >= asked, 120)
            started.readers()[0].kill()
        code, record, said = started.end()
        assert code == 0, said
        # Asked again is what was at the server when a reader died, and what was not on disk yet on a busy machine.
        assert len(server.requests) <= 200 + 2 * (16 + 24), len(server.requests)
    rows = rows_in(tmp_path / "rows")
    assert len(rows) == 200 and {row["status"] for row in rows.values()} == {"ok"}
    assert record["pages"]["ok"] == 200 and record["finished"]
    assert not list((tmp_path / "node").glob("chandra*/pages/*")), "nothing is left of the pages' own files"


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_a_run_goes_on_where_it_ended(tmp_path: Path, how: str) -> None:
    shelf = a_shelf(tmp_path / "shelf", 4, 25)
    options = ("--out", tmp_path / "rows", "--rows", "16", "--concurrency", "8", "--no-check")
    with Standin(says, seconds=0.5) as server:
        with Started(tmp_path, shelf, *options, url=server.url) as started:
            until(lambda: server.counts["200 stop"] >= 40, 120)
            if how == "SIGINT":
                started.process.send_signal(signal.SIGINT)
                code, record, said = started.end()
                assert code == ocr.EXIT_INTERRUPTED and record["stopped"] == "interrupted", said
            else:
                started.kill()
        answered = server.counts["200 stop"]
        server.reset()
        code, record, said = run(tmp_path, shelf, *options, url=server.url)
        assert code == 0 and record["in all"]["ok"] == len(rows_in(tmp_path / "rows")) == 100, said
        # What had its answer is not asked again, but for answers on their way to the disk.
        assert len(server.requests) <= 100 - answered + 32


def test_a_lost_node_costs_no_page(tmp_path: Path) -> None:
    shelf = a_shelf(tmp_path / "shelf", 8, 25)
    options = ("--out", tmp_path / "rows", "--rows", "16", "--concurrency", "8", "--no-check", "--workers", "1")
    nodes = subprocess.Popen(
        [sys.executable, str(SCRIPT.parent / "tests" / "ray_nodes.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    with nodes, Standin(says, seconds=0.8) as server:
        assert nodes.stdin and nodes.stdout
        try:
            address = next(line for line in nodes.stdout if line.startswith("address ")).split()[1]
            loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # as ray_nodes.py has it
            with Started(tmp_path, shelf, *options, "--address", address, url=server.url, **loopback) as started:
                until(lambda: len(server.requests) >= 80, 120)
                assert server.most_in_flight > 8, "readers on both nodes"
                nodes.stdin.write("drop\n")
                nodes.stdin.flush()
                code, record, said = started.end()
        finally:
            nodes.stdin.close()
            nodes.wait(60)
    assert code == 0 and record["in all"]["ok"] == len(rows_in(tmp_path / "rows")) == 200, said


@pytest.mark.server
def test_hosts_behind_a_router_come_and_go(tmp_path: Path) -> None:
    shelf = a_shelf(tmp_path / "shelf", 8, 25)
    options = ("--out", tmp_path / "rows", "--rows", "16", "--concurrency", "16", "--no-check", "--patience", "60")
    one, other = Standin(says, seconds=0.6), Standin(says, seconds=0.6)
    soon = ["--cb-timeout-duration-secs", "2", "--health-check-interval-secs", "1"]
    with (
        one,
        other,
        start_router([one.base, other.base], *soon) as url,
        Started(tmp_path, shelf, *options, url=url) as it,
    ):
        until(lambda: len(one.requests) + len(other.requests) >= 50, 120)
        assert min(len(one.requests), len(other.requests)) > 10, "pages go to both"
        other.stop()
        before = len(one.requests)
        until(lambda: len(one.requests) >= before + 30, 60)
        one.stop()  # none is left: the run waits
        waited = threading.Event()
        waited.wait(3)
        other.start()
        alone = len(other.requests)
        until(lambda: len(other.requests) >= alone + 10, 60)
        one.start()
        code, _, said = it.end()
    assert code == 0, said
    rows = rows_in(tmp_path / "rows")
    assert len(rows) == 200 and {row["status"] for row in rows.values()} == {"ok"}


def test_a_server_that_stays_away_ends_the_run_and_what_is_done_is_kept(tmp_path: Path) -> None:
    shelf = a_shelf(tmp_path / "shelf", 4, 25)
    options = ("--out", tmp_path / "rows", "--rows", "16", "--concurrency", "8", "--no-check", "--patience", "4")
    server = Standin(says, seconds=0.4)
    with server, Started(tmp_path, shelf, *options, url=server.url) as started:
        until(lambda: server.counts["200 stop"] >= 40, 120)
        server.stop()
        code, record, said = started.end()
        answered = server.counts["200 stop"]
        assert code == ocr.EXIT_NO_SERVER and "--patience" in record["stopped"], said
        assert len(rows_in(tmp_path / "rows")) >= answered - 32
        server.start()
        server.reset()
        code, record, said = run(tmp_path, shelf, *options, url=server.url)
        assert code == 0 and len(rows_in(tmp_path / "rows")) == 100, said
        assert len(server.requests) <= 100 - answered + 32


@pytest.fixture
def store() -> Iterator[str]:
    """An S3-compatible store on loopback that wants keys; its address."""
    requires("moto", "tests/requirements-s3.txt")
    # After the two calls that make the bucket and its owner every request must be signed by someone who may do it.
    code = (
        "import os, sys, threading; from moto.server import ThreadedMotoServer; "
        "server = ThreadedMotoServer('127.0.0.1', 0, verbose=False); server.start(); "
        "print(server.get_host_and_port()[1], flush=True); threading.Event().wait()"
    )
    env = environment(INITIAL_NO_AUTH_ACTION_COUNT="4")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as process:
        try:
            assert process.stdout
            port = next(line for line in process.stdout if re.fullmatch(r"\d+\n", line)).strip()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_a_store_with_keys(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boto3 = requires("boto3", "tests/requirements-s3.txt")
    aws = {"endpoint_url": store, "region_name": "us-east-1"}
    someone = {"aws_access_key_id": "someone", "aws_secret_access_key": "something"}
    iam = boto3.client("iam", **aws, **someone)
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    policy = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
    iam.put_user_policy(UserName="reader", PolicyName="all", PolicyDocument=json.dumps(policy))
    boto3.client("s3", **aws, **someone).create_bucket(Bucket="archive")
    keys = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
    s3 = boto3.client("s3", **aws, **keys)
    shelf = a_shelf(tmp_path / "shelf", 5, 3)
    for path in shelf.iterdir():
        s3.put_object(Bucket="archive", Key=f"scans/box 1/{path.name}", Body=path.read_bytes())
    s3.put_object(Bucket="archive", Key="scans/notes.txt", Body=b"no document")
    s3.put_object(Bucket="archive", Key="scans/cut.pdf", Body=b"%PDF-1.4 cut")
    env = {name.upper(): value for name, value in keys.items()} | {"AWS_ENDPOINT_URL": store, "AWS_REGION": "us-east-1"}
    with Standin(says) as server:
        rows = ("--out", "s3://archive/rows", "--no-check")
        wrong = env | {"AWS_SECRET_ACCESS_KEY": "wrong"}
        code, _, said = run(tmp_path, "s3://archive/scans", *rows, url=server.url, **wrong)
        assert code == ocr.EXIT_USAGE and "give keys that may read and write there" in said and "wrong" not in said
        assert not server.requests
        code, record, said = run(tmp_path, "s3://archive/scans", *rows, url=server.url, **env)
        assert code == ocr.EXIT_INCOMPLETE and record["pages"]["ok"] == 15, said
        assert "s3://archive/scans/cut.pdf: the PDF is damaged" in said
        written = s3.list_objects_v2(Bucket="archive", Prefix="rows/")["Contents"]
        assert any(item["Key"].startswith("rows/pages/") for item in written)
        told = s3.get_object(Bucket="archive", Key="rows/run.json")["Body"].read().decode()
        assert key["SecretAccessKey"] not in told and "archive/scans" in told
        # An address may hold what the environment holds here.
        door = f"s3://{key['AccessKeyId']}:{key['SecretAccessKey'].replace('/', '%2F').replace('+', '%2B')}@archive"
        query = f"?endpoint_override={store.removeprefix('http://')}&scheme=http&region=us-east-1"
        server.reset()
        manifest = tmp_path / "list.csv"
        manifest.write_text("document\n" + "".join(f"s3://archive/scans/box 1/d{i:02d}.pdf\n" for i in range(5)))
        code, record, said = run(tmp_path, manifest, "--out", f"{door}/rows{query}", "--no-check", url=server.url)
        assert not server.requests and record["documents"]["done before"] == 5, said
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        ocr_ray.file_system.cache_clear()
        assert ocr_ray.main(["s3://archive/rows", "--export", str(tmp_path / "e"), "--only", "d0*.pdf"]) == 0
    assert "e: 15 pages ok" in capsys.readouterr().out
    text = (tmp_path / "e/box 1/d03/d03.md").read_text("utf-8")
    assert text.count("this is") == 3 and not (tmp_path / "e/cut").exists()


def test_workers_and_readers_fit_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(*cores: int) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(n)}} for n in cores] + [{"Alive": False, "Resources": {}}]

    import ray

    def shape(cores: Sequence[int], readers: int | None = None, workers: int | None = None) -> tuple[int, int, int]:
        monkeypatch.setattr(ray, "nodes", lambda: nodes(*cores))
        return ocr_ray.shape(readers, workers)

    assert shape([2]) == (1, 2, 1)
    assert shape([16, 16, 16]) == (6, 8, 2)
    assert shape([0, 16]) == (2, 8, 2)  # a head node that takes no work
    assert shape([64], workers=4) == (16, 4, 1)
    assert shape([16], readers=1, workers=16) == (1, 16, 5)
