"""Inputs: page ranges, lists, searched folders, and a place for every document that no other document has."""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ocr

PDF = b"%PDF-1.7\n"
linux_names = pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="not every name exists here")


# ---- --pages


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("3", [(3, 3)]),
        ("1-5", [(1, 5)]),
        ("1-5,8,12-", [(1, 5), (8, 8), (12, None)]),
        ("-4", [(1, 4)]),
        (" 2 - 3 , 7 ", [(2, 3), (7, 7)]),
        ("007", [(7, 7)]),
    ],
)
def test_page_ranges_count_from_one_and_may_be_open(text: str, ranges: list[tuple[int, int | None]]) -> None:
    assert ocr.parse_pages(text) == ranges


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", "-", "0", "0-3", "5-2", "a", "1-2-3", "1.5", "--4", "1;2", "+1", "1 2", "٣", "1\n-x", "9" * 10],
)
def test_what_is_no_page_range_is_said_with_an_example(text: str) -> None:
    with pytest.raises(ocr.BadUsage, match=r"^--pages: .* is no (page or )?range; "):
        ocr.parse_pages(text)


@given(st.text(alphabet="0123456789-, \t" + "x\0é", max_size=30))
def test_any_text_is_a_range_or_bad_usage(text: str) -> None:
    try:
        ranges = ocr.parse_pages(text)
    except ocr.BadUsage:
        return
    assert all(low >= 1 and (high is None or high >= low) for low, high in ranges)


spans = st.tuples(st.integers(1, 60), st.none() | st.integers(0, 60)).map(
    lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
)


@given(st.lists(spans, min_size=1, max_size=6), st.integers(1, 80))
def test_the_pages_chosen_are_those_named_once_each_in_order_or_an_error(
    ranges: list[tuple[int, int | None]], count: int
) -> None:
    text = ",".join(f"{low}" if low == high else f"{low}-{high or ''}" for low, high in ranges)
    assert ocr.parse_pages(text) == ranges
    named = {n for low, high in ranges for n in range(low, (high or max(count, low)) + 1)}
    if max(named) > count:
        with pytest.raises(ocr.DocumentError, match=rf"^has {count} pages?, so --pages \d+(-\d*)? is out of range$"):
            ocr.choose_pages(ranges, count)
    else:
        assert ocr.choose_pages(ranges, count) == tuple(sorted(named))


@given(st.sets(st.integers(1, 200), min_size=1, max_size=40))
def test_page_numbers_written_as_spans_are_read_as_the_same_pages(pages: set[int]) -> None:
    numbers = tuple(sorted(pages))
    assert ocr.choose_pages(ocr.parse_pages(ocr.spans(numbers)), 200) == numbers


# ---- files, folders, lists


