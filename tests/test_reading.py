"""Reading a reply: its blocks, Chandra's text and structure as markdown that reads back as the page's own words.

Three references: chandra-ocr's own `parse_markdown`, a CommonMark reader with $-maths (markdown-it), and stored
markdown for the two real replies.
"""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

import pytest
from chandra.output import parse_chunks, parse_markdown
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from PIL import Image

import ocr

DATA = Path(__file__).resolve().parent / "data"
REAL = sorted((DATA / "replies").glob("*.html"))
MINI = sorted((DATA / "mini" / "replies").glob("*.html"))


def div(inner: str, label: str = "Text", box: str = "10 20 300 400") -> str:
    return f'<div data-bbox="{box}" data-label="{label}">{inner}</div>'


def markdown(raw: str, *, math: str = "dollars", headers_footers: bool = False, images: bool = True) -> str:
    return ocr.to_markdown(ocr.read_reply(raw), math=math, headers_footers=headers_footers, images=images)


def with_figures(raw: str) -> list[ocr.Block]:
    """The blocks of a reply whose figures are cut out."""
    blocks = ocr.read_reply(raw)
    return [
        dataclasses.replace(block, image="images/1.webp") if block.label in ocr.FIGURES else block for block in blocks
    ]


# ----------------------------------------------------------------------------------------- as CommonMark readers see it

COMMONMARK = MarkdownIt("commonmark", {"html": True}).enable(["strikethrough", "table"])
WITH_MATHS = MarkdownIt("commonmark", {"html": True}).enable(["strikethrough", "table"])
WITH_MATHS.use(dollarmath_plugin, allow_space=False, allow_digits=False)


def shown(tokens: list[Token]) -> str:
    """What a reader of rendered markdown sees: text as it is, markup in braces, maths in ⟦⟧."""
    said, numbers = [], []
    for token in tokens:
        kind = token.type
        if kind == "inline":
            said.append(shown(token.children or []))
        elif kind in ("text", "code_inline", "fence", "code_block"):
            said.append(token.content)
        elif kind in ("math_inline", "math_inline_double", "math_block"):
            said.append(f"⟦{token.content}⟧")
        elif kind in ("softbreak", "hardbreak", "paragraph_close"):
            said.append("\n")
        elif kind == "ordered_list_open":
            numbers.append(int(token.attrs.get("start", 1)))
        elif kind == "list_item_open":
            bullet = "- " if token.markup == "-" else "• "
            said.append(f"{numbers.pop()}{token.markup} " if token.info else bullet)
        elif kind in ("html_inline", "html_block"):
            said.append(f"{{{token.content}}}")
        elif kind == "hr" or (token.nesting == 1 and kind not in ("paragraph_open", "bullet_list_open")):
            said.append(f"{{{kind}}}")
    return "".join(said)


def rendered(text: str, math: str = "dollars") -> str:
    if math == "brackets":
        text = re.sub(r"(?<!\\)\\\((.+?)\\\)", r"⟦\1⟧", text)
    return " ".join(shown((WITH_MATHS if math == "dollars" else COMMONMARK).parse(text)).split())


SPECIALS = r"""
snake_case  a_b_c  __init__  _under_  3 * 4  2*3*4  *args, **kwargs  *note  a*b*  **bold**  '*a*'  a ** b  _*_  «*a*»
$5  $5 and $10  US$5, US$6  $  $$  $$x$$  $a$  a$b$c  \$5
[1](x)  [1]  [a [b] c](x)  [1](two words)  ![a](b)  [x]  [ ] a  f(x)[y](z)  [a][b]  [1]: x  [^1]: note
C:\dir  C:\  \alpha  \*x  a\_b  \\\\  [\]  1986\. A
1. foo  1) foo  12. The  - x  # 5  #5  ####### x  > x  + x  * note  +  *  ---  ***  ___  - - -  ____ Name ____  ===  --
<tag>  a<b  a<b>c  x < y  </div>  <br>  <3  < b >  <!-- x -->  <?php  <a@b.c>  <http://x.org>  <div  a <div
&copy;  &amp;lt;  R & D  AT&T;  &x;  &#35;  &#xyz;  &#99999999;  a&b
`tick`  ``a`  ```  ```x  `` ` ``  ~~x~~  a~b~c  ~5 to ~6  ~~~  ~~~x  http://x.org/~a/~b
x^2  | a | b |  http://x.org/a_b_c  Dr. & Mrs. 50%  "quoted" --- and  {x}  :---  == a  %$#@!
"""
CASES = [case.strip() for line in SPECIALS.split("\n") for case in line.split("  ") if case.strip()]
FRAMES = ["{}", "so {} is", "{} and <math>x</math>", "<b>Note:</b> {} <i>end</i>", "<i>{}</i>", "<h2>{}</h2>"]


