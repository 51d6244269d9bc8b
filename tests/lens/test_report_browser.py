"""The largest report there is to be, opened in a real browser."""

import math
import random
from contextlib import redirect_stdout
from io import StringIO

import pytest

from phasewise.cli import main
from phasewise.encodings import PoPEConfig, RoPEConfig, TAPAConfig
from phasewise.lens.charts import Axis, Figure, HeatMap, Line, Lines
from phasewise.lens.inspect import Inspection
from phasewise.lens.report import page
from phasewise.lens.show import figures, summary
from phasewise.lens.spectrum import Head, Spectrum, Use
from phasewise.model import folder as own
from tests.lens.browser import browser, chromium
from tests.model.small import model_of

pytest.importorskip("plotly", reason="reports need plotly")
pytest.importorskip("jinja2", reason="reports need jinja2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium"),
]

LAYERS, HEADS, FREQUENCIES = 32, 32, 64
LARGEST_BYTES, LONGEST_SECONDS = 8_000_000, 2.0
DRAWN = "document.querySelector('#layers .main-svg') !== null"
OWN = ("file:", "data:", "about:", "blob:")


def use(generator):
    weights = [math.exp(generator.gauss(0, 2)) for _ in range(FREQUENCIES)]
    share = tuple(float(f"{weight / sum(weights):.5g}") for weight in weights)
    return Use(energy=1.2345, zero_share=0.0, share=share, theta_eff=0.012345, participation=12.345)


def layer(number, generator):
    rates = tuple(float(f"{5e5 ** -(place / FREQUENCIES):.5g}") for place in range(FREQUENCIES))
    coherent = tuple(float(f"{generator.random():.5g}") for _ in range(FREQUENCIES))
    heads = tuple(
        Head(mean=use(generator), causal=use(generator), weighted=use(generator), coherent=coherent)
        for _ in range(HEADS)
    )
    turns = tuple(8192 * rate / (2 * math.pi) for rate in rates)
    return Spectrum(
        **{"kind": "rope", "layer": number, "kv_heads": 8, "head_dim": 128, "window": None, "rates": rates},
        **{"turns_trained": turns, "turns_wanted": turns, "excess": use(generator).excess, "coherent": 0.5},
        **{"mean": use(generator), "causal": use(generator), "weighted": use(generator)},
        heads=heads,
        polar=None,
    )


@pytest.fixture(scope="module")
def largest(tmp_path_factory):
    generator = random.Random(0)
    layers = tuple(layer(number, generator) for number in range(LAYERS))
    found = Inspection(
        **{"family": "llama", "parameters": 8_000_000_000, "dtype": "bfloat16", "model_layers": LAYERS},
        **{"trained_length": 8192, "wanted_length": 32768, "corpus": "austen", "corpus_sha256": "0"},
        **{"split": "test", "tokens": 16384, "context": 2048, "queries": 8, "partial": "half of it"},
        layers=layers,
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page("Largest", figures(found), summary=summary(found), partial=found.partial))
    return path


def test_largest_report_is_small_and_opens_in_time_without_network_or_complaint(largest):
    assert largest.stat().st_size < LARGEST_BYTES
    with browser() as tab:
        tab.open(largest, width=1200, height=900)
        tab.wait(DRAWN)
        assert tab.busy() < LONGEST_SECONDS
        assert all(url.startswith(OWN) for url in tab.requests)
        assert tab.complaints == []


