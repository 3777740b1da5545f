"""view.py: a run as pages to look at, in a real browser where there is one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lxml.html
import pytest
from running import InThread
from support import DATA, one_page

import ocr
import view

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = (DATA / "corpus" / "hostile.html").read_text("utf-8") if (DATA / "corpus" / "hostile.html").exists() else ""
HOSTILE += """<div data-bbox="0 0 10 10" data-label="Text<script>run()</script>"><p class="box chosen skip">x</p>
<img src=x onerror=run()><math>\\text{</math><script>run()</script>}</math>
<math>\\href{javascript:run()}{x} \\unicode{<b>}</math>
</script><script>run()</script>\u2028`${run()}` {{run()}} " ' __proto__</div>"""
MATHS = r"""<div data-bbox="100 50 900 90" data-label="Section-Header"><h2>Waves on a shallow shelf</h2></div>
<div data-bbox="100 100 900 200" data-label="Text"><p>The speed is <math>c = \sqrt{gh}</math>,
<math>\broken{</math>.</p></div>
<div data-bbox="100 210 900 300" data-label="Equation-Block">
<math display="block">\begin{aligned} a &= b \\ c &< d \end{aligned}</math></div>
<div data-bbox="100 310 900 500" data-label="Table"><table><thead><tr><th>Port</th><th>Fare</th></tr></thead><tbody>
<tr><td>Quay</td><td>7.50</td></tr></tbody></table></div>
<div data-bbox="100 510 900 600" data-label="Diagram"><pre><code class="language-mermaid">graph TD
  A--&gt;B</code></pre></div>
<div data-bbox="100 705 400 900" data-label="Figure"><img alt="A gull"/></div>
<div data-bbox="100 610 900 700" data-label="Text"><p>Zürich, 汉字文本測試, naïve ﬁsh</p></div>"""
PLAIN = '<div data-bbox="100 100 900 300" data-label="Text"><p>An ordinary page about herring number {}.</p></div>'


# ---- runs made by hand


def add_document(
    out: Path, name: str, replies: list[str | None], source: Path | None = None, tail: str = ""
) -> ocr.Document:
    """A document of one page a reply (None: failed), as ocr.py writes it; `tail` cuts replies off."""
    source = source or out.parent / f"{name}.pdf"
    if not source.exists():
        source.write_bytes(one_page(f"{name} page", box="0 0 400 560", pages=len(replies)))
    looked = ocr.survey(source, None)
    document = ocr.Document(
        source, looked.kind, looked.pages, looked.sha256, looked.stamp, folder=out / name,
        numbers=range(1, len(replies) + 1),
    )  # fmt: skip
    ocr.claim_folder(document, os.path.relpath(source, out))
    wanted = ocr.Wanted("chandra", "vllm", 150, 12384, 6, False, False, True, "dollars", "")
    picture = ocr.Picture(b"", (1024, 1434), (1008, 1428), 184.0, 0.1, "f")
    for number, reply in enumerate(replies, 1):
        error = None if reply is not None else "the server refused <b>it</b>"
        ends = "length" if tail and reply and tail in reply else "stop"
        attempts = () if reply is None else (ocr.Attempt(0, 0.0, 0.1, reply, ends, 2100, 300, 1.5, False),)
        job = ocr.PageJob(document, number, wanted, picture, attempts, error)
        ocr.finish_page(job)
    ocr.assemble(document, wanted)
    return document


def finish_run(out: Path, *documents: ocr.Document) -> Path:
    told = [{"source": str(d.source), "folder": d.folder.relative_to(out).as_posix()} for d in documents]
    ocr.write_json(out / "run.json", {"ocr": "0", "finished": True, "server": {"model": "chandra"}, "documents": told})
    return out


def make(run: Path, *args: Any, processes: bool = False) -> Path:
    """view.py's command, in a thread: Playwright's own event loop runs in this one. The folder that it wrote."""
    with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
        if not processes:  # they take a second to start
            patch.setattr(ocr, "Workers", InThread)
        assert thread.submit(view.main, [str(run), "--workers", "1", *map(str, args)]).result() == 0
    return run / "view"


