"""A run as a user sees it: the real command, its output tree, exit codes and words; resuming, Ctrl-C and kill -9."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import (
    Started,
    a_pdf,
    block,
    command,
    environment,
    looping,
    page_record,
    picture_id,
    processes_of_group,
    quick,
    read,
    tree,
    until,
)
from standin import Answer, Request, Standin, Status, made_up_page
from support import encode, one_page, picture

import ocr

__all__ = ["quick"]
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups are POSIX's")
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


# ---- What a run writes


def test_a_run_writes_the_tree_that_the_readme_shows(tmp_path: Path) -> None:
    scans = tmp_path / "scans" / "2024"
    scans.mkdir(parents=True)
    a_pdf(tmp_path / "report.pdf", 2)
    (scans / "letter.png").write_bytes(encode(picture(), "PNG"))
    figure = block("a chart", "Image") + block("Words below it.")
    with Standin(lambda request: Answer(figure + block(request.page))) as server:
        done = command("report.pdf", "scans", "--out", "out", server=server, cwd=tmp_path)
    out = tmp_path / "out"
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == sorted(
        [
            "run.json",
            *(f"report/{name}" for name in ("report.md", "report.html", "report.json", "source.json")),
            *(f"report/pages/000{page}.{kind}" for page in (1, 2) for kind in ("md", "html", "json")),
            *(f"report/images/000{page}-01.webp" for page in (1, 2)),
            *(f"2024/letter/{name}" for name in ("letter.md", "letter.html", "letter.json", "source.json")),
            *(f"2024/letter/pages/0001.{kind}" for kind in ("md", "html", "json")),
            "2024/letter/images/0001-01.webp",
        ]
    )
    first, second = (out / "report" / "report.md").read_text("utf-8").split("\n<!-- page 2 -->\n\n")
    assert first == (out / "report/pages/0001.md").read_text("utf-8").replace("../images/", "images/")
    assert second == (out / "report/pages/0002.md").read_text("utf-8").replace("../images/", "images/")
    assert "](images/0002-01.webp)" in second
    record = json.loads((out / "run.json").read_text("utf-8"))
    assert record["finished"] is True and record["stopped"] is None
    assert record["pages"] == {"ok": 3, "suspect": 0, "failed": 0, "cached": 0}
    assert record["settings"]["dpi"] == 150 and record["server"]["model"] == "chandra"


def test_pages_are_chosen_by_number(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 6)
    with Standin() as server:
        done = command("a.pdf", "--pages", "2,4-5", server=server, cwd=tmp_path)
        assert done.returncode == 0 and len(server.requests) == 3
    text = (tmp_path / "ocr_out/a/a.md").read_text("utf-8")
    assert [n for n in range(1, 7) if f"<!-- page {n} -->" in text] == [2, 4, 5]


# ---- What a run says


def test_a_run_closes_with_each_document_and_the_totals(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 2)
    (tmp_path / "b.pdf").write_bytes(b"no PDF at all")
    with Standin() as server:
        done = command("a.pdf", "b.pdf", "gone.pdf", server=server, cwd=tmp_path)
    assert done.returncode == 1
    assert "  a.pdf: 2 ok -> ocr_out/a/a.md" in done.stdout.replace("\\", "/")
    assert "  b.pdf: " in done.stdout and "2 pages ok, 0 suspect, 0 failed; " in done.stdout
    assert "ocr.py: gone.pdf: there is no such file or folder\n" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2


def test_json_is_the_summary_and_nothing_else(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    with Standin() as server:
        done = command("a.pdf", "--json", server=server, cwd=tmp_path)
    assert json.loads(done.stdout) == json.loads((tmp_path / "ocr_out/run.json").read_text("utf-8"))


def test_quiet_says_only_what_went_wrong_and_verbose_every_page(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 2)
    (tmp_path / "b.pdf").write_bytes(b"no PDF at all")
    with Standin() as server:
        quiet = command("a.pdf", "b.pdf", "-q", server=server, cwd=tmp_path)
        verbose = command("a.pdf", "-v", "--overwrite", server=server, cwd=tmp_path)
    assert quiet.stdout == "" and quiet.stderr.startswith("ocr.py: b.pdf: ") and quiet.stderr.count("\n") == 1
    for number in (1, 2):
        assert f"ocr.py: a.pdf, page {number}: ok, 1 attempt, " in verbose.stderr


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 3)
    often = "import sys, ocr; ocr.Progress.EVERY = 0.3; sys.exit(ocr.main())"
    with Standin(seconds=1.0) as server:
        done = subprocess.run(
            [sys.executable, "-c", often, "a.pdf", "--url", server.url, "--no-check", "--concurrency", "1"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    assert "ocr.py: 1 of 3 pages, " in done.stderr and "in flight" in done.stderr and "\r" not in done.stderr


@posix
def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    import fcntl
    import pty
    import struct
    import termios

    a_pdf(tmp_path / "a.pdf", 3)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with Standin(seconds=0.2) as server:
        process = subprocess.Popen(
            [sys.executable, ocr.__file__, "a.pdf", "--url", server.url, "--no-check"],
            cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 1 << 16):
                shown += data
        except OSError:  # the terminal's other end is closed
            pass
        os.close(ours)
        assert process.wait(30) == 0
    text = shown.decode()
    assert "| 3/3 pages [" in text and " pages/s, " in text and " tokens/s" in text


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    with Standin() as server, Started(tmp_path / "a.pdf", "--out", tmp_path / "out", server=server) as run:
        assert run.process.stdout and run.process.stderr
        run.process.stdout.close()
        err = run.process.stderr.read()
        assert run.process.wait(30) == 0 and err == ""
        run.process.stdout = None


# ---- Exit codes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give files or folders to read"),
        (["a.pdf", "--pages", "0"], "--pages: '0'"),
        (["a.pdf", "--dpi", "5"], "--dpi 5: give a number from 20 to 1200"),
        (["a.pdf", "--timeout", "0"], "--timeout 0: give a number"),
        (["a.pdf", "--patience", "nan"], "--patience nan: give a number"),
        (["a.pdf", "--url", "localhost:8000"], "write it like http://localhost:8000/v1"),
        (["a.pdf", "--math", "tex"], "--math"),
        (["a.pdf", "--password-file", "none.txt"], "--password-file none.txt: cannot be read"),
        (["@none.txt"], "@none.txt: "),
        (["a.pdf", "--out", "a.pdf"], "--out a.pdf: cannot be written"),
    ],
)
def test_bad_usage_is_exit_code_2_and_says_what_is_right(tmp_path: Path, args: list[str], words: str) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    with Standin() as server:
        asked = args if "--url" in args else [*args, "--url", server.url]
        done = command(*asked, cwd=tmp_path)
        assert server.requests == []
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_no_server_is_exit_code_3_and_says_how_to_start_one(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    done = command("a.pdf", "--url", "http://127.0.0.1:9/v1", cwd=tmp_path)
    assert done.returncode == 3 and not (tmp_path / "ocr_out").exists()
    assert "no server answers at http://127.0.0.1:9/v1/models" in done.stderr
    assert "docker run" in done.stderr and "--engine cpu" in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_model_or_key_is_exit_code_3_without_advice_to_start_a_server(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    with Standin(api_key="right") as server:
        done = command("a.pdf", server=server, cwd=tmp_path, OCR_API_KEY="wrong-key")
        other = command("a.pdf", "--model", "gpt", server=server, cwd=tmp_path, OCR_API_KEY="right")
    assert (done.returncode, other.returncode) == (3, 3)
    assert "OCR_API_KEY" in done.stderr and "wrong-key" not in done.stderr and "docker" not in done.stderr
    assert "does not serve 'gpt'; it serves: chandra" in other.stderr and "docker" not in other.stderr


def test_wait_is_for_a_server_that_starts(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    server = Standin().start()
    server.stop()
    with Started(tmp_path / "a.pdf", "--out", tmp_path / "out", "--wait", "60", server=server) as run:
        assert run.process.stderr and "waiting for it" in run.process.stderr.readline()
        server.start()
        code, _, _ = run.end()
    server.stop()
    assert code == 0


# ---- two at a time


def test_the_first_document_is_read_while_others_are_looked_for(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of few documents among very many other files takes long to look through."""
    first, later = a_pdf(tmp_path / "a.pdf", 1), a_pdf(tmp_path / "b.pdf", 1)
    asked, in_time = threading.Event(), []

    def says(request: Request) -> Answer:
        asked.set()
        return Answer(block(f"this is {request.page}"))

    def find_inputs(inputs: Any, out: Path) -> Iterator[Any]:
        yield ocr.Found(first, tmp_path, False)
        in_time.append(asked.wait(10))
        yield ocr.Found(later, tmp_path, False)
        yield tmp_path / "c.pdf", "there is no such file or folder"

    monkeypatch.setattr(ocr, "find_inputs", find_inputs)
    with Standin(says) as server:
        result = read([first, later], tmp_path / "out", server).result
    assert in_time == [True]
    assert sorted(document.source.name for document in result.documents) == ["a.pdf", "b.pdf", "c.pdf"]
    assert result.summary["pages"]["ok"] == 2