def touch(path: Path, data: bytes = PDF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def found(*inputs: str | Path, out: Path = Path("no such output")) -> tuple[list[Path], dict[Path, str]]:
    """The files that inputs lead to, and what is said of the rest."""
    items = list(ocr.find_inputs(ocr.expand_lists(inputs), out))
    files = [item.source for item in items if isinstance(item, ocr.Found)]
    return files, dict(item for item in items if not isinstance(item, ocr.Found))


def test_a_folder_is_searched_in_the_order_of_names_for_what_looks_like_a_document(tmp_path: Path) -> None:
    wanted = [touch(tmp_path / name) for name in ("a.pdf", "b/c.PNG", "b/d/e.tif", "b.pdf")]
    nameless = touch(tmp_path / "scan", b"\xff\xd8\xff\xe0 a JPEG without a name")
    for name in ("notes.txt", ".hidden.pdf", ".git/x.pdf", "b/._c.png"):
        touch(tmp_path / name, b"text")
    assert found(tmp_path) == ([wanted[0], wanted[1], wanted[2], wanted[3], nameless], {})


def test_a_file_that_is_given_is_read_whatever_its_name(tmp_path: Path) -> None:
    for name in (".hidden", "data.bin", "@mail"):
        assert found(touch(tmp_path / name)) == ([tmp_path / name], {})


def test_links_to_folders_are_followed_once_each(tmp_path: Path) -> None:
    a = touch(tmp_path / "shelf" / "a.pdf")
    (tmp_path / "shelf" / "loop").symlink_to(tmp_path / "shelf")
    (tmp_path / "shelf" / "twin").symlink_to(tmp_path / "other")
    b = touch(tmp_path / "other" / "b.pdf")
    (tmp_path / "other" / "back").symlink_to(tmp_path)
    files, errors = found(tmp_path / "shelf")
    assert [file.resolve() for file in files] == [a, b] and not errors


def test_links_that_lead_nowhere_are_told_when_they_are_named_like_documents(tmp_path: Path) -> None:
    for name in ("gone.pdf", "gone.txt"):
        (tmp_path / name).symlink_to(tmp_path / "nothing")
    for name in ("self.pdf", "self"):
        (tmp_path / name).symlink_to(tmp_path / name)
    said = "is a link that leads nowhere"
    assert found(tmp_path) == ([], {tmp_path / "gone.pdf": said, tmp_path / "self.pdf": said})
    assert found(tmp_path / "gone.txt", tmp_path / "self") == (
        [],
        {tmp_path / "gone.txt": said, tmp_path / "self": said},
    )


def test_what_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    for name in (tmp_path / "no.pdf", "", touch(tmp_path / "file") / "below"):
        ((_, said),) = found(name)[1].items()
        assert said in ("there is no such file or folder", "cannot be read: Not a directory")
    ((_, said),) = found("a\0b")[1].items()
    assert said.startswith("cannot be read: ")
    ((_, said),) = found("x" * 5000)[1].items()
    assert said == "cannot be read: File name too long"


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in folders")
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pdf")
    files, errors = found(tmp_path / "pipe.pdf", "/dev/zero", tmp_path)
    assert not files and set(errors) == {tmp_path / "pipe.pdf", Path("/dev/zero")}
    assert all("no regular file" in said for said in errors.values())


def test_folders_may_lie_deeper_in_each_other_than_python_can_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1010):  # a path this long cannot be made at once, nor be removed by pytest
        Path("d").mkdir()
        os.chdir("d")
    Path("x.pdf").write_bytes(PDF)
    os.chdir(tmp_path)
    try:
        (file,), errors = found(Path("d"))
        assert len(file.parts) == 1011 and not errors
        # Its place is short enough for the page files below it.
        place = next(ocr.places(ocr.Found(file, Path("d"), True)))
        assert len(place) < 400
    finally:
        os.chdir("/".join(["d"] * 1010))
        Path("x.pdf").unlink()
        for _ in range(1010):
            os.chdir("..")
            Path("d").rmdir()


def test_the_output_of_runs_is_not_read_as_documents(tmp_path: Path) -> None:
    out = tmp_path / "shelf" / "out"
    a = touch(tmp_path / "shelf" / "a.pdf")
    touch(out / "a" / "images" / "0001-01.webp")
    earlier = tmp_path / "shelf" / "earlier"
    touch(earlier / "a" / "images" / "0001-01.webp")
    touch(earlier / "run.json", b'{"ocr": "0.1.0", "documents": []}')
    other = touch(tmp_path / "shelf" / "jobs" / "b.pdf")
    touch(other.parent / "run.json", b'{"job": 7}')
    assert found(tmp_path / "shelf", out=out) == ([a, other], {})
    files, errors = found(out, out=out)
    assert not files and "give --out a folder of its own" in errors[out]
    assert found(earlier, out=out)[0], "a folder that is given is searched, whoever made it"