def drop_markup(text: str) -> str:
    return re.sub(r"\{(?:(?:em|strong|s|heading)_open|</?(?:b|i|del)>)\}", "", text)


@pytest.mark.parametrize("case", CASES)
def test_a_reader_of_the_markdown_sees_the_pages_own_text(case: str) -> None:
    for frame in FRAMES:
        raw = div("<p>" + frame.format(html.escape(case, quote=False)) + "</p>")
        expected = re.sub(r"<math>(.*?)</math>", r"⟦\1⟧", re.sub(r"</?(?:b|i|h2)>", "", frame)).format(case)
        for math in ("dollars", "brackets"):
            said = drop_markup(rendered(markdown(raw, math=math), math))
            assert said == " ".join(expected.split()), (frame, math)


@pytest.mark.parametrize("case", CASES)
def test_no_needless_backslash_stands_in_the_markdown(case: str) -> None:
    for frame in ("{}", "so {} is"):
        said = markdown(div("<p>" + html.escape(frame.format(case), quote=False) + "</p>"))
        text = " ".join(frame.format(case).split())
        tildes = "~" in case  # GitHub strikes out between single ones, markdown-it does not
        for place in re.finditer(r"\\", said):
            without = said[: place.start()] + said[place.end() :]
            assert tildes or rendered(without) != text, f"{said!r} reads the same as {without!r}"


@pytest.mark.parametrize(
    "text", ["snake_case", "3 * 4", "$5", "$5 and $10", "a_b_c", r"C:\dir", "R & D", "x < y", "#5"]
)
def test_ordinary_text_is_written_as_it_is(text: str) -> None:
    assert markdown(div(f"<p>{html.escape(text)}</p>")) == text


WORDS = st.text(alphabet=r"ab9 *_`$~\[](){}<>&;#!.-+=|:", min_size=1, max_size=14)


@settings(deadline=None, max_examples=250)
@given(WORDS, st.sampled_from(["dollars", "brackets"]))
def test_any_run_of_signs_reads_back(text: str, math: str) -> None:
    raw = div("<p>so " + html.escape(text, quote=False) + " is</p>")
    if math == "brackets" and re.search(r"\\[()]", text):
        return  # a page that prints "\(" cannot be told from maths
    assert rendered(markdown(raw, math=math), math) == " ".join(f"so {text} is".split())


PIECES = st.recursive(
    st.sampled_from(["a", "b", " ", "-", ":", "(", "x y", "*", "_", "~"]),
    lambda inner: st.builds(
        lambda tag, parts: f"<{tag}>{''.join(parts)}</{tag}>",
        st.sampled_from("b i del strong em".split()),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=250)
@given(st.lists(PIECES, min_size=1, max_size=4).map("".join))
def test_emphasis_wherever_it_stands_shows_no_signs(inner: str) -> None:
    """`**a:**b` is no bold in CommonMark, `**a****b**` neither: tags stand there instead."""
    seen = drop_markup(rendered(markdown(div(f"<p>x {inner} y</p>"))))
    assert seen == " ".join(re.sub(r"<[^<>]*>", "", f"x {inner} y").split())


def test_bold_that_stars_cannot_show_is_a_tag() -> None:
    assert markdown(div("<p><b>Term:</b> x</p>")) == "**Term:** x"
    assert markdown(div("<p><b>Term:</b>x</p>")) == "<b>Term:</b>x"
    assert markdown(div("<p><b>one<br/><br/>two</b></p>")) == "**one**\n\n**two**"


# ------------------------------------------------------------------------------------------------ as chandra-ocr has it


def even(text: str) -> str:
    """Markdown with what may differ made even: backslashes, entities, white space, spaces around maths, image names."""
    text = re.sub(r'<math display="block">(.*?)</math>', r"$$\1$$", text, flags=re.DOTALL)
    text = re.sub(r"<math>(.*?)</math>", r"$\1$", text, flags=re.DOTALL)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"![\1](image)", text)
    text = re.sub(r"\\(?=[!-/:-@\[-`{-~])", "", html.unescape(text)).replace("<br/>", "<br>")
    return " ".join(re.sub(r"\s*(\$+)\s*", r"\1", text).split())