def test_a_search_that_breaks_ends_the_run(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_inputs(inputs: Any, out: Path) -> Iterator[Any]:
        yield ocr.Found(a_pdf(tmp_path / "a.pdf", 1), tmp_path, False)
        raise RuntimeError("no more")

    monkeypatch.setattr(ocr, "find_inputs", find_inputs)
    with Standin() as server, pytest.raises(RuntimeError, match="no more"):
        read([tmp_path], tmp_path / "out", server)


def test_two_runs_may_write_into_one_folder(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 12)
    out = tmp_path / "out"
    words = (tmp_path / "a.pdf", "--out", out, "--workers", "1")
    with Standin(seconds=0.05) as server:
        with Started(*words, server=server) as one, Started(*words, server=server) as other:
            ends = [run.end() for run in (one, other)]
        assert [code for code, _, _ in ends] == [0, 0], ends
    assert [ocr.read_json(path)["status"] for path in sorted((out / "a" / "pages").glob("*.json"))] == ["ok"] * 12
    assert len(ocr.read_json(out / "a" / "a.json")["pages"]) == 12
    assert not list(out.rglob("*.part"))


def test_each_writer_has_its_own_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    with ocr.written_whole(path) as first:
        first.write_text("first")
        time.sleep(0.001)
        with ocr.written_whole(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and [file.name for file in tmp_path.iterdir()] == ["a.md"]


def test_what_a_killed_run_left_half_written_is_cleared_the_day_after(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 1)
    pages = tmp_path / "out" / "a" / "pages"
    old, new = pages / "0001.md.1f-0.part", pages / "0002.md.1f-0.part"
    with Standin() as server:
        assert command(tmp_path / "a.pdf", "--out", tmp_path / "out", server=server).returncode == 0
        for part in (old, new):
            part.touch()
        os.utime(old, (0, 0))
        assert command(tmp_path / "a.pdf", "--out", tmp_path / "out", server=server).returncode == 0
    assert not old.exists() and new.exists()  # which another run may be writing


# ---- Ctrl-C


@linux
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_keeps_what_arrived_and_says_how_to_go_on(tmp_path: Path, how: str) -> None:
    a_pdf(tmp_path / "a.pdf", 12)
    out = tmp_path / "out"
    with Standin(seconds=0.15) as server:
        with Started(tmp_path / "a.pdf", "--out", out, "--concurrency", "2", server=server) as run:
            until(lambda: len(list(out.rglob("0*.json"))) >= 3)
            run.interrupt() if how == "Ctrl-C" else run.process.terminate()
            code, _, err = run.end()
            until(lambda: not run.children(), 5)
        assert code == 130 and "Traceback" not in err and "Run the same command again" in err
        done = len(list((out / "a" / "pages").glob("*.json")))
        assert 3 <= done < 12 and not list(out.rglob("*.part"))
        record = json.loads((out / "run.json").read_text("utf-8"))
        assert (record["finished"], record["stopped"], record["pages"]["ok"]) == (False, "interrupted", done)
        server.reset()
        assert command(tmp_path / "a.pdf", "--out", out, server=server).returncode == 0
        assert len(server.requests) == 12 - done


@linux
def test_ctrl_c_is_heard_at_once_even_while_workers_start(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 3)
    for wait in (0.3, 0.5, 0.7, 0.9):
        with (
            Standin(seconds=30) as server,
            Started(tmp_path / "a.pdf", "--out", tmp_path / "out", server=server) as run,
        ):
            time.sleep(wait)
            began = time.monotonic()
            run.interrupt()
            code, _, err = run.end()
            assert time.monotonic() - began < 5
            if wait > 0.6:  # before, Python itself is starting
                assert code == 130 and "Traceback" not in err
            until(lambda run=run: not run.children(), 5)  # type: ignore[misc]


# ---- Resuming


def by_seed(request: Request) -> Answer:
    """Some pages get their good reply only with the third request; the same whenever it is asked."""
    if int(request.page[0], 16) % 2 and request.fields["seed"] < 2:
        return looping(request.fields["seed"])
    return Answer(block("chart " + request.page[:8], "Image") + made_up_page(request.page, 400))


@pytest.mark.usefixtures("quick")
def test_a_rerun_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 5)
    with Standin(lambda r: Status(400) if r.page == picture_id("a.pdf", 4) else None) as server:
        assert read(document, tmp_path / "out", server).statuses == ["ok", "ok", "ok", "failed", "ok"]
        before = tree(tmp_path / "out")
        server.reset()
        again = read(document, tmp_path / "out", server)
        assert again.statuses == ["ok", "ok", "ok", "failed", "ok"] and again.result.exit_code == 1
        assert [request.page for request in server.requests] == [picture_id("a.pdf", 4)]
        assert tree(tmp_path / "out") == before
        (tmp_path / "out/a/pages/0002.json").unlink()
        server.reset()
        server.answer = None
        assert read(document, tmp_path / "out", server).statuses == ["ok"] * 5
        assert {request.page for request in server.requests} == {picture_id("a.pdf", n) for n in (2, 4)}
        server.reset()
        last = read(document, tmp_path / "out", server)
        assert server.requests == [] and all(page.cached for page in last.pages) and last.result.exit_code == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "changed", [{"dpi": 192}, {"max_tokens": 5000}, {"retries": 2}, {"loop_stop": True}, {"overwrite": True}], ids=str
)
def test_settings_that_change_the_reply_ask_anew(tmp_path: Path, changed: dict[str, Any]) -> None:
    document = a_pdf(tmp_path / "a.pdf", 2)
    with Standin() as server:
        read(document, tmp_path / "out", server)
        server.reset()
        read(document, tmp_path / "out", server, **changed)
        assert len(server.requests) == 2


