"""ocr_ray.py without Ray: its rows, its memory of what is done, its actors called as Ray would call them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scaling
from hypothesis import given
from hypothesis import strategies as st
from running import a_pdf, block, looping, quick, tree
from standin import Answer, Request, Standin, Status
from support import ROOT, written

import ocr

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -r requirements-ray.txt")
import numpy as np
import pyarrow as pa
from pyarrow import parquet

import ocr_ray

__all__ = ["quick"]


class Method:
    """A method as Ray's actor handles have them."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    async def remote(self, *args: Any) -> Any:
        return self.function(*args)


def local_board() -> tuple[ocr_ray.Board, Any]:
    board = ocr_ray.Board()
    return board, SimpleNamespace(hear=Method(board.hear), part=Method(board.part), stop=Method(board.stop))


def a_plan(out: Path, server: Standin | None = None, run: str = "000001-0000", **settings: Any) -> ocr_ray.Plan:
    url = server.url if server else "http://127.0.0.1:1/v1"
    asked = ocr.Settings(url=url, check=False, workers=1, **settings)
    return ocr_ray.Plan(run, str(out), asked, rows=4, cache=1 << 30, doors={})


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's own folder."""
    folder = tmp_path / "node"
    monkeypatch.setattr(ocr_ray, "node_folder", lambda: folder)
    return folder


def says(request: Request) -> Answer:
    return Answer(block(f"this is {request.page}"))


Done = tuple[Any, Any]


def surveyed(plan: ocr_ray.Plan, wanted: ocr.Wanted, parts: int, known: Done, monkeypatch: Any) -> list[dict[str, Any]]:
    """The units that surveying the parts gives."""
    board, handle = local_board()
    monkeypatch.setattr("ocr_ray.ray_get", lambda refs: refs)

    async def survey() -> list[dict[str, Any]]:
        surveyor = ocr_ray.Surveyor(plan, handle, wanted, *known)
        return [unit for number in range(parts) async for unit in surveyor({"id": number})]

    units = asyncio.run(survey())
    assert board.why is None, board.why
    return units


def wanted_by(plan: ocr_ray.Plan) -> ocr.Wanted:
    return ocr.Run(Path(plan.out), plan.settings, None, None, None).wanted_of(plan.settings.model or "chandra")


def run_here(plan: ocr_ray.Plan, inputs: Sequence[Path], monkeypatch: Any) -> ocr_ray.Board:
    """A whole run without Ray: list, survey, read, settle."""
    wanted = wanted_by(plan)
    known = ocr_ray.what_is_done(plan, ocr_ray.scan(plan), wanted)
    listed = ocr_ray.write_parts(plan, [str(path) for path in inputs], lambda *_: None, known[1])
    units = surveyed(plan, wanted, listed.parts, known, monkeypatch)
    board, handle = local_board()

    async def read() -> None:
        reader = ocr_ray.Reader(plan, handle)
        await asyncio.gather(*(reader(unit) for unit in units))
        await reader.report()
        if reader.beating:
            reader.beating.cancel()
        if reader.working:
            await reader.working.aclose()

    asyncio.run(read())
    ocr_ray.settle(plan, twins=True)
    return board


