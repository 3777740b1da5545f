"""benchmark.py: what it reads, asks, writes and scores, on tiny datasets in both benchmarks' formats.

The stand-in answers each page as a perfect model would, so that both scorers must say 100%. Tests marked `scorer` run
the scorers themselves (tests/install_scorers.sh installs them); they are skipped where those are absent, but not in CI.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from standin import Answer, Request, Says, Standin, Status, answer_by_page

import benchmark
import ocr

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
MINI = DATA / "mini"
OMNI, OLMOCR = MINI / "omni", MINI / "olmocr"
REPLIES = MINI / "replies"
CI = os.environ.get("CI") == "true"
by_page = answer_by_page(REPLIES)


def scorer_python(name: str) -> Path:
    """The Python of an installed scorer, or a skipped test."""
    python = benchmark.environment_python(Path(os.environ.get("OCR_SCORERS", ROOT / ".scorers")) / name)
    if not python.exists():
        message = f"the {name} scorer is not installed: tests/install_scorers.sh"
        pytest.fail(message) if CI else pytest.skip(message)
    return python


@pytest.fixture
def perfect() -> Iterator[Standin]:
    with Standin(by_page) as server:
        yield server


def run(*words: object) -> int:
    """`python benchmark.py WORDS` in this process; the exit code."""
    return benchmark.main([str(word) for word in words])


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def failing(*words: str) -> Callable[[Request], Says]:
    """A server that refuses the pages on which one of the words is read."""

    def answer(request: Request) -> Says:
        said = by_page(request)
        return Status(400, "cannot") if any(word in str(said.content) for word in words) else said

    return answer


def with_replies(replies: dict[str, str]) -> Callable[[Request], Says]:
    """A server that answers some pages otherwise, known by a word of their right reply."""

    def answer(request: Request) -> Says:
        said = by_page(request)
        return next((Answer(reply) for word, reply in replies.items() if word in str(said.content)), said)

    return answer


# ---- omni: a raw reply -> what omni_parse_bench grades


@pytest.mark.parametrize("name", read(DATA / "omni_outputs.json")["replies"])
def test_html_and_blocks_are_those_of_the_benchmarks_own_adapter(name: str) -> None:
    page = read(DATA / "omni_outputs.json")["replies"][name]
    assert benchmark.omni_outputs(page["reply"]) == {"html": page["html"], "blocks": page["blocks"]}


@pytest.mark.parametrize(
    "odd",
    [
        '<div data-bbox="1 2 3 4" data-label="Hologram">',
        '<div data-bbox="1..5 2 3 4" data-label="Text">',
        '<div data-bbox="none" data-label="Text">',
        '<div data-label="Text">',
    ],
)
def test_a_block_that_cannot_be_read_takes_no_other_with_it(odd: str) -> None:
    good = '<div data-bbox="10 20 30 40" data-label="Text"><p>kept</p></div>'
    outputs = benchmark.omni_outputs(f"{good}{odd}<p>odd</p></div>{good}")
    kept = {"label": "text", "bbox": [0.01, 0.02, 0.03, 0.04], "text": "kept"}
    assert outputs == {"html": "<p>kept</p><p>odd</p><p>kept</p>", "blocks": [kept, kept]}


# ---- Which items


def items(*names: str) -> list[benchmark.Item]:
    return [benchmark.Item(name, name[0], Path(name)) for name in names]


def ids(choice: benchmark.Choice) -> list[str]:
    return [item.id for item in choice.items]


def test_limit_takes_the_first() -> None:
    choice = benchmark.choose(items("a1", "a2", "b1"), limit=2)
    assert (ids(choice), choice.words) == (["a1", "a2"], "the first 2")
    assert benchmark.choose(items("a1", "a2"), limit=5).words == "all 2"


def test_sample_is_spread_over_the_suites_and_repeatable() -> None:
    every = items(*(f"a{n}" for n in range(50)), "b1", "b2", "c1")
    choice = benchmark.choose(every, sample=7)
    assert sorted(name[0] for name in ids(choice)) == ["a"] * 4 + ["b", "b", "c"]
    assert ids(choice) == ids(benchmark.choose(every, sample=7)) != ids(benchmark.choose(every, sample=7, seed=1))
    assert ids(choice) == [item.id for item in every if item in choice.items]


def test_only_takes_those_named_and_says_which_it_does_not_know(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("# mine\nb1\n\na1\n")
    assert ids(benchmark.choose(items("a1", "a2", "b1"), only=names)) == ["a1", "b1"]
    names.write_text("a1\nz9\n")
    with pytest.raises(ocr.BadUsage, match="not in the dataset: z9"):
        benchmark.choose(items("a1"), only=names)
    with pytest.raises(ocr.BadUsage, match="No such file"):
        benchmark.choose(items("a1"), only=tmp_path / "absent.txt")


# ---- Bad input: said before anything is sent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tiny datasets to break."""
    return Path(shutil.copytree(MINI, tmp_path / "mini"))