@pytest.mark.usefixtures("quick")
def test_settings_that_change_the_files_only_write_them_anew(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 2)
    footer = block("page foot", "Page-Footer")
    maths = "so <math>x</math>"
    with Standin(lambda r: Answer(block(f"Text {r.page}, {maths}") + footer)) as server:
        read(document, tmp_path / "out", server)
        text = (tmp_path / "out/a/a.md").read_text("utf-8")
        assert "page foot" not in text and "$x$" in text
        server.reset()
        read(document, tmp_path / "out", server, headers_footers=True, math="brackets")
        text = (tmp_path / "out/a/a.md").read_text("utf-8")
        assert text.count("page foot") == 2 and r"\(x\)" in text and server.requests == []


@pytest.mark.usefixtures("quick")
def test_suspect_pages_are_asked_again_when_wanted(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 3)
    with Standin(lambda r: looping() if r.page == picture_id("a.pdf", 3) else None) as server:
        assert read(document, tmp_path / "out", server, retries=1).statuses == ["ok", "ok", "suspect"]
        server.reset()
        assert read(document, tmp_path / "out", server, retries=1).statuses == ["ok", "ok", "suspect"]
        assert server.requests == []
        server.answer = None
        assert read(document, tmp_path / "out", server, retries=1, retry_suspect=True).statuses == ["ok"] * 3
        assert [request.page for request in server.requests] == [picture_id("a.pdf", 3)]