def value_of(path: Path) -> Any:
    """What a data file puts."""
    text = path.read_text("utf-8")
    return json.loads(text[text.index(",", text.index("OCR.put(")) + 1 : text.rindex(")")])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents: maths, tables, hostile replies, a suspect and a failed page; and one that could not be opened."""
    out = tmp_path_factory.mktemp("run") / "ocr_out"
    out.mkdir()
    first = add_document(out, "report", [MATHS, HOSTILE, PLAIN.format(3) + "CUT", None, PLAIN.format(5)], tail="CUT")
    second = add_document(out, "hërring #2?&", [PLAIN.format(n) for n in range(1, 66)])
    finish_run(out, first, second)
    record = ocr.read_json(out / "run.json")
    record["documents"].append({"source": "broken.pdf", "error": "the file is <i>empty</i>"})
    ocr.write_json(out / "run.json", record)
    make(out, processes=True)
    return out


_START_WORKER = ocr.start_worker


def fragile() -> None:
    """Starts a worker that hangs on drawing a file named hang-*, and is killed at one named kill-*."""
    _START_WORKER()
    draw = ocr.load_page

    def load_page(document: ocr.Document, number: int, dpi: int) -> ocr.Loaded:
        if document.source.name.startswith("hang-"):
            time.sleep(3600)
        if document.source.name.startswith("kill-"):
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(document, number, dpi)

    ocr.load_page = load_page


# ---- what is written


def test_files_tell_pages_statuses_and_words(run: Path) -> None:
    summary = value_of(run / "view" / "data" / "run.js")
    assert (summary["pages"], summary["documents"]) == (70, 3)
    assert [sum(chunk[i] for chunk in summary["counts"]["rows"]) for i in range(3)] == [68, 1, 1]
    words = value_of(run / "view" / "data" / "words-0-0.js")
    assert "zurich 0" in words and "汉字 0" in words and "fish 0" in words
    assert (run / "view" / "pages").is_dir()


def test_written_again_only_what_changed(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "ocr_out", ignore=shutil.ignore_patterns("hërring*"))
    shutil.copy(run.parent / "report.pdf", tmp_path)
    out = tmp_path / "ocr_out"
    make(out)
    pages = sorted((out / "view" / "pages").rglob("*.js"))
    assert len(pages) == 5  # those of the document that is gone are gone
    before = [path.stat().st_mtime_ns for path in pages]
    index = (out / "view" / "data" / "words-0-0.js").read_bytes()
    record = ocr.read_json(out / "report" / "pages" / "0005.json")
    ocr.write_json(out / "report" / "pages" / "0005.json", record | {"status": "suspect", "reasons": ["odd"]})
    make(out)
    assert [path.stat().st_mtime_ns != stamp for path, stamp in zip(pages, before, strict=True)] == [False] * 4 + [True]
    assert (out / "view" / "data" / "words-0-0.js").read_bytes() == index


def test_half_written_runs_and_missing_sources(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    document = add_document(out, "doc", [PLAIN.format(1), PLAIN.format(2), PLAIN.format(3), PLAIN.format(4)])
    pages = document.folder / "pages"
    (pages / "0001.json").write_text('{"status": "ok", "blo')
    (pages / "0002.html").unlink()
    (pages / "0003.json").write_text('{"status": "ok", "blocks": 7, "attempts": "x", "image": []}')
    (document.folder / "source.json").write_text('{"source": 3}')
    (out / "elsewhere").mkdir()
    make(out)
    rows = value_of(out / "view" / "data" / "rows-0.js")
    assert [view.STATUSES[row[4]] for row in rows] == ["unfinished", "ok", "ok", "ok"]
    assert [row[8] for row in rows] == [0, 0, 0, 0]
    page = value_of(next((out / "view" / "pages").rglob("0004.js")))
    assert page["size"] == [1024, 1434] and "picture" not in page and "not there" in page["notes"][0]
    document.source.write_bytes(one_page("another"))
    (document.folder / "source.json").write_text(json.dumps({"source": "../doc.pdf"}))
    make(out)
    page = value_of(next((out / "view" / "pages").rglob("0004.js")))
    assert "has changed since" in page["notes"][0]


@pytest.mark.parametrize(
    "record",
    [
        '{"status": ["x"], "reasons": 7, "notes": "no", "attempts": {"a": 1}, "blocks": "zz", "error": {}}',
        '{"status": "ok", "blocks": [1, {"image": "../../../etc/passwd"}], "attempts": [5, {"seconds": {}}]}',
        '{"status": "ok", "image": {"width": Infinity, "height": NaN}}',
        '{"status": "ok", "image": {"width": 1e9, "height": -3}}',
        "[" * 100_000,
        "\ufffe",
    ],
)
def test_records_of_any_kind_are_shown(tmp_path: Path, record: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    document = add_document(out, "doc", [PLAIN.format(1), PLAIN.format(2)])
    finish_run(out, document)
    (document.folder / "pages" / "0001.json").write_text(record, "utf-8")
    make(out)
    page = value_of(next((out / "view" / "pages").rglob("0001.js")))
    assert "number 1." in page["text"] and page["size"][0] > 0 and "blocks" in page
    assert "number 2." in value_of(next((out / "view" / "pages").rglob("0002.js")))["text"]


@pytest.mark.parametrize(
    "record",
    [
        "[" * 100_000,
        '{"documents": {"a": 1}, "server": [], "score": 5, "benchmark": 7, "finished": "x"}',
        '{"documents": [5, {"source": {"a": 1}, "error": [1]}, {"source": null}, {"source": "a", "folder": 7}]}',
    ],
)
@pytest.mark.parametrize("source", ["\0bad", "x" * 5000, "../../../../../../etc/hostname"])
def test_run_records_of_any_kind_are_shown(tmp_path: Path, record: str, source: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    document = add_document(out, "doc", [PLAIN.format(1)])
    (out / "run.json").write_text(record)
    ocr.write_json(document.folder / "source.json", {"source": source})
    (document.folder / "round").symlink_to(out)
    make(out)
    assert value_of(out / "view" / "data" / "run.js")["pages"] == 1


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"documents": []}')
    make(tmp_path)
    assert value_of(tmp_path / "view" / "data" / "run.js")["pages"] == 0


def test_a_full_disk_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocr, "Workers", InThread)
        patch.setattr(ocr, "write_atomic", full)
        code = thread.submit(view.main, [str(run), "--out", str(run.parent / "elsewhere"), "--no-images"]).result()
    said = capsys.readouterr().err
    assert code == 1 and "elsewhere" in said and "cannot be written: No space left on device" in said
    assert view.main([str(run), "--out", str(run / "run.json")]) == 1  # a file is there
    assert "cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_that_hangs_or_kills_costs_its_picture_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    finish_run(out, *(add_document(out, name, [PLAIN.format(1)]) for name in ("a", "hang-b", "kill-c", "d")))
    monkeypatch.setattr(ocr, "start_worker", fragile)
    monkeypatch.setattr(view, "PAGE_LIMIT", 10.0)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(view.main, [str(out), "--workers", "2"]).result() == 0
    rows = value_of(out / "view" / "data" / "rows-0.js")
    assert [(row[4], row[8]) for row in rows] == [(0, 1), (0, 0), (0, 0), (0, 1)]
    pages = [value_of(out / "view" / "pages" / entry.id / "0001.js") for entry in view.find_documents(out)]
    assert "TimeoutError" in pages[1]["notes"][0] and "Crashed" in pages[2]["notes"][0]


def test_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view.main([str(tmp_path / "no")]) == 2
    assert view.main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_nothing_of_a_reply_runs(run: Path) -> None:
    page = value_of(run / "view" / "pages" / view.find_documents(run)[0].id / "0002.js")
    shown = lxml.html.fragment_fromstring("".join(block["html"] for block in page["blocks"]), create_parent="div")
    for element in shown.iter():
        assert element.tag not in (
            "script",
            "style",
            "iframe",
            "form",
            "svg",
            "object",
            "base",
            "link",
            "meta",
            "input",
        )
        assert not [name for name in element.attrib if name.startswith("on") or name in ("style", "srcset", "id")]
        assert element.get("href", "https:").startswith(("https:", "mailto:", "#"))
        assert element.get("src") in (None, "images/0002-01.webp")  # the figure that was cut out
        assert (element.get("class") or "math").startswith(("math", "language-"))


def test_differences_are_marked(compared: Path) -> None:
    assert value_of(compared / "view" / "data" / "run.js")["scored"] == "words"
    rows = value_of(compared / "view" / "data" / "worst-0.js")
    assert [row[3] for row in rows] == [2, 1]  # the page that the other run does not have
    page = value_of(next((compared / "view" / "pages").rglob("0001.js")))
    ours, theirs = ("".join(block["html"] for block in p["blocks"]) for p in (page, page["other"]))
    assert "<mark>shallow</mark>" in ours and "7.<mark>50</mark>" in ours and "7.<mark>80</mark>" in theirs
    assert '<mark><span class="math"><math' in ours and ours.count("<mark>") == 3 and theirs.count("<mark>") == 2
    assert page["differs"] == 3


OMNI = DATA / "mini" / "omni"


def omni_run(out: Path, results: dict[str, list[str]]) -> Path:
    """A scored run of omni_parse_bench: of each page, how its tests ended."""
    (out / "ocr").mkdir(parents=True)
    pages = [OMNI / "pages" / f"{name}.pdf" for name in results]
    finish_run(out / "ocr", *(add_document(out / "ocr", path.stem, [MATHS], path) for path in pages))
    ocr.write_json(out / "run.json", {"benchmark": "omni_parse_bench", "score": {"headline": 0.5}})
    details = out / "unit_tests" / "details"
    details.mkdir(parents=True)
    for name, ends in results.items():
        tests = (
            {"test_id": f"{name}_0{i}", "test_type": "present", "tags": ["math"], "result": end}
            | {"why": "" if end == "pass" else "<b>not found</b>"}
            for i, end in enumerate(ends)
        )
        (details / f"{name}.jsonl").write_text("\n".join([*map(json.dumps, tests), "broken"]))
    return out


def test_omni_tests_worst_first(tmp_path: Path) -> None:
    out = omni_run(tmp_path / "omni", {"waves_p2": ["pass"], "rain_p5": ["pass", "fail"]})
    make(out, "--data", OMNI, "--no-images")
    rows = value_of(out / "view" / "data" / "worst-0.js")
    assert [row[9] for row in rows] == [[1, 2], [1, 1]]
    found = [value_of(path)["tests"] for path in (out / "view" / "pages").rglob("0001.js")]
    asked = {test["id"]: (test["asked"], test["passed"], test["why"]) for tests in found for test in tests}
    assert asked["rain_p5_01"][1:] == (False, "<b>not found</b>") and "c=\\sqrt{gh}" in asked["waves_p2_00"][0]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scored runs of the same pages: the second passes one test more and two less."""
    base = tmp_path_factory.mktemp("scored")
    ends = {"waves_p2": ["pass", "fail"], "rain_p5": ["pass", "pass", "fail"], "bees_p1": ["fail"]}
    a = omni_run(base / "bf16", ends)
    b = omni_run(base / "nvfp4", ends | {"waves_p2": ["pass", "pass"], "rain_p5": ["fail", "fail", "fail"]})
    make(a, "--data", OMNI, "--compare", b, "--no-images")
    return a