def refused(capsys: pytest.CaptureFixture[str], server: Standin, *words: object) -> str:
    """What a command says that is refused for its input, nothing having been sent."""
    assert run(*words, "--url", server.url) == 2
    assert server.requests == []
    return capsys.readouterr().err


def test_a_folder_that_is_not_the_dataset(tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, perfect, "omni", "--data", OLMOCR, "--out", tmp_path / "run")
    assert "manifest.parquet is missing" in said and "gold is missing" in said
    said = refused(capsys, perfect, "olmocr", "--data", OMNI, "--out", tmp_path / "run")
    assert "there is no .jsonl file" in said and "the folder pdfs is missing" in said
    assert "no such folder" in refused(capsys, perfect, "omni", "--data", tmp_path / "x", "--out", tmp_path / "run")


def test_omni_lists_files_without_rows_and_rows_without_files(
    copy: Path, tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "omni/pages/bees_p1.pdf").unlink()
    (copy / "omni/gold/rain_p5.json").unlink()
    shutil.copy(OMNI / "gold/waves_p2.json", copy / "omni/gold/waves_p3.json")
    said = refused(capsys, perfect, "omni", "--data", copy / "omni", "--out", tmp_path / "run")
    assert "bees_p1: doc_path pages/bees_p1.pdf does not exist" in said
    assert "rain_p5: gt_path gold/rain_p5.json does not exist" in said
    assert "gold/waves_p3.json has no row in manifest.parquet" in said
    (copy / "omni/manifest.parquet").write_bytes(b"PAR1 no more")
    said = refused(capsys, perfect, "omni", "--data", copy / "omni", "--out", tmp_path / "run")
    assert "manifest.parquet cannot be read" in said


def test_olmocr_lists_tests_that_cannot_be_run(
    copy: Path, tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "olmocr/pdfs/tables/sign.pdf").unlink()
    tests = copy / "olmocr/old_scans.jsonl"
    tests.write_text(tests.read_text() + "{broken\n" + tests.read_text().splitlines()[0] + "\n")
    said = refused(capsys, perfect, "olmocr", "--data", copy / "olmocr", "--out", tmp_path / "run")
    assert "table_tests.jsonl line 6: pdfs/tables/sign.pdf does not exist" in said
    assert "old_scans.jsonl line 4: no JSON object" in said
    assert "old_scans.jsonl line 5: id letter_1884_pg1_00 occurs twice" in said