@pytest.mark.usefixtures("quick")
def test_pages_with_the_same_reply_are_suspect_whichever_run_read_them(tmp_path: Path) -> None:
    document = a_pdf(tmp_path / "a.pdf", 3)
    with Standin(lambda r: Answer(block("The same words for all pages."))) as server:
        first = read(document, tmp_path / "out", server, pages="1")
        assert first.statuses == ["ok"]
        second = read(document, tmp_path / "out", server)
        assert second.statuses == ["suspect"] * 3 and second.pages[0].reasons == (ocr.TWIN,)
        assert page_record(tmp_path / "out", "a", 1)["status"] == "suspect"


@pytest.mark.usefixtures("quick")
def test_a_reply_that_cannot_be_read_fails_its_page_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = a_pdf(tmp_path / "a.pdf", 2)
    right = ocr.page_record

    def trips(job: ocr.PageJob) -> dict[str, Any]:
        if job.number == 1:
            raise RecursionError("too deep")
        return right(job)

    with Standin() as server:
        with monkeypatch.context() as patch:
            patch.setattr(ocr, "page_record", trips)
            run = read(document, tmp_path / "out", server)
            assert run.statuses == ["failed", "ok"] and "RecursionError: too deep" in str(run.pages[0].error)
        server.reset()
        assert read(document, tmp_path / "out", server).statuses == ["ok", "ok"] and server.requests == []


