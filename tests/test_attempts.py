"""Asking until a reply stands: which replies count as loops, what the next attempt samples, which attempt is kept."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from chandra.model.util import detect_repeat_token
from hypothesis import given, settings
from hypothesis import strategies as st

import ocr

DATA = Path(__file__).resolve().parent / "data"
REPLIES = sorted([*(DATA / "replies").glob("*.html"), *(DATA / "mini" / "replies").glob("*.html")])
BLANK_ROWS = "<table>" + "<tr><td></td><td></td></tr>" * 40 + "</table>"


def attempt(text: str, seed: int = 0, finish_reason: str = "stop") -> ocr.Attempt:
    sampled = ocr.sampling(seed)
    return ocr.Attempt(
        seed, sampled.temperature, sampled.top_p, text, finish_reason, 2000, len(text) // 3, 1.0, ocr.repeats(text)
    )


# ---------------------------------------------------------------------------------------------------- the repeat rule

UNITS = st.text(alphabet="ab .<td>\n", min_size=1, max_size=12)
LOOPS = st.builds(
    lambda head, unit, times, tail: head + unit * times + tail,
    st.text(alphabet="ab .<", max_size=60),
    st.one_of(UNITS, st.builds(lambda unit, times: unit * times + "x", UNITS, st.integers(1, 40))),
    st.integers(1, 20),
    st.text(alphabet="ab .<", max_size=60),
)


def chandra_repeats(text: str) -> bool:
    return detect_repeat_token(text) or (len(text) > 50 and detect_repeat_token(text, cut_from_end=50))


@settings(deadline=None, max_examples=250)
@given(st.one_of(LOOPS, st.text(alphabet="ab", max_size=80), st.text(max_size=80)))
def test_the_repeat_rule_is_chandras(text: str) -> None:
    assert ocr.repeats(text) == chandra_repeats(text)
    assert ocr.repeats_at_end(text) == detect_repeat_token(text)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 11, 12, 13, 249, 250, 251])
def test_the_repeat_rule_is_chandras_at_its_edges(n: int) -> None:
    unit = "".join(chr(0x4E00 + i) for i in range(n))
    for times in range(1, 20):
        assert ocr.repeats(unit * times) == chandra_repeats(unit * times)


@settings(deadline=None, max_examples=300)
@given(LOOPS)
def test_a_reply_repeats_where_its_loop_is_found(text: str) -> None:
    start, unit = ocr.repeated_tail(text)
    assert bool(unit) == ocr.repeats(text)
    assert (start < len(text)) == bool(unit)
    assert not unit or text[start:].startswith(unit * 5)


def test_real_replies_do_not_repeat() -> None:
    for path in REPLIES:
        text = path.read_text(encoding="utf-8")
        assert not ocr.repeats(text) and ocr.looping_share(text) == 0, path.name


# -------------------------------------------------------------------------------------------------------- the schedule


def test_sampling_is_chandras_and_each_attempt_has_its_seed() -> None:
    assert [tuple(ocr.sampling(k)) for k in range(7)] == [
        (0.0, 0.1, 0),
        (0.2, 0.95, 1),
        (0.4, 0.95, 2),
        (0.6, 0.95, 3),
        (0.8, 0.95, 4),
        (0.8, 0.95, 5),
        (0.8, 0.95, 6),
    ]


def test_a_whole_reply_settles_a_page_at_once() -> None:
    assert ocr.settled([attempt("<p>all</p>")], retries=6)


@pytest.mark.parametrize("reason", ["length", "repetition"])
def test_a_cut_off_reply_is_asked_for_until_the_budget_is_spent(reason: str) -> None:
    cut = [attempt(f"<p>{seed}", seed, reason) for seed in range(7)]
    assert [ocr.settled(cut[:n], retries=6) for n in range(1, 8)] == [False] * 6 + [True]
    assert ocr.settled(cut[:1], retries=0)


def test_a_looping_reply_is_asked_for_again_until_one_does_not() -> None:
    loop, whole = attempt("word " * 40), attempt("<p>all</p>", 1)
    assert not ocr.settled([loop], retries=6)
    assert ocr.settled([loop, whole], retries=6)


@pytest.mark.parametrize(
    "text", [BLANK_ROWS, "Chapter 1 " + "." * 200, "Name: " + "_" * 90, "<p>" + "<br/>" * 30, "a" + " . " * 60]
)
def test_blank_rows_and_dot_leaders_are_confirmed_by_the_first_retry(text: str) -> None:
    first, second = attempt(text), attempt(text + "\n", 1)
    assert first.repeats and second.repeats
    assert ocr.confirmed(first, second)
    assert ocr.settled([first, second], retries=6)
    assert not ocr.settled([first, second, attempt(text, 2)], retries=6), "only the first retry confirms"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (attempt("word " * 40), attempt("word " * 40, 1)),  # what repeats is said
        (attempt("<p>a</p>" + BLANK_ROWS), attempt("<p>b</p>" + BLANK_ROWS, 1)),  # other words
        (attempt(BLANK_ROWS, finish_reason="length"), attempt(BLANK_ROWS, 1)),  # not whole
        (attempt(BLANK_ROWS), attempt(BLANK_ROWS, 1, "repetition")),
        (attempt(BLANK_ROWS), attempt("<p>all</p>", 1)),  # does not repeat
    ],
)
def test_nothing_else_confirms_a_loop(first: ocr.Attempt, second: ocr.Attempt) -> None:
    assert not ocr.confirmed(first, second)


# --------------------------------------------------------------------------------------------------- the best attempt


def test_whole_goes_before_cut_off_and_cut_off_before_nothing() -> None:
    long_cut = attempt("<p>many more words", 0, "length")
    assert ocr.best_attempt([long_cut, attempt("<p>few</p>", 1)]) == 1
    assert ocr.best_attempt([long_cut]) == 0


def test_whole_and_looping_goes_before_cut_off() -> None:
    assert ocr.best_attempt([attempt("<p>text", 0, "length"), attempt("word " * 40, 1)]) == 1


def test_not_repeating_goes_before_repeating() -> None:
    assert ocr.best_attempt([attempt("many words here " + "word " * 400), attempt("<p>few</p>", 1)]) == 1


def test_of_loops_the_one_that_says_most_before_it_is_kept() -> None:
    short = attempt("one two " + "word " * 400, 0, "length")
    longer = attempt("one two three four five " + "word " * 40, 1, "length")
    assert ocr.best_attempt([short, longer]) == 1
    assert ocr.best_attempt([longer, short]) == 0


def test_of_equal_attempts_the_first_is_kept() -> None:
    assert ocr.best_attempt([attempt("<p>same", seed, "length") for seed in range(3)]) == 0


# --------------------------------------------------------------------------------------------------------- loops missed


def prose(words: int, seed: int = 0) -> str:
    chance = random.Random(seed)
    return " ".join(f"w{chance.randrange(10_000)}" for _ in range(words)) + " "


def rows(count: int, seed: int = 0) -> str:
    """Table rows that look alike: the same tags, few different values."""
    chance = random.Random(seed)
    return "".join(f"<tr><td>item {i}</td><td>{chance.choice('abc')}</td></tr>" for i in range(count))


LOOPING = {
    "a unit longer than the rule's 250 characters": prose(40, 1) + prose(120, 2) * 5,
    "many alike rows": "<table>" + rows(30) * 5,
    "two rows": prose(40) + rows(2) * 40,
    "in the middle": prose(150, 1) + prose(60, 2) * 6 + prose(150, 3),
    "a phrase in the middle": prose(50, 1) + "as we have seen, " * 40 + prose(50, 2),
    "one letter": prose(50) + "a" * 3000,
    "letters": prose(20) + "abc" * 800,
    "no spaces": prose(20) + "文字列" * 400,
    "one word": prose(20) + "ha " * 1000,
    "list items": "<ul>" + "<li>See the appendix for details.</li>" * 30 + "</ul>",
}


@pytest.mark.parametrize("text", LOOPING.values(), ids=LOOPING)
def test_a_planted_loop_is_found(text: str) -> None:
    assert ocr.looping_share(text) > 0.2


def test_the_share_is_the_loops_part_of_the_reply() -> None:
    unit = prose(50, 2)
    text = prose(250, 1) + unit * 5 + prose(500, 3)
    assert ocr.looping_share(text) == pytest.approx(0.25, abs=0.02)


ORDINARY = {
    "prose": prose(2000),
    "said three times": prose(100) * 3,
    "blank rows": BLANK_ROWS,
    "dot leaders": "".join(f"<p>Chapter {i} {'.' * 90} {7 * i}</p>" for i in range(40)),
    "a form": "".join(f"<p>{name}: ______ Date: ______</p>" for name in prose(40).split()),
    "checkboxes": "".join(
        f'<tr><td>{name}</td><td><input type="checkbox"/> Yes</td><td><input type="checkbox"/> No</td></tr>'
        for name in prose(40).split()
    ),
    "zeros": "".join(f"<tr><td>{name}</td>{'<td>0</td>' * 8}</tr>" for name in prose(40).split()),
    "numbers": "<tr>" + "".join(f"<td>{i}</td>" for i in range(500)) + "</tr>",
    "a refrain": "".join(prose(40, i) + "and so we sail away, my lads, " * 3 for i in range(8)),
    "nothing": "",
}


@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_tables_forms_and_contents_are_no_loops(text: str) -> None:
    assert ocr.looping_share(text) < 0.05


@settings(deadline=None, max_examples=150)
@given(st.one_of(LOOPS, st.text(alphabet="ab <>/", max_size=300)))
def test_a_share_is_between_none_and_all(text: str) -> None:
    assert 0 <= ocr.looping_share(text) <= 1


def fibonacci_word(length: int) -> str:
    """Full of repetitions of every length, and never a loop."""
    a, b = "a ", "b a "
    while len(b) < length:
        a, b = b, b + a
    return b


@pytest.mark.parametrize(
    "text",
    [prose(160_000), prose(80_000) * 2, fibonacci_word(500_000), "a b b a " * 120_000, "<td></td>" * 100_000],
    ids=["prose", "twice", "fibonacci", "loop", "blank"],
)
def test_loops_are_looked_for_in_linear_time(text: str) -> None:
    began = time.process_time()
    ocr.looping_share(text)
    ocr.repeats(text)
    ocr.repeated_tail(text)
    assert time.process_time() - began < 8, "a megabyte takes about a second"


# ------------------------------------------------------------------------------------------------------- empty or not


@pytest.mark.parametrize(
    ("box", "wrong"),
    [
        ((0, 0, 1000, 1000), False),
        ((10, 10, 10, 10), False),
        ((0, 0, 1001, 10), True),
        ((-1, 0, 10, 10), True),
        ((10, 0, 5, 10), True),
        ((0, 10, 10, 5), True),
    ],
)
def test_a_box_outside_the_page_or_inside_out_is_doubtful(box: ocr.Box, wrong: bool) -> None:
    assert ocr.outside(box) == wrong