@pytest.mark.parametrize(
    "data",
    [
        b"a b.pdf\nb.pdf\n",
        b"a b.pdf\r\n\r\n\r\nb.pdf",
        b"\xef\xbb\xbfa b.pdf\nb.pdf\n\n",
        "a b.pdf\r\nb.pdf\r\n".encode("utf-16"),
        b"a b.pdf\0b.pdf\0",
    ],
    ids=["unix", "windows", "utf-8 mark", "powershell", "find -print0"],
)
def test_a_list_holds_a_path_a_line(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.txt").write_bytes(data)
    assert ocr.expand_lists([f"@{tmp_path / 'list.txt'}"]) == ["a b.pdf", "b.pdf"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert ocr.expand_lists(["first", "@-", "last"]) == ["first", "a b.pdf", "b.pdf", "last"]


def test_paths_in_a_list_are_paths_and_no_lists(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(f"@{tmp_path / 'list'}\n")
    files, errors = found(f"@{tmp_path / 'list'}")
    assert not files and list(errors) == [Path(f"@{tmp_path / 'list'}")]


@linux_names
def test_names_in_a_list_may_hold_any_bytes(tmp_path: Path) -> None:
    names = [b"caf\xe9.pdf", b"two\nlines.pdf", "שלום\u202e.pdf".encode()]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(PDF)
    (tmp_path / "list").write_bytes(b"\0".join(os.fsencode(tmp_path) + b"/" + name for name in names))
    files, errors = found(f"@{tmp_path / 'list'}")
    assert [os.fsencode(file.name) for file in files] == names and not errors
    assert all(len(ocr.show(file).splitlines()) == 1 and ocr.show(file).isprintable() for file in files)


def test_a_file_named_like_a_list_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    touch(Path("@scan.pdf"))
    assert found("@scan.pdf") == ([Path("@scan.pdf")], {})


def test_a_list_that_is_not_there_is_bad_usage_before_anything_is_read() -> None:
    with pytest.raises(ocr.BadUsage, match=r"^@nowhere\.txt: the list cannot be read: No such file"):
        ocr.expand_lists(["@nowhere.txt"])


# ---- places


def place(out: Path, *files: str | Path, root: Path | None = None) -> list[str]:
    """Where these documents go in one run, each then on disk as a run leaves it."""
    places = ocr.Places(out)
    said = []
    for file in map(Path, files):
        folder = places.claim(ocr.Found(file, root or file.parent, searched=bool(root)))
        assert folder is not None
        (folder / "pages").mkdir(parents=True, exist_ok=True)
        ocr.write_json(folder / "source.json", {"source": places.identity(file)})
        said.append(folder.relative_to(out).as_posix())
    return said


def test_a_searched_folder_is_mirrored(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    files = [docs / "a.pdf", docs / "b" / "a.pdf", docs / "b" / "c" / "d.png"]
    assert place(tmp_path / "out", *files, root=docs) == ["a", "b/a", "b/c/d"]


def test_same_names_from_different_folders_get_places_that_tell_them_apart(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("x/a.pdf", "x/a.png", "y/a.pdf", "z/y/a.pdf", "z/y/a.png")]
    assert place(tmp_path / "out", *files) == ["a", "a.png", "a.pdf", "y/a", "y/a.png"]


def test_a_file_given_twice_in_any_way_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    touch(Path("docs/sub/a.pdf"))
    Path("link").symlink_to("docs")
    places = ocr.Places(Path("out"))
    assert places.claim(ocr.Found(Path("docs/sub/a.pdf"), Path("docs"), True))
    for path in ("docs/sub/a.pdf", "docs/../docs/sub/a.pdf", "link/sub/a.pdf", str(tmp_path / "docs/sub/a.pdf")):
        assert places.claim(ocr.Found(Path(path), Path(path).parent, False)) is None


TWINS = [
    ("Report.pdf", "report.pdf"),
    ("STRASSE.pdf", "straße.pdf"),
    (unicodedata.normalize("NFC", "été.pdf"), unicodedata.normalize("NFD", "été.pdf")),
    ("ΑΣ.pdf", "ας.pdf"),
    ("a.pdf", "a.tif"),
    ("a\n.pdf", "a\t.pdf"),
    ("a\u202e.pdf", "a\u200f.pdf"),
    ("a:b.pdf", "a?b.pdf"),
    ("x" * 251 + ".pdf", "x" * 250 + "y.pdf"),
    ("é" * 125 + "a.pdf", "é" * 125 + "b.pdf"),
    (" .pdf", "..pdf"),
]


@pytest.mark.parametrize("names", TWINS, ids=lambda names: ascii(names[0][:12]))
@pytest.mark.parametrize("order", [1, -1])
def test_twins_get_places_that_no_file_system_takes_for_one(names: tuple[str, str], order: int, tmp_path: Path) -> None:
    places = ocr.Places(tmp_path / "out")
    claimed = [places.claim(ocr.Found(tmp_path / name, tmp_path, True)) for name in names[::order]]
    keys = {unicodedata.normalize("NFC", str(folder)).casefold() for folder in claimed}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("..", "_"),
        ("...", "_"),
        ("", "_"),
        (" a . .", "a"),
        ("a/b\\c", "a_b_c"),
        ("nul", "_nul"),
        ("COM1.txt", "_COM1.txt"),
        ("con .x", "_con .x"),
        ("conin$", "_conin$"),
        ("a\nb\x7f\u202ec\u2028d", "a_b__c_d"),
        ("Ünïcode – 文書", "Ünïcode – 文書"),
        (os.fsdecode(b"caf\xe9"), "caf?" if sys.platform == "win32" else "caf_"),
    ],
)
def test_names_are_made_safe_for_every_file_system(name: str, safe: str) -> None:
    assert ocr.safe_part(name).replace("\ufffd", "_") == safe


@given(st.text(max_size=300))
def test_a_safe_name_is_one_plain_part_of_a_path(name: str) -> None:
    safe = ocr.safe_part(name)
    assert 0 < len(safe.encode()) <= 150 and safe not in (".", "..")
    assert not re.search(r'[<>:"/\\|?*\0-\x1f\x7f]|[. ]$|^ ', safe)
    assert not re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", safe)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in safe)


@given(st.lists(st.text(min_size=1, max_size=20).filter(lambda s: "/" not in s and "\0" not in s), max_size=4))
def test_no_name_leads_out_of_the_output_folder(parts: list[str]) -> None:
    root = Path("/docs")
    source = Path("/docs", *[part if part not in (".", "..") else "x" for part in parts], "a.pdf")
    for where in (place for place, _ in zip(ocr.places(ocr.Found(source, root, True)), range(9), strict=False)):
        assert all(part not in ("", ".", "..") for part in where.split("/")) and not where.startswith("/")


@pytest.mark.parametrize(
    "inner",
    (
        "pages.pdf images.pdf a.md.pdf A.JSON.png source.json.pdf pages images/x.pdf pages/0001.json/x.pdf "
        "a.html/x.pdf source.json/x.pdf a.md.part.pdf view/index.html/x.pdf"
    ).split(),
)
def test_a_document_in_a_folder_named_like_another_takes_none_of_its_files(inner: str, tmp_path: Path) -> None:
    """docs/a.pdf goes to out/a, and so does what lies in docs/a/."""
    docs = tmp_path / "docs"
    outer, nested = place(tmp_path / "out", docs / "a.pdf", docs / "a" / inner, root=docs)
    assert outer == "a"
    taken = re.compile(r"a/(pages|images|view|(a|source)\.(md|html|json)(\.part)?)(/.*)?", re.IGNORECASE)
    assert not taken.fullmatch(nested), nested


def test_reruns_with_other_inputs_keep_every_documents_place(tmp_path: Path) -> None:
    out, x, y = tmp_path / "out", tmp_path / "x" / "a.pdf", tmp_path / "y" / "a.pdf"
    assert place(out, x) == ["a"]
    assert place(out, y) == ["a.pdf"], "x's place is not y's, though x is not given now"
    assert place(out, y, x) == ["a.pdf", "a"]
    assert place(out, tmp_path / "z" / "a.pdf") == ["z/a"]


@settings(deadline=None)  # it writes files, and other tests may run beside it
@given(st.lists(st.lists(st.sampled_from(range(8)), min_size=1, max_size=8, unique=True), min_size=2, max_size=5))
def test_no_run_takes_another_documents_place_whatever_was_given_before(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[int]]
) -> None:
    base = tmp_path_factory.mktemp("runs")
    names = ("x/a.pdf", "y/a.pdf", "x/a.png", "y/A.pdf", "z/x/a.pdf", "a.pdf", "x/a/a.pdf", "x/a/pages.pdf")
    owner: dict[str, int] = {}
    for run in runs:
        for number, where in zip(run, place(base / "out", *(base / names[n] for n in run)), strict=True):
            assert owner.setdefault(where.casefold(), number) == number


def test_the_output_and_its_sources_may_be_moved_together(tmp_path: Path) -> None:
    touch(tmp_path / "one" / "docs" / "a.pdf")
    touch(tmp_path / "one" / "more" / "a.pdf")
    before = place(tmp_path / "one" / "out", *(tmp_path / "one" / name for name in ("docs/a.pdf", "more/a.pdf")))
    (tmp_path / "one").rename(tmp_path / "two")
    after = place(tmp_path / "two" / "out", *(tmp_path / "two" / name for name in ("more/a.pdf", "docs/a.pdf")))
    assert after == before[::-1]


def test_files_of_a_person_in_the_output_folder_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    touch(out / "a", b"a file where a folder would go")
    touch(out / "b" / "b.md", b"somebody's notes")
    touch(out / "c" / "notes.txt", b"more notes")
    touch(out / "d" / "source.json", b"{broken")
    docs = [tmp_path / f"{name}.pdf" for name in "abcd"]
    assert place(out, *docs) == ["a.pdf", "b.pdf", "c", "d.pdf"]
    # A file in the way of a whole folder of documents.
    assert place(out, tmp_path / "docs" / "a" / "x.pdf", root=tmp_path / "docs")[0].endswith("docs/a/x")
    assert (out / "a").read_bytes() == b"a file where a folder would go"