@pytest.mark.usefixtures("quick")
def test_a_full_disk_ends_the_run_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = a_pdf(tmp_path / "a.pdf", 5)
    right = ocr.write_atomic

    def full(path: Path, data: str | bytes) -> None:
        if path.name == "0003.md":
            raise OSError(28, "No space left on device")
        right(path, data)

    monkeypatch.setattr(ocr, "write_atomic", full)
    with Standin() as server:
        run = read(document, tmp_path / "out", server)
    assert run.result.exit_code == 1 and "No space left on device" in str(run.result.stopped)
    assert set(run.statuses) <= {"ok"} and run.result.summary["finished"] is False


@pytest.mark.usefixtures("quick")
def test_a_document_that_cannot_be_put_together_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [a_pdf(tmp_path / f"{name}.pdf", 2) for name in "ab"]
    right = ocr.assemble

    def trips(document: ocr.Document, wanted: ocr.Wanted) -> None:
        if document.source.name == "a.pdf":
            raise ValueError("odd")
        right(document, wanted)

    monkeypatch.setattr(ocr, "assemble", trips)
    with Standin() as server:
        run = read(documents, tmp_path / "out", server)
    assert run.statuses == ["ok"] * 4 and run.result.exit_code == 1
    assert run.heard("a.pdf: its pages are read, but cannot be put together: ValueError: odd")
    assert (tmp_path / "out/b/b.md").exists()


# ---- As a library


@pytest.mark.usefixtures("quick")
def test_a_callbacks_own_error_comes_out_as_itself(tmp_path: Path) -> None:
    def broken(page: ocr.PageResult) -> None:
        raise ZeroDivisionError("in the callback")

    with Standin() as server, pytest.raises(ZeroDivisionError, match="in the callback"):
        settings = ocr.Settings(url=server.url, check=False)
        ocr.run([a_pdf(tmp_path / "a.pdf", 3)], tmp_path / "out", settings, on_page=broken)
    assert json.loads((tmp_path / "out/run.json").read_text())["stopped"] == "in the callback"