def as_intended(text: str) -> str:
    """Chandra's markdown with the differences that are meant: links that lead nowhere are their text."""
    return re.sub(r"\[((?:[^\[\]\\]|\\.)*)\]\(#[^)]*\)", r"\1", text)


SAME = {
    "Caption": "<p><b>Fig. 1.</b> A gull.</p>",
    "Footnote": "<p><sup>1</sup> Not in H<sub>2</sub>O_2 * 3.</p>",
    "Equation-Block": r'<math display="block">x_1 = \frac{1}{2} \tag{4}</math>',
    "List-Group": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>d</li><li><p>e</p></li></ol>",
    "Image": '<img alt="A gull"/>',
    "Figure": '<img alt="A chart"/><table><tr><td>1</td></tr></table>',
    "Section-Header": "<h3>Tides &amp; more</h3>",
    "Table": '<table border="1"><thead><tr><th>a</th></tr></thead><tbody><tr><td colspan="2">b<br/>c</td></tr>'
    "<tr><td><math>x</math> &amp; y</td></tr></tbody></table>",
    "Text": "<p>one<br/>two <u>u</u> <del>d</del> <small>s</small> <big>b</big> <strong>t</strong> <span>p</span></p>",
    "Complex-Block": "<p>left</p><hr/><p>right <i>it</i></p>",
    "Code-Block": "<pre><code>a_b = 1\n  c</code></pre>",
    "Form": "<p>Name: Ada</p>",
    "Table-Of-Contents": "<p>Ferries ........ 12</p>",
    "Chemical-Block": "<chem>CC(=O)O</chem>",
    "Diagram": "<pre><code>graph TD\n  A--&gt;B</code></pre>",
    "Bibliography": '<p>[1] A. Mariner, <i>Knots</i>. <a href="https://x.org/a">here</a></p>',
    "Page-Header": "<p>head</p>",
    "Page-Footer": "<p>7</p>",
    "Blank-Page": "",
}


@pytest.mark.parametrize("label", SAME)
def test_a_block_of_each_label_reads_as_chandra_reads_it(label: str) -> None:
    raw = div(SAME[label], label)
    assert even(ocr.to_markdown(with_figures(raw))) == even(parse_markdown(raw))
    if label not in ("Page-Header", "Page-Footer", "Blank-Page"):
        assert markdown(raw)


TAGS = {
    "math": "<p>so <math>x^2_1</math>, is</p>",
    "i, b": "<p><b><i>a</i></b> x <b>a:</b> b</p>",
    "h1-h5": "".join(f"<h{n}>h{n}</h{n}>" for n in range(1, 6)),
    "a": '<p><a href="https://x.org">b_c</a></p>',
    "code": "<p>a <code>b_c</code></p>",
    "ol start": '<ol start="4"><li>a</li></ol>',
    "nested lists": "<ul><li>a<ol><li>b</li><li>c</li></ol></li><li>d</li></ul>",
    "caption": "<table><caption>c</caption><tr><td>a</td></tr></table>",
    "entities": "<p>a &amp; b &lt;c&gt; &#8212; d</p>",
    "specials": "<p>snake_case 3 * 4 $5 C:\\dir # 5</p>",
    "img without src": '<p><img alt="a"/> b</p>',
}


@pytest.mark.parametrize("inner", TAGS.values(), ids=TAGS)
def test_each_tag_reads_as_chandra_reads_it(inner: str) -> None:
    assert even(markdown(div(inner))) == even(parse_markdown(div(inner)))


@pytest.mark.parametrize("path", [*REAL, *MINI], ids=lambda path: path.stem)
def test_whole_replies_read_as_chandra_reads_them(path: Path) -> None:
    raw = path.read_text(encoding="utf-8")
    ours = re.sub(r"\[[x ]\] ", "", even(ocr.to_markdown(with_figures(raw))))  # checkboxes: ours alone
    assert ours == even(as_intended(parse_markdown(raw)))