def test_tests_of_two_scored_runs_stand_side_by_side(scored: Path) -> None:
    rows = value_of(scored / "view" / "data" / "rows-0.js")
    assert [row[10] for row in rows] == [[0, 1], [2, 0], 0]
    counts = value_of(scored / "view" / "data" / "run.js")["counts"]["rows"]
    assert counts[0][len(view.STATUSES) + 1] == 2
    pages = [value_of(path) for path in (scored / "view" / "pages").rglob("0001.js")]
    ends = {test["id"]: test["passed"] for page in pages for test in page["other"]["tests"]}
    assert ends["rain_p5_00"] is False and ends["waves_p2_01"] is True


def test_a_run_that_was_not_scored_passes_no_test(tmp_path: Path) -> None:
    out, data = tmp_path / "olmocr", DATA / "mini" / "olmocr"
    (out / "ocr").mkdir(parents=True)
    finish_run(out / "ocr", add_document(out / "ocr", "ferry", [MATHS], data / "pdfs" / "tables" / "ferry_fares.pdf"))
    ocr.write_json(out / "run.json", {"benchmark": "olmOCR-bench"})
    (out / "bench").mkdir()
    shutil.copy(data / "table_tests.jsonl", out / "bench")
    make(out, "--no-images")
    assert value_of(out / "view" / "data" / "rows-0.js")[0][9] == 0
    page = value_of(next((out / "view" / "pages").rglob("0001.js")))
    assert page["tests"] and all(test["passed"] is None for test in page["tests"])