LIBRARY = """
import sys
import ocr

def main():
    pages, words = [], []
    settings = ocr.Settings(url=sys.argv[1], workers=2, check=False)
    result = ocr.run(["a.pdf"], "out", settings, on_page=pages.append, on_event=lambda level, text: words.append(text))
    print(sorted((page.number, page.status, page.attempts) for page in pages), words, result.exit_code)
    print(result.documents[0].folder.as_posix(), result.summary["pages"]["ok"])

"""


def script(tmp_path: Path, text: str, server: Standin) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(text)
    return subprocess.run(
        [sys.executable, "mine.py", server.url], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_script_drives_a_run_with_callbacks(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 2)
    with Standin() as server:
        done = script(tmp_path, LIBRARY + 'if __name__ == "__main__":\n    main()\n', server)
    assert done.stderr == "" and done.stdout == "[(1, 'ok', 1), (2, 'ok', 1)] [] 0\nout/a 2\n"


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 2)
    with Standin() as server:
        done = script(tmp_path, LIBRARY + "main()\n", server)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("ocr.BadUsage: no worker process starts")


def test_runs_can_share_an_event_loop(tmp_path: Path) -> None:
    async def both(url: str) -> list[int]:
        settings = ocr.Settings(url=url, workers=1, check=False)
        documents = [a_pdf(tmp_path / f"{name}.pdf", 1, name) for name in "ab"]
        runs = [ocr.run_async([document], tmp_path / document.stem, settings) for document in documents]
        return [result.exit_code for result in await asyncio.gather(*runs)]

    with Standin() as server:
        assert asyncio.run(both(server.url)) == [0, 0]


# ---- Workers