# What is meant to differ: (reply, what Chandra makes of it, what is made of it here).
DIFFERENCES = {
    "text outside the divs is kept": ("before" + div("<p>a</p>") + "after", "a", "before\n\na\n\nafter"),
    "paragraphs outside the divs too": ("<p>x</p>" + div("<p>a</p>"), "a", "x\n\na"),
    "blocks are parted": (div("a", "Footnote") + div("b", "Footnote"), "ab", "a\n\nb"),
    "boxes show their state": (
        div('<p><input type="checkbox" checked/> yes <input type="checkbox"/> no <input type="radio" checked/> r</p>'),
        "yes no r",
        "[x] yes [ ] no (x) r",
    ),
    "fields show their value": (div('<p>Name: <input type="text" value="Ada"/></p>'), "Name:", "Name: Ada"),
    "a heading without its tag is one": (div("Tides", "Section-Header"), "Tides", "## Tides"),
    "ordinals are plain": (div("<p>10<sup>th</sup> May</p>"), "10<sup>th</sup> May", "10th May"),
    "links that lead nowhere are text": (div('<p>see <a href="#r">2</a></p>'), "see [2](#r)", "see 2"),
    "so are addresses": (
        div('<p><a href="https://x.org/a_b">https://x.org/a_b</a></p>'),
        r"[https://x.org/a\\_b](https://x.org/a_b)",
        "https://x.org/a_b",
    ),
    "an image that is no figure is its description": (
        div('<p><img alt="a" src="b.png"/> c</p>'),
        "![a](b.png) c",
        "a c",
    ),
    "code is fenced": (div("a_b\n  c", "Code-Block"), "a\\_b\n c", "```\na_b\n  c\n```"),
    "lines of code stay apart": (div("<p>a</p><p>b</p>", "Code-Block"), "a\n\nb", "```\na\nb\n```"),
    "a language is kept": (
        div('<pre><code class="language-python">a</code></pre>'),
        "```\na\n```",
        "```python\na\n```",
    ),
    "an unclosed header is only itself": (div("head" + div("<p>a</p>"), "Page-Header")[:-6], "", "a"),
    "a fence around the reply goes": (f"```html\n{div('<p>a</p>')}\n```", "a", "a"),
    "nested headings are headings": (div("x " + div("T", "Section-Header"), "Complex-Block"), "x\n\nT", "x\n\n## T"),
    "nested headers are left out": (div("x" + div("h", "Page-Header"), "Complex-Block"), "x\n\nh", "x"),
    "unknown tags are text": (div("<p>a <ref> b</p>"), "a  b", r"a \<ref> b"),
}


@pytest.mark.parametrize(("raw", "chandra", "ours"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_is_meant_to_differ_from_chandra(raw: str, chandra: str, ours: str) -> None:
    assert markdown(raw) == ours
    assert " ".join(parse_markdown(raw).split()) == " ".join(chandra.split())


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_replies_give_the_stored_markdown(path: Path) -> None:
    assert markdown(path.read_text(encoding="utf-8")) + "\n" == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*REAL, *MINI], ids=lambda path: path.stem)
def test_blocks_are_chandras(path: Path) -> None:
    raw = path.read_text(encoding="utf-8")
    size = (1241, 1755)
    ours = [(block.label, list(ocr.pixel_box(block.bbox, size))) for block in ocr.read_reply(raw) if block.bbox]
    theirs = [(chunk["label"], chunk["bbox"]) for chunk in parse_chunks(raw, Image.new("RGB", size))]
    assert [block for block in ours if block[0] != "Blank-Page"] == theirs


# ------------------------------------------------------------------------------------------------------------- blocks


def labels(raw: str) -> list[str]:
    return [block.label for block in ocr.read_reply(raw)]


@pytest.mark.parametrize(
    ("said", "box"),
    [
        ("1 2 3 4", (1, 2, 3, 4)),
        ("1, 2, 3, 4", (1, 2, 3, 4)),
        ("1.5 2 3.25 4", (1.5, 2, 3.25, 4)),
        ("-5 0 10 1000", (-5, 0, 10, 1000)),
        ("1_0 2 3 4", None),
        ("1 2 3 4 5", None),
        ("1 2 3", None),
        ("", None),
        ("a b c d", None),
        ("1e3 2 3 4", None),
        ("nan 2 3 4", None),
        ("١ ٢ ٣ ٤", None),
    ],
)
def test_a_box_is_four_plain_numbers(said: str, box: ocr.Box | None) -> None:
    (block,) = ocr.read_reply(div("<p>words</p>", box=said))
    assert block.bbox == box and block.text == "words"