def test_olmocr_tests(tmp_path: Path) -> None:
    out, data = tmp_path / "olmocr", DATA / "mini" / "olmocr"
    (out / "ocr").mkdir(parents=True)
    finish_run(
        out / "ocr", add_document(out / "ocr", "ferry_fares", [MATHS], data / "pdfs" / "tables" / "ferry_fares.pdf")
    )
    ocr.write_json(out / "run.json", {"benchmark": "olmOCR-bench"})
    (out / "bench").mkdir()
    shutil.copy(data / "table_tests.jsonl", out / "bench")
    (out / "failed_tests.jsonl").write_text('{"id": "ferry_fares_pg1_01"}\n{"id": "tables/ferry_fares.pdf_baseline"}\n')
    log = "  [FAIL] Test ferry_fares_pg1_01 on tables/ferry_fares page 1 average (0/1 passed). Ex: No cell '5.60'\n"
    (out / "score.log").write_text(log)
    make(out, "--no-images")
    tests = {test["id"]: test for test in value_of(next((out / "view" / "pages").rglob("0001.js")))["tests"]}
    assert tests["ferry_fares_pg1_00"]["passed"] and not tests["tables/ferry_fares.pdf_baseline"]["passed"]
    assert tests["ferry_fares_pg1_01"]["why"] == "No cell '5.60'"