def slow_square(n: int, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return n * n


def die(code: int) -> None:
    os._exit(code)


def too_odd_to_send() -> None:
    class Odd(Exception):
        pass

    raise Odd("words")


def recurse() -> None:
    raise RecursionError("deep")


def start_nothing() -> None:
    pass


def with_workers(count: int, play: Callable[[ocr.Workers], Any], **more: Any) -> Any:
    async def whole() -> Any:
        workers = ocr.Workers(count, start_nothing, **more)
        workers.start()
        try:
            return await play(workers)
        finally:
            workers.stop()

    return asyncio.run(whole())


def test_a_worker_that_hangs_or_dies_costs_its_task_only() -> None:
    async def play(workers: ocr.Workers) -> list[Any]:
        tasks = [
            workers.run(10, slow_square, 3),
            workers.run(0.2, slow_square, 4, 60.0),
            workers.run(10, die, 7),
            workers.run(10, recurse),
            workers.run(10, too_odd_to_send),
            *(workers.run(10, slow_square, n) for n in range(5, 9)),
        ]
        return await asyncio.gather(*tasks, return_exceptions=True)

    nine, hung, dead, deep, odd, *others = with_workers(2, play)
    assert nine == 9 and others == [25, 36, 49, 64]
    assert isinstance(hung, TimeoutError) and isinstance(dead, ocr.Crashed) and "exit code 7" in str(dead)
    assert isinstance(deep, RecursionError) and str(odd) == "Odd: words"


@posix
def test_idle_workers_that_are_killed_are_replaced() -> None:
    async def play(workers: ocr.Workers) -> int:
        for n in range(3):
            assert await workers.run(10, slow_square, n) == n * n
            for worker in workers.idle:
                assert worker.process and worker.process.pid
                os.kill(worker.process.pid, signal.SIGKILL)
                worker.process.join()
        return await workers.run(10, slow_square, 5)

    assert with_workers(1, play) == 25


def test_a_cancelled_task_frees_its_worker() -> None:
    async def play(workers: ocr.Workers) -> int:
        hanging = asyncio.create_task(workers.run(60, slow_square, 1, 60.0))
        await asyncio.sleep(0.5)
        hanging.cancel()
        return await asyncio.wait_for(workers.run(10, slow_square, 5), 10)

    assert with_workers(1, play) == 25


def test_workers_are_replaced_after_their_share_of_tasks() -> None:
    async def play(workers: ocr.Workers) -> set[int]:
        return {await workers.run(10, os.getpid) for _ in range(5)}

    assert len(with_workers(1, play, tasks=2)) == 3


@linux
def test_workers_killed_during_a_run_lose_no_page(tmp_path: Path) -> None:
    a_pdf(tmp_path / "a.pdf", 40)
    out, rng = tmp_path / "out", random.Random(1)
    with (
        Standin(seconds=0.1) as server,
        Started(tmp_path / "a.pdf", "--out", out, "--concurrency", "1", server=server) as run,
    ):
        for done in (1, 10, 20, 30):  # far apart: a page has two tries
            until(lambda done=done: len(list(out.rglob("0*.json"))) >= done)  # type: ignore[misc]
            workers = [pid for pid in run.children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(rng.choice(workers), signal.SIGKILL)
        code, said, err = run.end()
    assert code == 0 and "40 pages ok" in said and "Traceback" not in err


@linux
def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for place, pid, kept in (("", ended.pid, False), ("pages", ended.pid, False), ("pages", os.getpid(), True)):
        part = tmp_path / place / f"0001.md.{ocr.machine()}-{pid:x}-00000000.part"
        part.touch()
        ocr.remove_stale_parts(tmp_path)
        assert part.exists() == kept
    elsewhere = tmp_path / f"a.md.{'0' * 8}-{ended.pid:x}-00000000.part"  # another host's process of that number
    elsewhere.touch()
    ocr.remove_stale_parts(tmp_path)
    assert elsewhere.exists()


# ---- kill -9


@linux
@pytest.mark.parametrize("whole_tree", [True, False], ids=["whole tree", "parent only"])
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_goes_on_to_the_same_outputs(tmp_path: Path, whole_tree: bool, kills: int) -> None:
    pages = 6 if kills < 10 else 12
    for name in "ab":
        a_pdf(tmp_path / f"{name}.pdf", pages, name)
    documents = [tmp_path / "a.pdf", tmp_path / "b.pdf"]
    rng = random.Random(kills)
    with Standin(by_seed, seconds=0.05) as server:
        assert command(*documents, "--out", tmp_path / "calm", server=server).returncode == 0
        calm = len(server.requests)
        for _ in range(kills):
            with Started(*documents, "--out", tmp_path / "out", "--concurrency", "2", server=server) as run:
                time.sleep(rng.uniform(0.5, 2.0))
                run.kill_all() if whole_tree else run.process.kill()
                run.process.wait()
                if not whole_tree:
                    until(lambda run=run: not list(processes_of_group(run.process.pid)), 10)  # type: ignore[misc]
        server.reset()
        assert command(*documents, "--out", tmp_path / "out", server=server).returncode == 0
        assert len(server.requests) <= calm
    assert tree(tmp_path / "out") == tree(tmp_path / "calm")


@linux
def test_workers_end_by_themselves_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Also one that hangs in a page: nobody is left to keep its time limit."""
    (tmp_path / "hang-a.pdf").write_bytes(one_page())
    (tmp_path / "mine.py").write_text(
        "import sys, ocr, support\n"
        'if __name__ == "__main__":\n'
        "    ocr.start_worker = support.sabotaged\n"
        "    sys.exit(ocr.main())\n"
    )
    with Standin() as server:
        process = subprocess.Popen(
            [sys.executable, "mine.py", "hang-a.pdf", "--url", server.url, "--workers", "2", "--no-check"],
            cwd=tmp_path, env=environment(), start_new_session=True,
        )  # fmt: skip
        try:
            until(lambda: (tmp_path / "ocr_out/hang-a/source.json").exists())
            time.sleep(0.5)
            assert len(list(processes_of_group(process.pid))) >= 2
            process.kill()
            process.wait()
            until(lambda: not list(processes_of_group(process.pid)), 5)
        finally:
            for pid in processes_of_group(process.pid):
                os.kill(pid, signal.SIGKILL)