def test_a_pixel_box_lies_on_the_page() -> None:
    assert ocr.pixel_box((0, 0, 1000, 1000), (1240, 1754)) == (0, 0, 1240, 1754)
    assert ocr.pixel_box((-50, -1, 2000, 1001), (100, 200)) == (0, 0, 100, 200)
    assert ocr.pixel_box((1200, 1200, 1300, 1300), (100, 200)) == (100, 200, 100, 200)


def test_an_unclosed_header_does_not_swallow_the_page() -> None:
    raw = '<div data-bbox="1 2 3 4" data-label="Page-Header"><p>head' + div("<p>body</p>") + div("more", "Footnote")
    assert labels(raw) == ["Page-Header", "Text", "Footnote"]
    assert markdown(raw) == "body\n\nmore"
    assert markdown(raw, headers_footers=True) == "head\n\nbody\n\nmore"


@pytest.mark.parametrize("label", ["Text", "Caption", "Table", "Figure", "Complex-Block"])
def test_what_follows_an_unclosed_block_is_kept(label: str) -> None:
    raw = div("<p>one</p>", label)[:-6] + div("<p>two</p>") + div("<p>three</p>", "Section-Header")
    assert markdown(raw) in ("one\n\ntwo\n\nthree", "one\n\ntwo\n\n## three")


def test_an_unclosed_last_block_ends_with_the_reply() -> None:
    assert markdown(div("<p>a</p>") + '<div data-label="Table"><table><tr><td>x') == (
        "a\n\n<table><tr><td>x</td></tr></table>"
    )


def test_stray_end_tags_end_nothing() -> None:
    assert markdown("</div></p></b>" + div("<p>a</b></p></div></span>") + "</table>" + div("<p>b</p>")) == "a\n\nb"


def test_labelled_divs_inside_are_kept_in_place() -> None:
    raw = div("x" + div("y", box="1 1 2 2") + "z", "Complex-Block")
    (block,) = ocr.read_reply(raw)
    assert [inner.bbox for inner in block.inside] == [(1, 1, 2, 2)]
    assert markdown(raw) == "x\n\ny\n\nz"


def test_a_wrapper_around_the_blocks_is_none() -> None:
    assert labels(f'<html><body><div class="page">{div("a")}{div("b", "Caption")}</div></body></html>') == [
        "Text",
        "Caption",
    ]


def test_a_blank_page_gives_nothing_and_hides_nothing() -> None:
    assert markdown(div("", "Blank-Page", "0 0 1000 1000")) == ""
    assert markdown(div("", "Blank-Page") + div("<p>a</p>")) == "a"


@pytest.mark.parametrize("fence", ["```html\n{}\n```", "```\n{}\n```\n", "```HTML\n{}", "\n ```html\n{}```"])
def test_a_code_fence_around_the_reply_is_taken_off(fence: str) -> None:
    assert markdown(fence.format(div("<p>a</p>"))) == "a"


def test_a_comment_without_end_hides_nothing() -> None:
    assert markdown(div("<p>a<!-- gone -->b</p>")) == "ab"
    assert "c d" in markdown(div("<p>a <!-- b</p>") + div("<p>c d</p>"))


def test_characters_nobody_sees_are_dropped() -> None:
    assert markdown(div("<p>hy\u00adphen\u200b\ufeff\x00 a\ufdd2b</p>")) == "hyphen ab"


# ------------------------------------------------------------------------------------------------------------ figures


def test_a_figure_is_linked_where_its_image_stands() -> None:
    raw = div('<p>above</p><img alt="A gull"/><p>below</p>', "Figure")
    assert ocr.to_markdown(with_figures(raw)) == "above\n\n![A gull](images/1.webp)\n\nbelow"


def test_a_figure_without_an_image_is_linked_last() -> None:
    assert ocr.to_markdown(with_figures(div("<p>words</p>", "Image"))) == "words\n\n![](images/1.webp)"


def test_a_figure_is_linked_once() -> None:
    raw = div('<img alt="a"/><img alt="b" src="x.png"/>', "Figure")
    assert ocr.to_markdown(with_figures(raw)) == "![a](images/1.webp)b"