def test_every_chart_is_drawn_hover_tells_the_wavelength_and_menus_change_the_chart(largest, tmp_path):
    with browser() as tab:
        tab.open(largest, width=1200, height=900)
        names = tab.run("[...document.querySelectorAll('.chart')].map(chart => chart.id)")
        assert names == ["layers", "heads", "wavelength", "coherent", "turns"]
        for name in names:
            tab.run(f"document.getElementById('{name}').scrollIntoView()")
            tab.wait(f"document.querySelector('#{name} .main-svg') !== null")
        tab.run("document.getElementById('heads').scrollIntoView()")
        box = tab.run(
            "(r => [r.x, r.y, r.width, r.height])(document.getElementById('heads').getBoundingClientRect())"
        )
        for shift in (0, 5):
            x, y = box[0] + box[2] / 2 + shift, box[1] + box[3] / 2
            tab("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        tab.wait("document.querySelector('#heads .hoverlayer text') !== null")
        hover = tab.run("document.querySelector('#heads .hoverlayer').textContent")
        for wanted in ("head ", "wavelength", "turns in the trained length", "share / uniform share"):
            assert wanted in hover
        first = tab.run("JSON.stringify(document.getElementById('heads').data[0].z)")
        tab.run(
            "(s => { s.value = 7; s.dispatchEvent(new Event('change')); })(document.querySelectorAll('select')[1])"
        )
        tab.wait(f"JSON.stringify(document.getElementById('heads').data[0].z) !== {first!r}")
        assert tab.complaints == []


def test_page_fits_a_phone(largest):
    with browser() as tab:
        tab.open(largest, width=390, height=844, mobile=True)
        tab.wait(DRAWN)
        assert tab.run("document.documentElement.scrollWidth") == 390
        sizes = (
            "[...document.querySelectorAll('.chart text')].map(t => parseFloat(getComputedStyle(t).fontSize))"
        )
        assert min(tab.run(sizes)) >= 10
        assert tab.complaints == []


def test_labels_of_the_summary_wrap_on_a_phone_and_leave_room_for_the_text(tmp_path):
    path = tmp_path / "report.html"
    label = "text:collected_letters_of_a_long_life_1790-1817.txt"
    path.write_text(page("Labels", [], summary={label: "self-similar, " * 20, "limits": "some words " * 30}))
    with browser() as tab:
        tab.open(path, width=390, height=844, mobile=True)
        widths = tab.run("[...document.querySelectorAll('th')].map(th => th.getBoundingClientRect().width)")
        assert max(widths) < 390 / 3
        assert min(widths) > 60
        assert tab.run("document.documentElement.scrollWidth") == 390


def test_lines_with_gaps_and_bands_are_drawn(tmp_path):
    line = Line(name="a", x=[1, 2, 4], y=[1.0, math.nan, 3.0], low=[0.5, 1, 2], high=[2, 2, 4])
    lines = Lines(x=Axis(title="x", scale="log"), y=Axis(title="y"), lines=[line])
    empty = HeatMap(
        **{"x": Axis(title="x"), "y": Axis(title="y"), "value": Axis(title="z", scale="log")},
        **{"columns": ["a", "b"], "rows": ["c"], "z": [[math.nan, 0.0]]},
    )
    charts = [
        Figure(name="lines", title="Lines", text="", views={"": lines}),
        Figure(name="empty", title="Nothing", text="", views={"": empty}),
    ]
    path = tmp_path / "report.html"
    path.write_text(page("Lines", charts, summary={}))
    with browser() as tab:
        tab.open(path, width=800, height=1600)
        for name in ("lines", "empty"):
            tab.wait(f"document.querySelector('#{name} .main-svg') !== null")
        assert tab.complaints == []


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of every command that measures, of tiny models and corpora, each page with its charts' names."""
    folder = tmp_path_factory.mktemp("reports")
    for name, encoding in (("rope", RoPEConfig()), ("pope", PoPEConfig()), ("tapa", TAPAConfig())):
        own.save(model_of(encoding, vocab_size=256), folder / name)
    text = folder / "a_text_of_a_rather_long_name.txt"
    text.write_text("It is a truth universally acknowledged, that a single man must want. " * 200)
    read = ["--tokens", "512", "--context", "128", "--length", "2048"]
    commands = {
        "rope": ["inspect", str(folder / "rope"), *read, "--trained-length", "128"],
        "pope": ["inspect", str(folder / "pope"), *read],
        "tapa": ["inspect", str(folder / "tapa"), *read],
        "doctor": ["doctor", str(folder / "rope"), "--trained-length", "128", "--length", "4096"],
        "profile": [
            "profile",
            f"text:{text}",
            "austen",
            "--longest",
            "50",
            "--granularities",
            "bytes",
            "words",
        ],
    }
    commands["profile"] += ["--checkpoint", str(folder / "rope"), "--context", "32"]
    commands["advise"] = ["advise", str(folder / "rope"), "--trained-length", "128", "--length", "256"]
    commands["advise"] += ["--read", "512", "--no-measure"]
    for name, command in commands.items():
        with redirect_stdout(StringIO()):
            assert main([*command, "--out", str(folder / "out" / name)]) == 0
    return folder / "out"


CHARTS = {
    "rope": ["layers", "heads", "wavelength", "coherent", "turns"],
    "pope": ["layers", "heads", "wavelength", "coherent", "turns", "phases", "magnitudes"],
    "tapa": ["distance", "arguments"],
    "doctor": ["phases", "turns"],
    "profile": ["dependency", "reach", "model"],
    "advise": ["grid"],
}
OVERLAPS = """(() => {
  const within = chart => selector => [...chart.querySelectorAll(selector)].map(t => t.getBoundingClientRect());
  const meet = (a, b) => a.width && b.width && a.left < b.right - 1 && b.left < a.right - 1 &&
    a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return [...document.querySelectorAll('.chart')].filter(chart => {
    const of = within(chart), legend = of('.legendtext'), title = of('.xtitle, .ytitle'), labels = of('.xtick text');
    const rows = of('.ytick text');
    return legend.some(l => [...title, ...labels].some(t => meet(l, t))) ||
      [labels, rows].some(side => side.slice(1).some((one, place) => meet(one, side[place])));
  }).map(chart => chart.id);
})()"""


HOVER = """(id => {
  const chart = document.getElementById(id), number = chart.data.length - 1, trace = chart.data[number];
  const at = trace.type === 'heatmap' ? {xval: trace.z[0].findIndex(value => value !== null), yval: 0} :
    {curveNumber: number, pointNumber: trace.y.findIndex(value => value !== null)};
  Plotly.Fx.hover(id, [at]);
})"""


@pytest.mark.parametrize("name", CHARTS)
def test_report_of_every_command_is_drawn_and_told_on_a_desk_and_on_a_phone(reports, name):
    with browser() as tab:
        for width, height, mobile in ((1200, 900, False), (390, 844, True)):
            tab.open(reports / name / "report.html", width=width, height=height, mobile=mobile)
            charts = tab.run("[...document.querySelectorAll('.chart')].map(chart => chart.id)")
            assert charts == CHARTS[name]
            for chart in charts:
                tab.run(f"document.getElementById('{chart}').scrollIntoView()")
                tab.wait(f"document.querySelector('#{chart} .main-svg .xtick') !== null")
                tab.run(f"{HOVER}('{chart}')")
                tab.wait(f"document.querySelector('#{chart} .hoverlayer text') !== null")
            assert tab.run(OVERLAPS) == []
            assert tab.run("document.documentElement.scrollWidth") <= width
        assert all(url.startswith(OWN) for url in tab.requests)
        assert tab.complaints == []