def rows_in(out: Path) -> list[dict[str, Any]]:
    tables = [parquet.read_table(path) for path in sorted((out / "pages").glob("*.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


# ---- a run


def test_a_run_gives_what_ocr_gives(quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def says(request: Request) -> Answer | Status:
        if int(request.page[:8], 16) % 4 == 0 and request.turn == 0:
            return looping(3)
        figure = '<div data-bbox="100 100 500 500" data-label="Figure"><img alt="a boat"/></div>'
        return Answer(block(f"this is {request.page}") + figure)

    shelf = tmp_path / "shelf"
    (shelf / "in").mkdir(parents=True)
    for name, pages in (("long.pdf", 11), ("in/a.pdf", 1), ("in/b.pdf", 3), ("in/c.pdf", 2)):
        a_pdf(shelf / name, pages)
    (shelf / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    (shelf / "in/scan.png").write_bytes(written("PNG"))
    with Standin(says) as server:
        plan = a_plan(tmp_path / "rows", server, model="chandra")
        ocr.run([shelf], tmp_path / "plain", plan.settings)
        server.reset()
        run_here(plan, [shelf], monkeypatch)
        assert len(server.requests) > 18, "some pages were asked for again"
    rows = rows_in(tmp_path / "rows")
    assert len(rows) == 18 and max(len(parquet.read_table(f)) for f in (tmp_path / "rows/pages").iterdir()) <= 4
    exported = tmp_path / "exported"
    settings = ocr_ray.public(plan.settings)
    (tmp_path / "rows/run.json").write_text(
        json.dumps({"ocr_ray": "1", "settings": settings, "inputs": [], "started": "", "finished": True})
    )
    assert ocr_ray.main([str(tmp_path / "rows"), "--export", str(exported), "--quiet"]) == ocr.EXIT_INCOMPLETE
    plain, other = tree(tmp_path / "plain"), tree(exported)
    assert plain.keys() == other.keys()
    for name, data in plain.items():
        if name.endswith(".json"):
            assert parsed(other[name], shelf) == parsed(data, shelf), name
        else:
            assert other[name] == data, name
    # What was exported is an output like any other: a run into it has nothing to ask.
    with Standin(Status(500)) as server:
        again = ocr.run([shelf], exported, ocr.Settings(**settings | {"url": server.url}))
        assert not server.requests and again.summary["pages"]["cached"] == 18


def parsed(data: bytes, shelf: Path) -> Any:
    record = json.loads(data)
    if "sha256" in record:
        record["source"] = str(Path(record["source"]).absolute())
    return record


def test_the_same_run_again_asks_nothing(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_pdf(tmp_path / "a.pdf", 6)
    with Standin(says) as server:
        run_here(a_plan(tmp_path / "rows", server), [tmp_path / "a.pdf"], monkeypatch)
        before = rows_in(tmp_path / "rows")
        server.reset()
        plan = a_plan(tmp_path / "rows", server, run="000002-0000")
        known = ocr_ray.what_is_done(plan, ocr_ray.scan(plan), wanted_by(plan))
        listed = ocr_ray.write_parts(plan, [str(tmp_path / "a.pdf")], lambda *_: None, known[1])
        assert listed == (0, 1, 0), "its size and time are those of before: it is not even opened"
        # Touched, it is opened; its bytes are the same, so no page is asked for.
        os.utime(tmp_path / "a.pdf")
        run_here(plan, [tmp_path / "a.pdf"], monkeypatch)
        assert not server.requests and rows_in(tmp_path / "rows") == before
        # Written anew, all its pages are read, and the old rows go.
        a_pdf(tmp_path / "a.pdf", 2, text="other")
        run_here(a_plan(tmp_path / "rows", server, run="000003-0000"), [tmp_path / "a.pdf"], monkeypatch)
    rows = rows_in(tmp_path / "rows")
    fresh = [row for row in rows if row["run"] == "000003-0000"]
    assert [row["page"] for row in fresh] == [1, 2] and len({(row["document"], row["page"]) for row in rows}) == len(
        rows
    )


def test_failed_pages_are_asked_again_and_stand_once(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(request: Request) -> Answer | Status:
        return Status(400, "no") if int(request.page[:8], 16) % 2 else says(request)

    a_pdf(tmp_path / "a.pdf", 9)
    with Standin(refuses) as server:
        board = run_here(a_plan(tmp_path / "rows", server), [tmp_path / "a.pdf"], monkeypatch)
        failed = [row["page"] for row in rows_in(tmp_path / "rows") if row["status"] == "failed"]
        assert failed and len(failed) < 9 and board.counts["failed"] == len(failed)
        assert all("no" in row["error"] for row in rows_in(tmp_path / "rows") if row["status"] == "failed")
        server.answer = says
        server.reset()
        run_here(a_plan(tmp_path / "rows", server, run="000002-0000"), [tmp_path / "a.pdf"], monkeypatch)
        assert len(server.requests) == len(failed)
    rows = rows_in(tmp_path / "rows")
    assert sorted(row["page"] for row in rows) == list(range(1, 10)) and {row["status"] for row in rows} == {"ok"}


def test_a_unit_that_was_written_is_not_read_again(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives a unit to another process when one died after its work, or when its answer was lost."""
    a_pdf(tmp_path / "a.pdf", 4)
    with Standin(says) as server:
        plan = a_plan(tmp_path / "rows", server)
        run_here(plan, [tmp_path / "a.pdf"], monkeypatch)
        files = sorted((tmp_path / "rows/pages").iterdir())
        server.reset()
        units = surveyed_again(plan, tmp_path / "a.pdf", monkeypatch)
        told = read_units(plan, units)
        assert not server.requests and told == [
            {"unit": told[0]["unit"], "ok": 4, "suspect": 0, "failed": 0} | tokens(told)
        ]
        assert sorted((tmp_path / "rows/pages").iterdir()) == files


def tokens(told: list[dict[str, Any]]) -> dict[str, int]:
    assert all(row["tokens"] > 0 for row in told)
    return {"tokens": told[0]["tokens"]}


def surveyed_again(plan: ocr_ray.Plan, path: Path, monkeypatch: Any) -> list[dict[str, Any]]:
    nothing = ocr_ray.words128(()), ocr_ray.words128(())
    listed = ocr_ray.write_parts(plan, [str(path)], lambda *_: None, nothing[1])
    return surveyed(plan, wanted_by(plan), listed.parts, nothing, monkeypatch)


def read_units(
    plan: ocr_ray.Plan, units: Sequence[dict[str, Any]], meanwhile: Callable[[ocr_ray.Board], None] | None = None
) -> list[dict[str, Any]]:
    board, handle = local_board()

    async def read() -> list[dict[str, Any]]:
        reader = ocr_ray.Reader(plan, handle)
        tasks = [asyncio.create_task(reader(unit)) for unit in units]
        if meanwhile:
            await asyncio.to_thread(meanwhile, board)
        told = await asyncio.gather(*tasks)
        if reader.beating:
            reader.beating.cancel()
        if reader.working:
            await reader.working.aclose()
        return told

    return asyncio.run(read())


def test_pages_of_a_process_that_died_are_found_on_its_node(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_pdf(tmp_path / "a.pdf", 4)
    with Standin(says) as server:
        plan = a_plan(tmp_path / "rows", server)
        units = surveyed_again(plan, tmp_path / "a.pdf", monkeypatch)
        with monkeypatch.context() as patch:
            # It dies when its pages are on disk and no row is written.
            patch.setattr(ocr_ray, "put_rows", dies)
            with pytest.raises(SystemExit):
                read_units(plan, units)
        assert len(server.requests) == 4 and not rows_in_any(tmp_path / "rows")
        told = read_units(plan, units)
        assert len(server.requests) == 4 and told[0]["ok"] == 4
    assert len(rows_in(tmp_path / "rows")) == 4 and not list(plan.scratch.rglob("*.json"))


def dies(*_: object) -> None:
    raise SystemExit("killed")


def rows_in_any(out: Path) -> list[dict[str, Any]]:
    return rows_in(out) if (out / "pages").exists() else []


def test_what_is_done_of_a_unit_is_kept_when_the_run_is_stopped(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()

    def some(request: Request) -> Answer:
        return Answer(says(request).content, seconds=0.0 if len(server.requests) <= 2 else 60.0)

    a_pdf(tmp_path / "a.pdf", 4)
    with Standin(some) as server:
        plan = a_plan(tmp_path / "rows", server, concurrency=4)
        units = surveyed_again(plan, tmp_path / "a.pdf", monkeypatch)

        def stop(board: ocr_ray.Board) -> None:
            while board.counts["ok"] < 2:
                slow.wait(0.05)
            board.stop("interrupted", 130)

        told = read_units(plan, units, stop)
        assert [row["ok"] for row in told] == [2]
    assert len(rows_in(tmp_path / "rows")) == 2


def test_a_server_that_never_answers_stops_the_run(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_pdf(tmp_path / "a.pdf", 4)
    with Standin(says) as server:
        units = surveyed_again(a_plan(tmp_path / "rows", server), tmp_path / "a.pdf", monkeypatch)
    board, handle = local_board()
    reader = ocr_ray.Reader(a_plan(tmp_path / "rows", server, patience=0.2, wait=0.2), handle)
    told = asyncio.run(reader(units[0]))
    assert told["ok"] == told["failed"] == 0
    assert board.why and board.why[1] == ocr.EXIT_NO_SERVER and "no server answers" in board.why[0]


def test_a_document_that_changes_meanwhile_fails_by_page(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "picture_of", ocr_picture_of)
    a_pdf(tmp_path / "a.pdf", 3)
    with Standin(says) as server:
        plan = a_plan(tmp_path / "rows", server)
        units = surveyed_again(plan, tmp_path / "a.pdf", monkeypatch)
        a_pdf(tmp_path / "a.pdf", 5)
        told = read_units(plan, units)
    assert told[0]["failed"] == 3
    assert all("changed during the run" in row["error"] for row in rows_in(tmp_path / "rows"))


ocr_picture_of = ocr.picture_of


# ---- rows


@given(st.lists(st.lists(st.integers(1, 300), unique=True, max_size=40).map(sorted), max_size=12), st.integers(1, 20))
def test_units_hold_every_page_once_in_order(documents: list[list[int]], rows: int) -> None:
    names = ("document", "root", "size", "mtime", "sha256", "kind", "page_count", "forms")
    found = [({name: f"{name}{i}" for name in names}, todo) for i, todo in enumerate(documents)]
    units = list(ocr_ray.units(found, rows))
    pages = [[(p["document"], n) for p in unit for n in ocr_ray.numbers_of(p["numbers"])] for unit in units]
    assert [page for unit in pages for page in unit] == [
        (f"document{i}", number) for i, todo in enumerate(documents) for number in todo
    ]
    assert all(len(unit) == rows for unit in pages[:-1]) and all(pages)
    assert len({ocr_ray.unit_name(unit) for unit in units}) == len(units)


def put_pages(plan: ocr_ray.Plan, name: str, pages: Sequence[tuple[Any, ...]]) -> None:
    """Rows of (document, page, status, reply, picture)."""
    blank = {"reasons": [], "images": [], "attempts": [], "tokens": 1, "seconds": 0.0, "record": "{}", "blocks": "[]"}
    rows = [
        blank
        | {"document": d, "page": p, "status": s, "reply_hash": r, "fingerprint": f, "key": "0" * 32, "run": name[:6]}
        for d, p, s, r, f in pages
    ]
    ocr_ray.put_rows(plan, f"pages/{name}.parquet", rows, ocr_ray.page_schema())


ONE, TWO = "1" * 32, "2" * 32


def test_settling_keeps_the_latest_row_and_marks_equal_replies(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    put_pages(plan, "000001-a", [("a", 1, "failed", None, None), ("a", 2, "ok", ONE, "p"), ("a", 3, "ok", ONE, "q")])
    put_pages(plan, "000001-b", [("b", 1, "ok", TWO, "p"), ("b", 2, "ok", TWO, "p"), ("b", 3, "ok", None, "r")])
    put_pages(plan, "000002-c", [("a", 1, "ok", ONE, "p")])
    put_pages(plan, "000001-d", [("a", 1, "failed", None, None)])
    assert ocr_ray.settle(plan, twins=True) == {"ok": 3, "suspect": 3, "failed": 0}
    rows = {(row["document"], row["page"]): row for row in rows_in(tmp_path)}
    assert len(rows) == len(rows_in(tmp_path)) == 6 and rows["a", 1]["run"] == "000002"
    # One picture twice has one reply: that is no fault. Two pictures with one reply are.
    assert {key for key, row in rows.items() if row["reasons"] == [ocr.TWIN]} == {("a", 1), ("a", 2), ("a", 3)}
    assert not (tmp_path / "pages/000001-d.parquet").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "pages").iterdir()}
    assert ocr_ray.settle(plan, twins=True) == {"ok": 3, "suspect": 3, "failed": 0}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "pages").iterdir()} == before


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_equal_replies_are_found_as_ocr_finds_them(pages: list[tuple[int, int]]) -> None:
    """(reply, picture) of each page; reply 0 is too short to compare."""
    hashes = [f"{reply:032x}" for reply, _ in pages]
    empty = ocr_ray.words128(())
    rows = ocr_ray.Scan(
        [], None, empty, empty, ocr_ray.words128(hashes), np.array([p for _, p in pages], dtype=np.uint64), None
    )
    found = ocr_ray.same_reply(rows, np.ones(len(pages), bool))
    run = ocr.Run(Path(), ocr.Settings(), None, None, None)
    twins = set()
    for i, (reply, picture) in enumerate(pages):
        if run.has_twin((Path(), i), hashes[i] if reply else None, str(picture)):
            twins.add(i)
    assert set(np.flatnonzero(found).tolist()) == twins | {number for _, number in run.doubted}


@given(st.sets(st.integers(0, 1 << 128).filter(lambda n: n < 1 << 128)), st.integers(0, (1 << 128) - 1))
def test_digests_are_found_among_sorted_ones(known: set[int], other: int) -> None:
    array = ocr_ray.sorted_digests(ocr_ray.words128(f"{n:032x}" for n in known))
    for n in (*known, other, other ^ 1):
        assert ocr_ray.among(array, f"{n:032x}") == (n in known)


def test_a_file_that_is_no_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/x.parquet").write_bytes(b"no")
    with pytest.raises(ocr.OutputError, match=r"x\.parquet: cannot be read"):
        ocr_ray.scan(a_plan(tmp_path))


def exported(plan: ocr_ray.Plan, out: Path) -> tuple[int, list[str]]:
    settings = ocr_ray.public(plan.settings)
    record = {"ocr_ray": "1", "settings": settings, "inputs": [], "started": "", "finished": True}
    ocr_ray.write_out(plan, "run.json", record)
    return ocr_ray.main([plan.out, "--export", str(out), "-q"]), sorted(path.stem for path in out.rglob("*/pages/*.md"))


def test_what_is_exported_of_changing_documents(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (tmp_path / "linked").symlink_to(shelf)
    a_pdf(shelf / "a.pdf", 6)
    with Standin(says) as server:
        run_here(a_plan(tmp_path / "rows", server, pages="1-3"), [shelf, tmp_path / "linked"], monkeypatch)
        assert len(server.requests) == 3, "a folder and a link to it are one"
        assert exported(a_plan(tmp_path / "rows"), tmp_path / "e1") == (0, ["0001", "0002", "0003"])
        # Other pages of it, surveyed and not read: the export says that they are missing.
        plan = a_plan(tmp_path / "rows", server, run="000002-0000", pages="4-6")
        surveyed_again(plan, shelf, monkeypatch)
        assert exported(plan, tmp_path / "e2") == (ocr.EXIT_INCOMPLETE, [])
        run_here(plan, [shelf], monkeypatch)
        assert exported(plan, tmp_path / "e3") == (0, ["0004", "0005", "0006"])
        # Gone by now: what was read of it stands.
        (tmp_path / "list.txt").write_text(str(shelf / "a.pdf"))
        (shelf / "a.pdf").unlink()
        run_here(
            a_plan(tmp_path / "rows", server, run="000003-0000", pages="4-6"), [tmp_path / "list.txt"], monkeypatch
        )
        assert exported(plan, tmp_path / "e4") == (0, ["0004", "0005", "0006"])


@pytest.mark.parametrize("folder", ["pages", "documents"])
@pytest.mark.parametrize("content", ["broken", "foreign"])
def test_a_strange_file_in_the_output_is_named(
    folder: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = a_plan(tmp_path / "rows")
    put_pages(plan, "000001-a", [("a", 1, "ok", ONE, "p")])
    path = tmp_path / "rows" / folder / "zz.parquet"
    path.parent.mkdir(exist_ok=True)
    if content == "broken":
        path.write_bytes(b"PAR1 no PAR1")
    else:
        parquet.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ocr.OutputError, match=r"zz\.parquet: cannot be read"):
        ocr_ray.what_is_done(plan, ocr_ray.scan(plan), wanted_by(plan))
    document = {
        "document": "a",
        "root": "",
        "pages": "1",
        "asked": "",
        "sha256": None,
        "size": 1,
        "mtime": 1,
        "notes": [],
    }
    ocr_ray.put_rows(plan, "documents/000001-000000.parquet", [document], ocr_ray.document_schema())
    assert exported(plan, tmp_path / "e")[0] == ocr.EXIT_INCOMPLETE
    assert "zz.parquet: cannot be read" in capsys.readouterr().err


def test_one_strange_address_costs_only_itself(
    quick: None, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_pdf(tmp_path / "a.pdf", 2)
    (tmp_path / "m.txt").write_text("a.pdf\nftp://x/y.pdf\nno-such-scheme://x/y.pdf\nhttp://x/y.pdf\n")
    with Standin(says) as server:
        board = run_here(a_plan(tmp_path / "rows", server), [tmp_path / "m.txt"], monkeypatch)
    assert board.why is None and len(rows_in(tmp_path / "rows")) == 2
    files = sorted((tmp_path / "rows/documents").iterdir())
    errors = [row["error"] for file in files for row in parquet.read_table(file).to_pylist()]
    assert sorted(error is None for error in errors) == [False, False, False, True]


# ---- inputs and stores


def names(plan: ocr_ray.Plan, *inputs: Path | str) -> list[str]:
    found = ocr_ray.find_entries([str(item) for item in inputs], plan)
    return [entry.document if isinstance(entry, ocr_ray.Entry) else f"{entry[0]}: {entry[1]}" for entry in found]


def test_manifests_of_every_kind(tmp_path: Path) -> None:
    here = [str(tmp_path / "a b.pdf"), "/else/c.pdf", "s3://bucket/d.pdf"]
    given = ["a b.pdf", "/else/c.pdf", "s3://bucket/d.pdf"]
    (tmp_path / "m.txt").write_text("\ufeff" + "\r\n".join(given) + "\n\n", "utf-8")
    (tmp_path / "m.csv").write_text("id,Path\n" + "".join(f"{i},{name}\n" for i, name in enumerate(given)))
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"id": 1, "uri": name}) + "\n" for name in given))
    parquet.write_table(pa.table({"document": given, "more": [1, 2, 3]}), tmp_path / "m.parquet")
    plan = a_plan(tmp_path / "out")
    for manifest in ("m.txt", "m.csv", "m.jsonl", "m.parquet"):
        assert names(plan, tmp_path / manifest) == here, manifest
    (tmp_path / "list").write_text("x.pdf")
    assert names(plan, f"@{tmp_path}/list") == [str(tmp_path / "x.pdf")]


def test_names_that_stores_and_disks_allow(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    odd = ["a #1?.pdf", "50%.pdf", "\u202ename.pdf", "x" * 200 + ".pdf"]
    for name in odd:
        a_pdf(shelf / name, 1)
    (shelf / os.fsdecode(b"\xff.pdf")).write_bytes((shelf / odd[0]).read_bytes())
    plan, said = a_plan(tmp_path / "out"), []
    nothing = ocr_ray.words128(())
    listed = ocr_ray.write_parts(plan, [str(shelf)], lambda name, error: said.append(f"{name}: {error}"), nothing)
    assert {Path(entry.document).name for entry in ocr_ray.read_part(plan, 0)} == set(odd)
    assert listed == (1, 0, 1) and "not UTF-8" in said[0]
    (tmp_path / "m.txt").write_text("s3://user:key@bucket/a #1?.pdf\n")
    assert names(plan, tmp_path / "m.txt") == ["s3://bucket/a #1?.pdf"]


def test_manifests_that_name_nothing(tmp_path: Path) -> None:
    plan = a_plan(tmp_path / "out")
    (tmp_path / "e.txt").write_text("\n \n")
    (tmp_path / "e.csv").write_text("")
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "folder").mkdir()
    assert names(plan, tmp_path / "e.txt")[0].endswith("the manifest names no document")
    assert names(plan, tmp_path / "e.csv")[0].endswith("the manifest names no document")
    assert "no column of a, b is called document or" in names(plan, tmp_path / "two.csv")[0]
    assert "cannot be read as parquet" in names(plan, tmp_path / "bad.parquet")[0]
    assert names(plan, tmp_path / "gone.txt")[0].endswith("there is no such file or folder")
    assert names(plan, tmp_path / "folder")[0].endswith("no PDF or image found there")


def test_addresses_keep_no_keys() -> None:
    address = "s3://KEY:SECRET@bucket/scans/?endpoint_override=http%3A%2F%2F127.0.0.1%3A9000"
    assert ocr_ray.bare_address(address) == ("s3://bucket/scans", "s3://bucket")
    settings = ocr.Settings(api_key="SECRET", password="SECRET", url="http://u:SECRET@h/v1")
    assert "SECRET" not in json.dumps(ocr_ray.public(settings))


def test_missing_keys_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ocr_ray.AWS_KEYS:
        monkeypatch.delenv(name, raising=False)
    strange = OSError("When listing objects: AWS Error UNKNOWN (HTTP status 500) during HeadObject: no body")
    assert "AWS_ACCESS_KEY_ID" in ocr_ray.store_words(strange)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    assert "AWS_ACCESS_KEY_ID" not in ocr_ray.store_words(strange)
    assert "AWS_ACCESS_KEY_ID" in ocr_ray.store_words(OSError("AWS Error ACCESS_DENIED during HeadObject"))
    assert ocr_ray.file_system("gs://anonymous@bucket") == ocr_ray.file_system("gs://anonymous@bucket")


def test_a_remote_document_is_fetched_once_and_dropped_when_it_is_old(node: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name in "abc":
        store.pipe(f"/shelf/{name}.pdf", name.encode() * 1000)
    plan = dataclasses.replace(a_plan(tmp_path), cache=2500)
    entries = [entry for entry in ocr_ray.find_entries(["memory://shelf"], plan) if isinstance(entry, ocr_ray.Entry)]
    assert [entry.document for entry in entries] == [f"memory://shelf/{name}.pdf" for name in "abc"]
    folder = node / "documents"
    with ocr_ray.at_hand(entries[0], plan) as first, ocr_ray.at_hand(entries[0], plan) as same:
        assert first == same and first.read_bytes() == b"a" * 1000
        with ocr_ray.at_hand(entries[1], plan) as second:
            store.rm("/shelf/a.pdf")
            with ocr_ray.at_hand(entries[2], plan) as third, ocr_ray.at_hand(entries[0], plan) as again:
                # Over the limit, but all three are held.
                assert all(path.exists() for path in (again, second, third))
    store.pipe("/shelf/d.pdf", b"d" * 1000)
    with ocr_ray.at_hand(ocr_ray.Entry("memory://shelf/d.pdf", "memory://shelf", 1000, 0), plan):
        assert len([path for path in folder.iterdir() if path.suffix == ".pdf"]) == 2
    with pytest.raises(ocr.DocumentError, match="no such object"), ocr_ray.at_hand(entries[0]._replace(mtime=1), plan):
        pass
    changed = ocr_ray.Entry("memory://shelf/d.pdf", "memory://shelf", 999, 0)
    with pytest.raises(ocr.DocumentError, match="changed while"), ocr_ray.at_hand(changed, plan):
        pass
    assert not list(folder.glob("*.part"))


# ---- the command


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run.json").write_text('{"ocr": "1", "documents": []}')
    url = ("--url", "http://127.0.0.1:1/v1")
    cases = [
        ([str(tmp_path), "--out", str(tmp_path / "file/x"), *url], "cannot be"),
        ([str(tmp_path), "--out", str(tmp_path), *url], "holds something else"),
        ([str(tmp_path), "--out", str(tmp_path / "o"), "--rows", "0", *url], "--rows 0"),
        ([str(tmp_path), "--out", str(tmp_path / "o"), "--dpi", "1", *url], "--dpi 1"),
        ([str(tmp_path), "--export", str(tmp_path / "e")], "is no output of ocr_ray.py"),
    ]
    for arguments, words in cases:
        assert ocr_ray.main(arguments) == ocr.EXIT_USAGE, arguments
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said
    assert ocr_ray.main([str(tmp_path), "--out", str(tmp_path / "o"), *url]) == ocr.EXIT_NO_SERVER


def test_the_readme_has_the_models_tables() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for lines in (scaling.archive(), scaling.limits()):
        assert "\n".join(lines) in readme, "python tests/scaling.py has other figures: put them into the README"


def test_the_model_adds_up() -> None:
    card, one = scaling.GPUS[0], dataclasses.replace(scaling.GPUS[0], tokens=1000.0, in_flight=20)
    assert one.pages == 1.0 and one.seconds == 20.0
    assert card.in_flight / card.seconds == pytest.approx(card.pages)
    assert [scaling.number(value) for value in (0.04, 9.94, 16.4, 1234.0, 99_960.0)] == [
        "0.0",
        "9.9",
        "16",
        "1,200",
        "100,000",
    ]