# ---- in a browser


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with another beside it that read three things otherwise, and lacks a page."""
    base = tmp_path_factory.mktemp("compared")
    a, b = base / "a", base / "b"
    a.mkdir(), b.mkdir()
    other = MATHS.replace("7.50", "7.80").replace("\\sqrt{gh}", "\\sqrt{gk}").replace("shallow ", "")
    finish_run(a, add_document(a, "doc", [MATHS, PLAIN.format(1)], base / "doc.pdf"))
    finish_run(b, add_document(b, "doc", [other], base / "doc.pdf"))
    make(a, "--compare", b)
    return a


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        why = "Playwright is not installed" if CHROMIUM else "Chromium is not installed (apt-get install chromium)"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Tab:
    """A page of the view in a browser that notes every request, message and dialog."""

    def __init__(self, browser: Any, folder: Path, at: str = "", **options: Any):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", lambda m: self.troubles.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda r: self.troubles.append(r.url) if not r.url.startswith("file:") else None)
        self.page.add_init_script("window.run = () => { window.ran = true }; window.alert = window.run;")
        self.page.goto((folder / "index.html").as_uri() + at)
        self.ready()

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        ran = self.page.evaluate("window.ran")
        self.context.close()
        assert self.troubles == [] and not ran

    def ready(self) -> None:
        self.page.wait_for_selector("html[data-ready]")

    def go(self, at: str) -> None:
        self.act(lambda: self.page.evaluate("at => { location.hash = at }", at))

    def act(self, action: Any) -> None:
        """Does something that shows another page or list, and waits for it."""
        before = self.page.evaluate("document.documentElement.dataset.ready")
        action()
        self.until(lambda: self.page.evaluate("document.documentElement.dataset.ready") != before)

    def until(self, true: Callable[[], bool]) -> None:
        """Waits for something to come to be (the page's policy lets Playwright wait for no script of its own)."""
        for _ in range(200):
            if true():
                return
            self.page.wait_for_timeout(25)
        raise AssertionError("it did not come to be")

    def press(self, key: str) -> None:
        self.act(lambda: self.page.keyboard.press(key))

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_text_contents()]


@pytest.mark.browser
def test_list_filters_and_search(browser: Any, run: Path) -> None:
    with Tab(browser, run / "view") as tab:
        assert tab.texts(".documents .card .label") == ["report.pdf", "hërring #2?&.pdf", "broken.pdf"]
        assert "the file is <i>empty</i>" in tab.texts(".documents .card")[2]
        tab.act(lambda: tab.page.click("[data-show=failed]"))
        assert tab.texts(".card .label") == ["report.pdf", "broken.pdf"]
        tab.go("#/?as=pages")
        assert tab.page.locator(".card").count() == 60
        tab.page.mouse.wheel(0, 100_000)
        tab.until(lambda: tab.page.locator(".card").count() == 70)
        tab.act(lambda: tab.page.click("[data-show=suspect]"))
        assert "cut off after 300 tokens" in tab.texts(".card")[0]
        tab.page.keyboard.press("/")
        for query, hits in (("zuri", 1), ("汉字文", 1), ("herring number 7 ", 1), ("HERRING ordin", 67), ("absent", 0)):
            tab.act(lambda query=query: tab.page.fill("#query", query))
            shown = 0 if not hits else int(tab.texts(".count")[0].split()[0])
            assert shown == hits, query