def test_a_folder_with_other_files_is_not_written_to(
    tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    assert "no run.json" in refused(capsys, perfect, "omni", "--data", OMNI, "--out", tmp_path)


# ---- The pinned revisions


def test_without_data_the_pinned_revision_is_downloaded(
    tmp_path: Path, perfect: Standin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    signature, asked = inspect.signature(hub.snapshot_download), []

    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        asked.append(signature.bind(*args, **kwargs).arguments)  # the installed package takes these arguments
        return str(OMNI if "omni" in args[0] else OLMOCR)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert run("omni", "--out", tmp_path / "omni", "--url", perfect.url, "--limit", 1) == 0
    assert run("olmocr", "--out", tmp_path / "olmocr", "--url", perfect.url, "--limit", 1) == 0
    assert [(call["repo_id"], call["repo_type"], call["revision"]) for call in asked] == [
        ("datalab-to/omni_parse_bench", "dataset", "d70182b9f901d1660a27e60bf6be6d6e6ea83013"),
        ("allenai/olmOCR-bench", "dataset", "54a96a6fb6a2bd3b297e59869491db4d3625b711"),
    ]
    assert read(tmp_path / "omni/run.json")["settings"]["revision"] == "d70182b9f901d1660a27e60bf6be6d6e6ea83013"

    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise hub.errors.LocalEntryNotFoundError("the Hub cannot be reached\nand more")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    perfect.reset()
    assert "give its folder to --data" in refused(capsys, perfect, "omni", "--out", tmp_path / "omni")


def test_a_folder_in_the_hubs_cache_tells_its_revision(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / OMNI_REVISION
    folder.mkdir(parents=True)
    assert benchmark.dataset_folder(benchmark.OMNI, folder) == (folder, OMNI_REVISION)
    assert benchmark.dataset_folder(benchmark.OMNI, OMNI) == (OMNI, None)


OMNI_REVISION = benchmark.OMNI.revision


# ---- A run's folder


def test_run_json_holds_all_that_reproduces_a_score(tmp_path: Path) -> None:
    with Standin(by_page, mtp_acceptance=(0.9, 0.7, 0.5), api_key="secret") as server:
        code = run("omni", "--data", OMNI, "--out", tmp_path, "--url", server.url, "--api-key", "secret", "--dpi", 192)
    record = read(tmp_path / "run.json")
    settings, facts = record["settings"], record["server"]
    assert code == 0
    assert (settings["dataset"], settings["selection"], settings["dpi"]) == ("omni_parse_bench", "all 7", 192)
    assert settings["sampling"][:2] == [
        "temperature 0.0, top_p 0.1, seed 0",
        "temperature 0.2, top_p 0.95, seed 1",
    ]
    assert len(settings["prompt_sha256"]) == len(settings["dataset_sha256"]) == 64
    assert (facts["model"], facts["version"], facts["max_model_len"]) == ("chandra", "0.33.0", 24576)
    assert facts["speculative_tokens"] == 3
    assert record["pages"] == {"ok": 7, "suspect": 0, "failed": 0, "missing": 0}
    assert record["tokens"] == record["sessions"][0]["tokens"] > 0
    assert record["wall_seconds"] > 0 and record["pages_per_second"] > 0
    assert "secret" not in (tmp_path / "run.json").read_text()


def test_running_again_asks_nothing_and_changes_nothing(tmp_path: Path, perfect: Standin) -> None:
    words = ["olmocr", "--data", OLMOCR, "--out", tmp_path, "--url", perfect.url]
    assert run(*words) == 0
    asked, before = len(perfect.requests), tree(tmp_path / "bench")
    assert run(*words) == 0
    assert (len(perfect.requests), tree(tmp_path / "bench")) == (asked, before)
    assert read(tmp_path / "run.json")["sessions"][1]["pages"] == 0


def test_a_changed_setting_is_refused_with_what_changed(
    tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["omni", "--data", OMNI, "--out", tmp_path, "--limit", 2]
    assert run(*words, "--url", perfect.url) == 0
    perfect.reset()
    said = refused(capsys, perfect, *words, "--dpi", 300)
    assert "dpi: 150 then, 300 now" in said and "selection" not in said
    assert "selection: the first 2 then, the first 3 now" in refused(capsys, perfect, *words[:-1], 3)
    assert "benchmark: omni_parse_bench then" in refused(capsys, perfect, "olmocr", "--data", OLMOCR, "--out", tmp_path)
    with Standin(by_page, model="other") as other:
        assert "replies of another model" in refused(capsys, other, *words)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with Standin(by_page, seconds=0.5) as server:
        words = ["omni", "--data", OMNI, "--out", tmp_path, "--url", server.url, "--concurrency", "1", "--no-check"]
        killed = subprocess.Popen([sys.executable, ROOT / "benchmark.py", *map(str, words)], stderr=subprocess.DEVNULL)
        wait_for(lambda: len(list((tmp_path / "ocr").rglob("pages/0001.json"))) >= 2)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        done, server.seconds = len(list((tmp_path / "ocr").rglob("pages/0001.json"))), 0.0
        server.reset()
        assert run(*words) == 0
        assert len(server.requests) == 7 - done < 6
    assert len(list((tmp_path / "predictions").glob("*.json"))) == 7
    assert read(tmp_path / "run.json")["pages"]["ok"] == 7


def test_ctrl_c_keeps_what_arrived_and_exits_130(tmp_path: Path) -> None:
    with Standin(by_page, seconds=0.5) as server:
        words = ["omni", "--data", OMNI, "--out", tmp_path, "--url", server.url, "--concurrency", "1"]
        stopped = subprocess.Popen(
            [sys.executable, ROOT / "benchmark.py", *map(str, words)], stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: len(list((tmp_path / "ocr").rglob("pages/0001.json"))) >= 2)
        stopped.send_signal(signal.SIGINT)
        said = stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 130
    assert "run the same command again" in said and "Traceback" not in said
    assert 2 <= read(tmp_path / "run.json")["sessions"][0]["pages"] < 7


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def test_a_page_that_fails_and_then_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Standin(failing("shallow shelf")) as server:
        words = ["omni", "--data", OMNI, "--out", tmp_path, "--url", server.url, "--no-check"]
        assert run(*words) == 1
        assert "waves_p2.pdf, page 1:" in capsys.readouterr().err
        assert not (tmp_path / "predictions/waves_p2.json").exists()
        error = read(tmp_path / "records/waves_p2.json")["error"]
        assert error["type"] == "PageFailed" and "cannot" in error["message"]
        server.answer = by_page
        server.reset()
        assert run(*words) == 0
        assert len(server.requests) == 1
    assert (tmp_path / "predictions/waves_p2.json").exists() and not list((tmp_path / "records").iterdir())


def test_a_server_that_dies_leaves_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Standin(by_page, seconds=0.3) as server:
        words = ["olmocr", "--data", OLMOCR, "--out", tmp_path, "--url", server.url, "--concurrency", "1", "--score"]
        python = fake_scorer(tmp_path.parent, "0.4.27", "", 1)  # it is not asked to score half a run

        def dies_at_the_third(request: Request) -> Says:
            server.engine_dead = server.engine_dead or request.number >= 2
            return by_page(request)

        server.answer = dies_at_the_third
        assert run(*words, "--patience", "1", "--scorer-python", python) == 3
        assert "not finished" in capsys.readouterr().err
        record = read(tmp_path / "run.json")
        assert record["pages"]["missing"] > 0 and record["pages"]["failed"] == 0
        server.engine_dead, server.answer = False, by_page
        assert run(*words[:-1]) == 0
    assert read(tmp_path / "run.json")["pages"] == {"ok": 11, "suspect": 0, "failed": 0, "missing": 0}


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("omni", "--data", OMNI, "--out", tmp_path, "--url", "http://127.0.0.1:9/v1") == 3
    assert "127.0.0.1:9" in capsys.readouterr().err


# ---- olmocr: the folder that the scorer reads


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_bench_folder_holds_what_the_scorer_reads_and_nothing_else(tmp_path: Path, perfect: Standin) -> None:
    words = ["olmocr", "--data", OLMOCR, "--out", tmp_path, "--url", perfect.url, "--repeats", 2, "--no-check"]
    assert run(*words) == 0
    given, made = tree(OLMOCR), tree(tmp_path / "bench")
    pages = {name: text for name, text in made.items() if name.startswith("chandra/")}
    assert {name: text for name, text in made.items() if name not in pages} == given
    numbers = {"multi_column/field_notes": (1, 2)}
    assert set(pages) == {
        f"chandra/{stem}_pg{number}_repeat{repeat}.md"
        for stem in (name[5:-4] for name in given if name.endswith(".pdf"))
        for number in numbers.get(stem, (1,))
        for repeat in (1, 2)
    }
    assert pages["chandra/headers_footers/roads_pg38_pg1_repeat1.md"] == b""
    assert b"\\(u(0) = u(L) = 0\\)" in pages["chandra/arxiv_math/2503.00001_pg4_pg1_repeat2.md"]
    assert len(perfect.requests) == 22
    assert len({request.body_hash for request in perfect.requests}) == 11  # each pass asks the same, greedily
    (tmp_path / "bench/old_candidate").mkdir()
    (tmp_path / "bench/old_candidate/x_pg1_repeat1.md").write_text("stale")
    assert run(*words) == 0
    assert tree(tmp_path / "bench") == made and not (tmp_path / "bench/old_candidate").exists()


def test_pdfs_are_copied_where_links_fail(tmp_path: Path, perfect: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: Any, **kwargs: Any) -> None:
        raise OSError("a privilege is not held")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    assert run("olmocr", "--data", OLMOCR, "--out", tmp_path, "--url", perfect.url, "--limit", 1) == 0
    pdf = next((tmp_path / "bench/pdfs").rglob("*.pdf"))
    assert not pdf.is_symlink() and pdf.read_bytes() == (OLMOCR / pdf.relative_to(tmp_path / "bench")).read_bytes()


def test_of_a_part_of_the_pdfs_only_their_tests_are_kept(tmp_path: Path, perfect: Standin) -> None:
    names = tmp_path / "names.txt"
    names.write_text("tables/sign.pdf\n")
    assert run("olmocr", "--data", OLMOCR, "--out", tmp_path / "run", "--url", perfect.url, "--only", names) == 0
    assert sorted(tree(tmp_path / "run/bench")) == [
        "chandra/tables/sign_pg1_repeat1.md",
        "pdfs/tables/sign.pdf",
        "table_tests.jsonl",
    ]
    assert len((tmp_path / "run/bench/table_tests.jsonl").read_text().splitlines()) == 2


def test_pictures_are_no_text_unless_a_page_holds_nothing_else(tmp_path: Path) -> None:
    picture = '<div data-bbox="1 2 300 400" data-label="Image"><img src="sign_37.png" alt="A [red] door, 37"/></div>'
    text = '<div data-bbox="1 500 900 600" data-label="Text"><p>Only this.</p></div>'
    header = '<div data-bbox="1 2 300 40" data-label="Page-Header"><img alt="Logo"/></div>'
    blank = '<div data-bbox="0 0 1000 1000" data-label="Blank-Page"></div>'
    replies = {"sign above": picture + text, "Ferry fares": header + picture, "Exercises": header + blank}
    with Standin(with_replies(replies)) as server:
        assert run("olmocr", "--data", OLMOCR, "--out", tmp_path, "--url", server.url) == 0
    pages = tmp_path / "bench/chandra"
    assert (pages / "tables/sign_pg1_repeat1.md").read_text().strip() == "Only this."
    assert (pages / "tables/ferry_fares_pg1_repeat1.md").read_text() == "![A red door, 37]()\n"
    assert (pages / "old_scans_math/algebra_1903_pg1_repeat1.md").read_text().strip() == ""


# ---- Scores


def scored(tmp_path: Path, server: Standin, name: str, *words: object) -> tuple[int, dict[str, Any]]:
    """A whole run of one of the benchmarks with its scorer; the exit code and run.json."""
    tell = ["--data", MINI / name, "--out", tmp_path / name, "--url", server.url]
    code = run(name, *tell, "--score", "--scorer-python", scorer_python(name), *words)
    return code, read(tmp_path / name / "run.json")


@pytest.mark.scorer
def test_omni_scores_100_on_right_replies(tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = scored(tmp_path, perfect, "omni")
    summary = read(tmp_path / "omni/unit_tests/summary.json")
    assert (code, record["score"]["headline"], summary["headline"]) == (0, 1.0, 1.0)
    assert {name: part["tests"] for name, part in record["score"]["parts"].items()} == {
        "text": 34,
        "tables": 5,
        "layout": 18,
    }
    assert "omni_parse_bench: 100.0 at 150 dpi (all 7)" in capsys.readouterr().out


@pytest.mark.scorer
def test_olmocr_scores_100_on_right_replies(
    tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = scored(tmp_path, perfect, "olmocr")
    score = record["score"]
    assert (code, score["headline"], score["dpi"], score["scorer"]) == (0, 1.0, 150, "olmocr 0.4.27")
    assert sum(part["tests"] for part in score["parts"].values()) == 41
    assert sum(kind["tests"] for kind in score["types"].values()) == 41
    assert "olmOCR-bench: 100.0 at 150 dpi (all 10)" in capsys.readouterr().out
    assert not (tmp_path / "olmocr/failed_tests.jsonl").exists()


@pytest.mark.scorer
def test_omni_counts_a_failed_page_as_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Standin(failing("Catch by port")) as server:
        code, record = scored(tmp_path, server, "omni")
    assert code == 1
    assert record["score"]["headline"] == pytest.approx(
        6 / 7
    )  # the others' mean x the share of pages that have a reply
    assert record["score"]["coverage"] == pytest.approx(6 / 7)
    assert "tables" not in record["score"]["parts"]  # all table tests are on the failed page
    assert "failed pages, which count 0: 1" in capsys.readouterr().out


@pytest.mark.scorer
def test_olmocr_counts_a_failed_page_as_0(tmp_path: Path) -> None:
    with Standin(failing("Exercises on quadratics")) as server:
        code, record = scored(tmp_path, server, "olmocr")
    parts = record["score"]["parts"]
    assert code == 1
    assert parts["old_scans_math"] == {"score": 0.0, "passed": 0, "tests": 2}
    assert parts["baseline"] == {"score": 7 / 8, "passed": 7, "tests": 8}  # an empty page fails its baseline test
    assert record["score"]["headline"] == pytest.approx((6 + 7 / 8) / 8)
    failed = [json.loads(line)["id"] for line in (tmp_path / "olmocr/failed_tests.jsonl").read_text().splitlines()]
    baseline = "old_scans_math/algebra_1903.pdf_baseline"
    assert sorted(failed) == ["algebra_1903_pg1_00", "algebra_1903_pg1_01", baseline]


@pytest.mark.scorer
@pytest.mark.parametrize("name", ["omni", "olmocr"])
def test_a_part_is_scored_on_its_own_tests(tmp_path: Path, perfect: Standin, name: str) -> None:
    code, record = scored(tmp_path, perfect, name, "--sample", 2)
    assert (code, record["score"]["headline"]) == (0, 1.0)
    assert record["settings"]["selection"] == "2 sampled over the suites with seed 0"
    assert record["pages"]["ok"] == 2
    assert sum(part["tests"] for part in record["score"]["parts"].values()) < 25


@pytest.mark.scorer
def test_repeats_are_scored_together(tmp_path: Path, perfect: Standin) -> None:
    code, record = scored(tmp_path, perfect, "olmocr", "--repeats", 2, "--limit", 3)
    assert (code, record["score"]["headline"], record["pages"]["ok"]) == (0, 1.0, 6)


@pytest.mark.scorer
def test_a_right_reading_passes_whatever_signs_it_holds(copy: Path, tmp_path: Path) -> None:
    tests: list[dict[str, Any]] = [
        {"type": "present", "text": "R & D at 5% < 6%, snake_case, 3 * 4 and $5"},
        {"type": "present", "text": "on the 10th of May"},
        {"type": "math", "math": "x^2+y^2=r^2"},
        {"type": "math", "math": "a<b"},
        {"type": "table", "cell": "Q & A", "down": "1 < 2"},
        {"type": "absent", "text": "37", "last_n": 20},
    ]
    head = {"pdf": "tables/sign.pdf", "page": 1, "checked": "verified"}
    lines = [json.dumps(head | {"id": f"signs_{n}"} | test) for n, test in enumerate(tests)]
    (copy / "olmocr/table_tests.jsonl").write_text("\n".join(lines) + "\n")
    (copy / "only.txt").write_text("tables/sign.pdf\n")
    reply = (
        '<div data-bbox="1 2 900 40" data-label="Text"><p>R &amp; D at 5% &lt; 6%, snake_case, 3 * 4 and $5</p></div>'
        '<div data-bbox="1 50 900 90" data-label="Text"><p>on the 10<sup>th</sup> of May '
        "<math>x^2+y^2=r^2</math></p></div>"
        '<div data-bbox="1 100 900 200" data-label="Table"><table><tr><td colspan="100%">Q &amp; A</td><td>'
        '<math>a&lt;b</math></td></tr><tr><td rowspan="">1 &lt; 2</td><td>z</td></tr></table></div>'
        '<div data-bbox="1 300 900 600" data-label="Image"><img src="plate_37.png" alt="Plate 37"/></div>'
    )
    with Standin(with_replies({"sign above": reply})) as server:
        words = ["--data", copy / "olmocr", "--only", copy / "only.txt", "--score"]
        out = tmp_path / "run"
        run("olmocr", *words, "--out", out, "--url", server.url, "--scorer-python", scorer_python("olmocr"))
    assert read(out / "run.json")["score"]["headline"] == 1.0, (out / "failed_tests.jsonl").read_text()


@pytest.mark.scorer
def test_a_finished_run_is_scored_without_a_server_and_a_resumed_one_anew(tmp_path: Path) -> None:
    with Standin(failing("Catch by port")) as server:
        scored(tmp_path, server, "omni")
        server.answer = by_page
        assert run("omni", "--data", OMNI, "--out", tmp_path / "omni", "--url", server.url) == 0
    assert "score" not in read(tmp_path / "omni/run.json") and not (tmp_path / "omni/unit_tests").exists()
    code, record = scored(tmp_path, server, "omni")  # it is stopped
    assert (code, record["score"]["headline"]) == (0, 1.0)


def fake_scorer(tmp_path: Path, version: str, says: str, code: int) -> Path:
    """An interpreter that claims to have a scorer, and whatever it is asked to run, says this and exits so."""
    (tmp_path / "says.txt").write_text(says)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit 0; fi\ncat "{tmp_path}/says.txt"\nexit {code}\n'
    )
    python.chmod(0o755)
    return python


SUMMARY = """
  [ERROR] Error running test x on y: no browser
============================================================
Final Summary with 95% Confidence Intervals:
chandra              : Average Score: {} (average of per-JSONL scores)
    present : 50.0% average pass rate over 2 tests

    Results by JSONL file:
        a.jsonl                       : 50.0% (1/2 tests)
        baseline                      : 100.0% (1/1 tests)
"""


@pytest.mark.skipif(os.name == "nt", reason="the fake scorer is a shell script")
@pytest.mark.parametrize(
    ("says", "code", "error"),
    [
        (SUMMARY.format("FAILED (errors) "), 0, "says FAILED:\n  Error running test x on y: no browser"),
        (SUMMARY.format("75.0% ± 3.1%"), 2, "failed (exit code 2)"),
        (SUMMARY.format("99.0% ± 3.1%"), 0, "printed 99.0%, but its parts make 75.00%"),
        ("", 0, "printed no summary"),
    ],
)
def test_a_scorer_that_fails_is_an_error(
    tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str], says: str, code: int, error: str
) -> None:
    python = fake_scorer(tmp_path, "0.4.27", says, code)
    words = ["--data", OLMOCR, "--out", tmp_path / "run", "--url", perfect.url, "--limit", 1, "--score"]
    assert run("olmocr", *words, "--scorer-python", python) == 1
    assert error in capsys.readouterr().err
    assert "score" not in read(tmp_path / "run/run.json")


@pytest.mark.scorer
def test_the_scorers_own_failed_is_an_error(tmp_path: Path, perfect: Standin) -> None:
    words = ["olmocr", "--data", OLMOCR, "--out", tmp_path, "--url", perfect.url, "--limit", 2]
    assert run(*words) == 0
    next((tmp_path / "bench").rglob("*.md")).unlink()
    with pytest.raises(benchmark.ScorerError, match=r"says FAILED:\n  Candidate 'chandra' is missing MD repeats"):
        benchmark.score_olmocr(benchmark.Run(tmp_path, {}), scorer_python("olmocr"))


def test_a_scorers_summary_is_read_with_its_parts() -> None:
    score = benchmark.read_olmocr_summary(SUMMARY.format("75.0% ± 3.1%"))
    assert (score["headline"], score["plus_minus"]) == (0.75, 0.031)
    assert score["parts"]["a"] == {"score": 0.5, "passed": 1, "tests": 2}
    assert score["types"] == {"present": {"score": 0.5, "tests": 2}}


def test_a_python_without_the_scorer_is_said_before_anything_is_sent(
    tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["omni", "--data", OMNI, "--out", tmp_path, "--url", perfect.url, "--score", "--scorer-python"]
    assert run(*words, sys.executable) == 1
    assert "has no omni-parse-bench: pip install -r requirements-omni.txt" in capsys.readouterr().err
    assert run(*words, tmp_path / "absent") == 1
    assert "absent: No such file" in capsys.readouterr().err
    assert perfect.requests == []


def test_when_every_page_fails_there_is_no_score(
    tmp_path: Path, perfect: Standin, capsys: pytest.CaptureFixture[str]
) -> None:
    perfect.answer = Status(400, "cannot")
    python = fake_scorer(tmp_path, "1.0.0", "", 0)
    words = ["--data", OMNI, "--out", tmp_path / "run", "--url", perfect.url, "--limit", 1]
    assert run("omni", *words, "--score", "--scorer-python", python) == 1
    assert "no page has a reply" in capsys.readouterr().err


# ---- Without a server


@pytest.mark.slow
@pytest.mark.scorer
@pytest.mark.parametrize("name", ["omni", "olmocr"])
def test_the_embedded_engine_runs_to_a_real_and_lower_score(tmp_path: Path, name: str) -> None:
    for package in ("rapidocr", "onnxruntime"):
        if not ocr.importable(package):
            message = f"{package} is not installed: pip install -r requirements-cpu.txt"
            pytest.fail(message) if CI else pytest.skip(message)
    words = ["--data", MINI / name, "--out", tmp_path, "--engine", "cpu", "--score"]
    assert run(name, *words, "--scorer-python", scorer_python(name)) == 0
    record = read(tmp_path / "run.json")
    assert 0.1 < record["score"]["headline"] < 0.95
    assert record["server"]["engine"] == "cpu" and record["server"]["version"]