@pytest.mark.parametrize("alt", ["a [b] c", "a ] b", "[[a", "a * b_c $5", "*a* `b` <c> &copy;", r"C:\dir\[x]", "x](y)"])
def test_a_description_is_read_as_it_is(alt: str) -> None:
    said = ocr.to_markdown(with_figures(div(f'<img alt="{html.escape(alt)}"/>', "Figure")))
    (image,) = [token for token in COMMONMARK.parse(said)[1].children or [] if token.type == "image"]
    assert image.attrs["src"] == "images/1.webp"
    assert "".join(child.content for child in image.children or []) == alt


def test_without_images_their_words_stay_and_nothing_else() -> None:
    raw = div('<img alt="A gull" src="37.png"/><p>words</p>', "Figure") + div('<p>a <img alt="b" src="c.png"/></p>')
    assert ocr.to_markdown(with_figures(raw), images=False) == "words\n\na"


def test_an_address_the_reply_names_is_never_linked_as_an_image() -> None:
    raw = div('<img alt="x" src="https://tracker.example/a.png"/>', "Figure") + div(
        '<p><img src="//t.example/b"/>a</p>'
    )
    assert "example" not in markdown(raw) + ocr.to_html(ocr.read_reply(raw))


# ------------------------------------------------------------------------------------------------- tables, maths, code


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ("<td>a\n\n\nb</td>", "<td>a\nb</td>"),
        ('<td colspan="100%" rowspan="2">a</td>', '<td rowspan="2">a</td>'),
        ('<td colspan="99999">a</td>', "<td>a</td>"),
        ('<td style="x" onclick="y" align="right">a</td>', '<td align="right">a</td>'),
        ('<td><input type="checkbox" checked/> a</td>', "<td>[x] a</td>"),
        ("<td><strong>a</strong><em>b</em></td>", "<td><b>a</b><i>b</i></td>"),
        ("<td>a &amp; b &lt; c &lt;d&gt; &amp;copy;</td>", "<td>a & b < c &lt;d> &amp;copy;</td>"),
        ("<td>$5</td>", "<td>$5</td>"),
        ("<td>a<table><tr><td>b</td></tr></table></td>", "<td>a<table><tr><td>b</td></tr></table></td>"),
        ("<td><div>a</div><div>b</div></td>", "<td><div>a</div><div>b</div></td>"),
        ("<td><pre>a\n\n  b</pre></td>", "<td><pre>a<br><br>  b</pre></td>"),
        ('<td><a href="#x">a</a></td>', "<td>a</td>"),
    ],
)
def test_a_tables_cells(inner: str, said: str) -> None:
    assert markdown(div(f"<table><tr>{inner}</tr></table>", "Table")) == f"<table><tr>{said}</tr></table>"


def test_maths_in_tables_has_the_delimiters_of_maths_outside() -> None:
    raw = div("<table><tr><td><math>a &lt; b_1</math> costs $5</td><td>$7</td></tr></table>", "Table")
    row = "<table><tr><td>{} costs {}5</td><td>$7</td></tr></table>"
    assert markdown(raw) == row.format("$a < b_1$", "<span>$</span>")
    assert markdown(raw, math="brackets") == row.format(r"\(a < b_1\)", "$")


@pytest.mark.parametrize(
    ("latex", "inline", "block"),
    [
        ("x^2", "$x^2$", "$$x^2$$"),
        ("a\n\n b", "$a b$", "$$a\nb$$"),
        ("$x$", "$x$", "$$x$$"),
        (r"\(x\)", "$x$", "$$x$$"),
        (r"\text{if $n$ is}", r"$\text{if \(n\) is}$", r"$$\text{if \(n\) is}$$"),
        ("5$", r"$5\$$", r"$$5\$$$"),
        (r"a \\(b)", r"$a \\ (b)$", r"$$a \\ (b)$$"),
        ("a<b", "$a<b$", "$$a<b$$"),
    ],
)
def test_a_formula_stands_between_its_delimiters(latex: str, inline: str, block: str) -> None:
    assert markdown(div(f"<p><math>{latex}</math></p>")) == inline
    assert markdown(div(f'<math display="block">{latex}</math>', "Equation-Block")) == block