@pytest.mark.browser
def test_page_keys_and_links(browser: Any, run: Path) -> None:
    with Tab(browser, run / "view", "#/p/0") as tab:
        page = tab.page
        assert page.locator("#sheet img").evaluate("i => i.naturalWidth") > 500
        assert page.locator(".box").count() == 7
        assert page.locator(".reply img").evaluate("i => i.naturalWidth") > 100
        page.hover('.box[data-i="3"]')
        assert "hot" in page.locator('.block[data-i="3"]').get_attribute("class")
        page.hover('.block[data-i="2"]')
        assert "hot" in page.locator('.box[data-i="2"]').get_attribute("class")
        page.click('.box[data-i="6"]')
        assert "chosen" in page.locator('.block[data-i="6"]').get_attribute("class")
        assert page.locator(".reply table td").count() == 2 and page.locator(".reply math").count() == 2
        assert tab.texts(".reply .math:not(:has(math))") == ["\\(\\broken{\\)"]
        assert page.locator("math annotation").first.text_content() == "c = \\sqrt{gh}"
        assert "graph TD" in tab.texts(".reply pre")[0]
        for key, words in (("2", "## Waves"), ("3", "data-bbox"), ("4", '"status": "ok"'), ("5", "stop")):
            page.keyboard.press(key)
            assert words in page.locator("#panel").inner_text()
        page.keyboard.press("1")
        page.keyboard.press("b")
        assert page.locator("#boxes").get_attribute("aria-pressed") == "false"
        tab.press("s")  # doubtful pages are the third and the fourth
        assert page.input_value("#jump") == "3"
        tab.press("s")
        assert page.input_value("#jump") == "4" and tab.texts(".reasons") == ["the server refused <b>it</b>"]
        tab.press("ArrowLeft")
        assert page.input_value("#jump") == "3"
        tab.press("Escape")
        assert page.locator(".documents").count() == 1


@pytest.mark.browser
def test_formulas_are_copied_as_latex(browser: Any, run: Path) -> None:
    with Tab(browser, run / "view", "#/p/0") as tab:
        copied = tab.page.evaluate("""() => {
            getSelection().selectAllChildren(document.querySelector('.block[data-i="1"] .reply'));
            const data = new DataTransfer();
            document.dispatchEvent(new ClipboardEvent("copy", { clipboardData: data, cancelable: true }));
            return data.getData("text/plain");
        }""")
        assert "The speed is $c = \\sqrt{gh}$" in copied


@pytest.mark.browser
def test_nothing_runs_in_the_browser(browser: Any, run: Path) -> None:
    with Tab(browser, run / "view", "#/p/1") as tab:
        for key in "12345":
            tab.page.keyboard.press(key)
            tab.page.wait_for_timeout(50)
        tab.go("#/?q=x")
    document = view.find_documents(run)[0]
    with browser.new_context() as context:  # the client's own page of the document
        page = context.new_page()
        page.add_init_script("window.run = () => { window.ran = true }")
        page.goto((document.folder / "report.html").as_uri())
        assert not page.evaluate("window.ran") and page.locator("math").count() >= 2


@pytest.mark.browser
def test_two_scored_runs_in_the_browser(browser: Any, scored: Path) -> None:
    with Tab(browser, scored / "view") as tab:
        page = tab.page
        tab.act(lambda: page.click("[data-show=tests]"))
        assert sorted(tab.texts(".card .score.bad")) == ["1 test passed only in nvfp4", "2 tests passed only in bf16"]
        tab.act(lambda: page.click(".card >> text=rain_p5"))
        page.keyboard.press("2")
        assert tab.texts("#tab-tests") == ["Tests 2/3 ↔ 0/3"]
        assert page.locator(".test.differs").count() == 2 and page.locator(".test").count() == 3
        assert tab.texts(".test:first-child .badge") == ["bf16: passed", "nvfp4: failed"]
        assert tab.texts(".test:first-child .why") == ["nvfp4: <b>not found</b>"]


