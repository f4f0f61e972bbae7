"""The demo's report: every figure is on it, every text is escaped, every picture is in it."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from examples.demo.records import DemoFacts, ExportRecord, Pair, StepRecord, spread
from examples.demo.report import write_report
from examples.demo.theme import DARK, LIGHT
from tdc.compile import Counts
from tdc.compile.report.record import Compile, Report

PICTURES = ("Two line charts", "Two dot plots", "Histogram of docstring lengths", "A bar for each compile")
TIMES = "\N{MULTIPLICATION SIGN}"
VOID = {"meta", "br", "hr", "link"}


class Page(HTMLParser):
    """Collects links and texts, and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: set[str] = set()
        self.ids: list[str] = []
        self.images: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        self.links |= {named[key] or "" for key in ("src", "href", "srcset") if key in named}
        if tag == "svg":
            self.images.append(named["aria-label"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def facts() -> DemoFacts:
    return DemoFacts(
        versions={"torch": "9.8.7", "Device": "cpu"},
        classes={"<script>alert(1)</script>": 70, "json & co": 30},
        lengths=tuple(range(1, 101)),
        occupancy=0.3125,
        tree_html="<ul><li>the batch tree</li></ul>",
        batch_text="TensorDict(<batch>)",
        steps=tuple(StepRecord(step, 3.0 / step, 1 - 1 / step, 1234, 0.05) for step in range(1, 41)),
        test_accuracy=0.5731,
        majority_accuracy=0.1404,
        comparison=tuple(
            Pair(
                StepRecord(step, 1.5, 0.5, 8000, 0.040 + 1e-4 * step),
                StepRecord(step, 1.5 + 2.5e-6, 0.5, 8000, 2 * (0.040 + 1e-4 * step)),
            )
            for step in range(1, 12)
        ),
        peak_bytes_ragged=3 * 2**20,
        peak_bytes_padded=5 * 2**20,
        compiled=(Counts("train<step>", 1, 0, 1, 34, 21.44), Counts("predict", 1, 3, 2, None, 0.0064)),
        export=ExportRecord("model<1>.pt2", 1_834_221, 4.8e-7, 1132, 1133, 11.9),
        code="if a < b:\n    train()",
        report=Report("model", "inductor", 3, (), (Compile(0, 40, 12.5),), 900.0, 700.0),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("demo") / "new" / "demo_report", facts())


def test_every_figure_is_on_the_page(report):
    text = Page(report.read_text(encoding="utf-8")).text
    expected = (
        "9.8.7", "json & co", "70.0%", "31.2%", "the batch tree", "TensorDict(<batch>)",  # data
        "57.3%", "14.0%", "49,360 tokens", "0.075",  # training
        f"2.00{TIMES}", f"2.5{TIMES}10⁻⁶", "40.6 ms", "81.2 ms", "80.2 ms", "82.2 ms", "3.0 MiB",  # ragged and padded
        "train<step>", "34", "21.4 s", "6.40 ms",  # compile report
        "model<1>.pt2", "1.7 MiB", f"4.8{TIMES}10⁻⁷", "1,132 / 1,133", "11.9 s",  # export
    )  # fmt: skip
    assert [figure for figure in expected if figure not in text] == []


def test_steps_that_compiled_are_left_out_of_times(tmp_path):
    first, *rest = facts().comparison
    slow = replace(first.padded, seconds=900.0, compiled=True)
    path = write_report(tmp_path, replace(facts(), comparison=(Pair(first.ragged, slow), *rest)))
    text = Page(path.read_text(encoding="utf-8")).text
    assert f"2.00{TIMES}" in text
    assert "1 of them compiled on one side or both" in text
    assert "15.0 min compiled" in text
    assert "median of 10 steps" in text


def test_texts_are_escaped(report):
    source = report.read_text(encoding="utf-8")
    page = Page(source)
    assert "script" not in page.seen
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source
    assert "json &amp; co" in source
    assert "if a &lt; b:" in source
    assert "<ul><li>the batch tree</li></ul>" in source


def test_pictures_are_in_the_page(report):
    page = Page(report.read_text(encoding="utf-8"))
    assert [path.name for path in report.parent.iterdir()] == [report.name]
    assert {alt for name in PICTURES for alt in page.images if alt.startswith(name)} == set(page.images)
    assert len(page.images) == len(PICTURES)
    assert len(page.ids) == len(set(page.ids))
    assert page.links <= {f"#{name}" for name in page.ids}


def test_the_page_stands_alone_and_is_accessible(report):
    source = report.read_text(encoding="utf-8")
    page = Page(source)
    assert page.open == []
    assert "://" not in source
    assert all(page.images)
    assert page.seen.count("table") == page.seen.count("caption") > 5
    assert [tag for tag in page.seen if re.fullmatch(r"h\d", tag)] == ["h1", "h2", "h3", *["h2"] * 7]
    assert "prefers-color-scheme: dark" in source
    assert 'name="viewport"' in source


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("colour", ["ink", "muted", "ragged", "padded"])
def test_text_colours_have_contrast(theme, colour):
    def luminance(code: str) -> float:
        parts = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ground in (theme.paper, theme.panel):
        low, high = sorted((luminance(getattr(theme, colour)), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2, level AA


def test_without_matplotlib_the_tables_stay(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write_report(tmp_path, facts())
    page = Page(path.read_text(encoding="utf-8"))
    assert [each.name for each in tmp_path.iterdir()] == ["index.html"]
    assert page.images == []
    assert "pip install torch-tdc[viz]" in page.text
    assert "Docstrings by length" in page.text
    assert page.seen.count("table") > 5


def test_with_matplotlib_no_hint(report):
    assert "pip install" not in report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_loss_is_printed_like_a_win(tmp_path):
    slow = tuple(
        Pair(replace(pair.ragged, seconds=pair.padded.seconds * 1.25), pair.padded) for pair in facts().comparison
    )
    slower = replace(facts(), comparison=slow)
    text = Page(write_report(tmp_path, slower).read_text(encoding="utf-8")).text
    assert f"0.80{TIMES}" in text
    assert "Padded is 1.25 times as fast." in text


@pytest.mark.sweep
@pytest.mark.slow
def test_one_step_is_enough_for_every_picture(tmp_path):
    one = replace(facts(), steps=facts().steps[:1], comparison=facts().comparison[:1], lengths=(7,))
    assert len(Page(write_report(tmp_path, one).read_text(encoding="utf-8")).images) == len(PICTURES)


@pytest.mark.sweep
@pytest.mark.slow
def test_a_report_is_written_over_an_earlier_one(tmp_path):
    write_report(tmp_path, replace(facts(), test_accuracy=0.111))
    text = write_report(tmp_path, facts()).read_text(encoding="utf-8")
    assert "11.1%" not in text
    assert "57.3%" in text


def test_spread_is_ordered():
    assert spread([2.0]).median == 2.0
    values = spread([5.0, 1.0, 4.0, 2.0])
    assert list(values) == sorted(values)