def test_maths_keeps_apart_from_the_letters_beside_it() -> None:
    assert markdown(div("<p>2<math>x</math>5, US$<math>y</math>, a\\<math>z</math></p>")) == (
        r"2 $x$ 5, US\$ $y$, a\\$z$"
    )


def test_dollars_beside_maths_are_not_paired_with_it() -> None:
    raw = div("<p>$5 for <math>x</math> and $6</p>")
    assert markdown(raw) == r"\$5 for $x$ and \$6"
    assert markdown(raw, math="brackets") == r"$5 for \(x\) and $6"
    assert rendered(markdown(raw)) == "$5 for ⟦x⟧ and $6"


def test_code_is_fenced_by_more_ticks_than_it_holds() -> None:
    assert markdown(div("<pre>a ```` b</pre>")) == "`````\na ```` b\n`````"
    assert rendered(markdown(div("<p><code>a`b</code> <code>`</code></p>"))) == "a`b `"


@pytest.mark.parametrize("inner", ["<pre>a<br/>  b</pre>", "<code>a\n  b</code>", "<pre><code>a\n  b\n</code></pre>"])
def test_lines_of_code_stay_lines(inner: str) -> None:
    assert markdown(div(inner, "Code-Block")) == "```\na\n  b\n```"


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ('<ol start="7"><li>a</li><li>b</li></ol>', "7. a\n8. b"),
        ("<ol><li>a<ul><li>b</li></ul></li></ol>", "1. a\n   - b"),
        ("<ul><li><p>a</p><p>b</p></li></ul>", "- a\n\n  b"),
        ("<ul><li>a<table><tr><td>x</td></tr></table></li></ul>", "- a\n\n  <table><tr><td>x</td></tr></table>"),
        ("<blockquote><p>a</p><p>b</p></blockquote>", "> a\n>\n> b"),
        ("<h2>C #</h2>", "## C \\#"),
        ("<p>a</p>loose<p>b</p>", "a\n\nloose\n\nb"),
        ("<p>a<br/>b</p>", "a  \nb"),
    ],
)
def test_structure(inner: str, said: str) -> None:
    assert markdown(div(inner)) == said


# ------------------------------------------------------------------------------------------------------- hostile HTML


@pytest.mark.parametrize(
    "raw",
    [
        "<script>run()</script>",
        "<p onclick=run()>a</p>",
        '<a href="javascript:run()">a</a>',
        '<a href=" jav&#9;ascript:run()">a</a>',
        "<svg onload=run()></svg>",
        '<p style="background:url(https://t.example)">a</p>',
        '<img src="https://t.example/x.png">',
        "<img src=x onerror=run()>",
        '<iframe src="https://t.example"></iframe>',
        '<meta http-equiv="refresh" content="0;url=https://t.example">',
        "<math><mtext><style><!--</style><img title='--><img src=x onerror=run()>'>",
        '<form action="https://t.example"><button>a</button></form>',
        "<p <script>run()</script>>",
        "<noscript><p title='</noscript><img src=x onerror=run()>'>",
        "<!--><img src=x onerror=run()>-->",
        "<scr\0ipt>run()</script>",
        "<p\x0conclick=run()>",
        "<b",
    ],
)
def test_hostile_markup_is_no_plain_markup(raw: str) -> None:
    assert not ocr.is_plain_markup(raw)
    for clean in (ocr.sanitize(raw), ocr.to_html(ocr.read_reply(div("x") + raw))):
        assert not re.search(r"<[^<>]*(?:\son|style=|src=|script|svg|iframe|meta|t\.example)", clean)


@pytest.mark.parametrize("path", [*REAL, *MINI], ids=lambda path: path.stem)
def test_ordinary_replies_are_plain_markup(path: Path) -> None:
    assert ocr.is_plain_markup(path.read_text(encoding="utf-8"))


def test_clean_html_shows_the_page() -> None:
    raw = div("<h2>T &amp; x</h2>", "Section-Header") + div(
        '<p>a <math>x &lt; y</math> <b>b</b> <input type="checkbox"/></p>'
    )
    said = ocr.to_html(ocr.read_reply(raw + div("7", "Page-Footer") + div(div("8", "Page-Footer"), "Complex-Block")))
    assert '<div class="block Section-Header"><h2>T &amp; x</h2></div>' in said
    assert r'a <span class="math">\(x &lt; y\)</span> <b>b</b> <span>[ ]</span>' in said
    assert "7" not in said and "8" not in said