@pytest.mark.browser
def test_differences_are_gone_through(browser: Any, compared: Path) -> None:
    with Tab(browser, compared / "view", "#/p/0") as tab:
        page = tab.page
        for key, words in (("d", "shallow"), ("d", "c=gh"), ("d", "50"), ("D", "c=gh"), ("d", "50"), ("d", "c=gk")):
            page.keyboard.press(key)
            (now,) = tab.texts("mark.now")
            assert now.startswith(words)
        page.hover(".half:last-child .block >> nth=0")
        assert page.locator("#sheet .ghost").count() == 1
        page.hover("#tab-text")
        assert page.locator("#sheet .ghost").count() == 0
        tab.go("#/p/1")
        assert "absent" in tab.texts(".half .badge")


@pytest.mark.browser
def test_small_screens_keep_everything_in_reach(browser: Any, run: Path) -> None:
    with Tab(browser, run / "view", "#/p/1", viewport={"width": 360, "height": 700}, has_touch=True) as tab:
        page = tab.page
        assert page.locator(".wide.maths").count() >= 1  # a formula far wider than the screen
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        page.mouse.wheel(0, 500)
        steps = page.locator(".steps")
        assert steps.bounding_box()["y"] + steps.bounding_box()["height"] == 700
        # Nothing of the page lies over them.
        tab.act(lambda: page.click("#next"))
        assert page.input_value("#jump") == "3"
        low = page.evaluate("""() => [...document.querySelectorAll("button, a, select")].filter((e) => e.offsetParent
            && !e.closest(".box, .reply, .skip, .legend") && !e.classList.contains("box")
            && e.getBoundingClientRect().height < 32).map((e) => e.outerHTML)""")
        assert low == []


AXE = {"resultTypes": ["violations"], "preload": False}


def faults_of(tab: Tab, axe: Any, where: str) -> list[Any]:
    """What axe-core calls serious or critical, and a page wider than its screen."""
    tab.page.wait_for_timeout(100)
    found = axe.run(tab.page, options=AXE).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    faults = [(where, v["id"], v["nodes"][0]["html"], v["nodes"][0]["failureSummary"]) for v in serious]
    wide = tab.page.evaluate("document.documentElement.scrollWidth > innerWidth")
    return [*faults, *([(where, "wider than the screen")] if wide else [])]


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_no_serious_fault_for_axe(browser: Any, run: Path, theme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with Tab(browser, run / "view", viewport={"width": width, "height": 800}, color_scheme=theme) as tab:
        for at in ("#/", "#/p/0"):
            tab.go(at)
            assert not faults_of(tab, axe, at)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_serious_fault_for_axe_anywhere(
    browser: Any, run: Path, compared: Path, scored: Path, theme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    lists = ["#/", "#/?as=pages", "#/?show=suspect", "#/?show=failed", "#/?doc=0", "#/?q=herring", "#/?q=absent"]
    pages = [f"#/p/{i}" for i in range(5)]
    views = {run: lists + pages, compared: ["#/", "#/p/0", "#/p/1"], scored: ["#/", "#/p/1"]}
    faults = []
    for folder, addresses in views.items():
        with Tab(browser, folder / "view", viewport={"width": width, "height": 800}, color_scheme=theme) as tab:
            for at in addresses:
                tab.go(at + ("?q=" if at == "#/" else ""))
                tabs = tab.page.locator("[role=tab]")
                for i in range(max(1, tabs.count())):
                    if tabs.count():
                        tabs.nth(i).click()
                    faults += faults_of(tab, axe, f"{folder.name} {at} tab {i}")
            tab.page.evaluate("document.getElementById('help').showModal()")
            faults += faults_of(tab, axe, "keys")
    assert not faults


@pytest.mark.browser
def test_a_long_document_opens_at_once(browser: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    document = add_document(out, "doc", [PLAIN.format(1)])
    pages = document.folder / "pages"
    for number in range(2, 2001):
        for suffix in (".json", ".html", ".md"):
            os.link(pages / f"0001{suffix}", pages / f"{number:04d}{suffix}")
    folder = make(out, "--no-images")
    assert max(path.stat().st_size for path in (folder / "data").iterdir()) < 200_000
    with Tab(browser, folder, "#/?as=pages") as tab:
        took = tab.page.evaluate("performance.now()")
        assert tab.page.locator(".card").count() >= 60 and took < 2000
        tab.go("#/p/1500")
        assert tab.page.input_value("#jump") == "1501"
