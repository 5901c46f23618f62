"""The report in a real browser."""

import base64
import gzip
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manifoldkv import CompressionPlan, Quantization, quantize
from manifoldkv.core.errors import RunError
from manifoldkv.evaluate.continuation import continuation
from manifoldkv.evaluate.diagnostics import diagnose_plan
from manifoldkv.evaluate.reports.plan import model_name, write_report
from tests.families import tiny_model, tiny_tokens
from tests.plans import bits_plan, random_plan

pytest.importorskip("plotly")
from plotly.offline import get_plotlyjs

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage"
)
ATTACK = '"><script>document.title = "attacked"</script>'


def plan_of(model, **options) -> CompressionPlan:
    plan = random_plan(model, **options)
    return replace(plan, provenance=replace(plan.provenance, model=ATTACK))


QUALITY, ERRORS, USE = "Quality", "Error of every layer", "Use it"
CHARTS = ["errors", "ranks"]
CODED_CHARTS = ["errors", "bits", "ranks"]


def charts_of(page: str) -> dict[str, dict]:
    """The charts of a report by their names, each in a place of its own."""
    found = re.findall(
        r'<div class="chart" id="(\w+)"></div>\n<script [^>]*data-chart="\1">(.*?)</script>',
        page,
        re.DOTALL,
    )
    assert page.count('class="chart"') == len(found)
    return {name: json.loads(drawing) for name, drawing in found}


def unpacked_library(page: str) -> str:
    """What a browser makes of the packed library, decoded without the code that packs it."""
    text = re.search(r'id="library">(.*?)</script>', page, re.DOTALL)[1]
    return gzip.decompress(base64.b64decode(text, validate=True)).decode()


def assert_whole(page: str, plan: CompressionPlan, more: Sequence[str] = ()) -> None:
    """Fail unless a report has all its sections, its charts with numbers, and what draws them."""
    own = ["Bits", "Ranks"] if plan.variable_width else ["Ranks"]
    assert re.findall("<h2>(.*?)</h2>", page) == [QUALITY, *more, ERRORS, *own, USE]
    charts = charts_of(page)
    assert list(charts) == (CODED_CHARTS if plan.variable_width else CHARTS)
    assert all(trace["x"] for chart in charts.values() for trace in chart["data"])
    assert unpacked_library(page) == get_plotlyjs()


def written(folder: Path, plan: CompressionPlan, tokens: torch.Tensor, **options: Any) -> str:
    """Write a report of a plan for the tiny Llama, and read it."""
    write_report(folder / "report.html", tiny_model("llama"), plan, tokens, **options)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plan() -> CompressionPlan:
    return replace(plan_of(tiny_model("llama"), key_rank=4, value_rank=6), sinks=2)


@pytest.fixture(scope="module")
def report(plan: CompressionPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    written(path, plan, tiny_tokens(3, 12))
    return path / "report.html"


@pytest.fixture(scope="module")
def page(report: Path) -> str:
    return report.read_text(encoding="utf-8")


def test_one_file_that_asks_nobody(report: Path, page: str) -> None:
    assert list(report.parent.iterdir()) == [report]
    assert len(page) < 2_000_000
    assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="(?!data:)', page)
    body = page[page.index("</head>") :]
    assert "<script>document.title" not in body  # a plan from a stranger cannot write into it


def test_every_section_and_chart_is_there(page: str, plan: CompressionPlan) -> None:
    assert_whole(page, plan)


@pytest.mark.parametrize("rounded", [False, True])
def test_errors_of_layers_are_those_of_a_diagnosis(
    rounded: bool, plan: CompressionPlan, tmp_path: Path
) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(3, 12)
    if rounded:
        plan = quantize(plan, model, tokens, Quantization(2))
    text = written(tmp_path, plan, tokens)
    assert ("2-bit integers in calibrated ranges" in text) == rounded
    [bars] = charts_of(text)["errors"]["data"]
    drawn = np.frombuffer(base64.b64decode(bars["y"]["bdata"]), dtype=bars["y"]["dtype"])
    expected = diagnose_plan(model, plan, tokens)["layer_output_error"]
    np.testing.assert_array_equal(drawn, expected)


def test_the_library_may_lie_beside_it(plan: CompressionPlan, tmp_path: Path) -> None:
    text = written(tmp_path, plan, tiny_tokens(2, 12), self_contained=False)
    assert '<script src="plotly.min.js"></script>' in text
    assert (tmp_path / "plotly.min.js").read_text(encoding="utf-8") == get_plotlyjs()
    assert len(text) < 100_000
    assert list(charts_of(text)) == CHARTS


@pytest.mark.parametrize(
    ("known_as", "title"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("smollm2", "smollm2"),
        ("/home/me/models/mine", "mine"),
        ("./mine", "mine"),
        ("studies/models/mine", "mine"),
    ],
)
def test_its_title_is_the_name_of_the_model(
    known_as: str, title: str, plan: CompressionPlan
) -> None:
    assert model_name(replace(plan.provenance, model=known_as)) == title


class Letters:
    """A tokenizer in whose language every token is a letter."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + int(token) % 26) for token in ids)


def test_a_text_is_continued_before_compression_and_after(tmp_path: Path) -> None:
    model, tokens = tiny_model("llama"), tiny_tokens(2, 12)
    plan = plan_of(model, key_rank=2, value_rank=2)
    text = written(tmp_path, plan, tokens, tokenizer=Letters())
    shown = re.findall(r'<p class="text">(.*?)</p>', text)
    count = min(60, model.config.max_position_embeddings // 2)
    read = tokens[:1, : model.config.max_position_embeddings - count]
    ids = [read[0], *(continuation(model, read, p, new_tokens=count) for p in (None, plan))]
    assert shown == [Letters().decode(x, True) for x in ids]
    assert shown[1] != shown[2]


def test_bytes_and_sinks_are_those_of_the_plan(page: str, plan: CompressionPlan) -> None:
    stored = plan.nbytes(12, dtype=torch.float64)
    assert f"{stored:,} of {3 * 2 * 2 * 8 * 8 * 12:,} bytes for 12 tokens in float64" in page
    assert f"{100 * plan.ratio_at(12):.1f} % of the uncompressed one" in page
    assert "the first 2 of every sequence, uncompressed" in page
    over = f"{plan.compute:.3g} times the multiplications of uncompressed attention"
    assert f"<td>{over}</td>" in page


def test_coded_latents_show_their_bits_and_both_losses(tmp_path: Path) -> None:
    tokens = tiny_tokens(8, 12)
    plan = bits_plan(tiny_model("llama"), tokens, ratio=0.4, sinks=1)
    provenance = replace(plan.provenance, measured_nats=0.0123, measured_error=0.0045)
    text = written(tmp_path, replace(plan, provenance=provenance), tokens)
    assert f"{provenance.predicted_nats:.4f} nats per token, on" in text
    assert "0.0123 ± 0.0045 nats per token (standard error), on the same tokens" in text
    full = 3 * 2 * 2 * 8 * 2 * 12
    stored = plan.nbytes(12)
    assert f"{100 * stored / full:.1f} % of the uncompressed one: {stored:,} of {full:,}" in text
    assert list(charts_of(text)) == CODED_CHARTS


@pytest.mark.parametrize("sequences", [1, 3, 4])
def test_fewer_than_four_sequences_have_no_standard_error(
    sequences: int, plan: CompressionPlan, tmp_path: Path
) -> None:
    text = written(tmp_path, plan, tiny_tokens(sequences, 12), self_contained=False)
    added = re.search(r"Added loss</th><td>(.*)</td>", text)
    assert added is not None
    error = (
        r" ± \d\.\d{4} nats per token \(standard error\)" if sequences == 4 else " nats per token"
    )
    assert re.fullmatch(rf"-?\d\.\d{{4}}{error}", added[1])


def test_an_absent_library_is_named_before_anything_is_measured(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(RunError, match=r'needs plotly: pip install .* -e "\.\[report\]"'):
        write_report(tmp_path / "r.html", None, None, None)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver on this machine")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, report: Path):
    browser.set_window_size(1000, 3000)
    browser.get(report.as_uri())
    wait_for(browser, "return document.querySelectorAll('.main-svg').length >= 4")
    return browser


def wait_for(browser, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(script))


def hover(browser, chart: str) -> str:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    plot = browser.find_element(By.CSS_SELECTOR, f"#{chart} .plot-container")
    ActionChains(browser).move_to_element_with_offset(plot, 0, 60).perform()
    wait_for(browser, f"return document.querySelector('#{chart} .hovertext') !== null")
    return browser.find_element(By.CSS_SELECTOR, f"#{chart} .hovertext").text


@pytest.mark.slow
def test_it_renders_without_a_complaint(opened) -> None:
    assert opened.get_log("browser") == []
    assert opened.title == ATTACK


@pytest.mark.slow
def test_hovering_shows_values(opened) -> None:
    assert re.fullmatch(r"layer 1: 0\.\d{4}", hover(opened, "errors"))
    assert re.fullmatch(r"layer \d: (key|value) rank [46]", hover(opened, "ranks"))


@pytest.mark.slow
def test_a_phone_scrolls_in_one_direction(opened) -> None:
    metrics = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    width = "document.querySelector('#errors .main-svg').getBoundingClientRect().width"
    wait_for(opened, f"return {width} <= 375")
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 375
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_the_library_beside_it_draws_too(browser, plan: CompressionPlan, tmp_path: Path) -> None:
    written(tmp_path, plan, tiny_tokens(2, 12), self_contained=False)
    browser.get((tmp_path / "report.html").as_uri())
    wait_for(browser, "return document.querySelectorAll('.main-svg').length >= 4")
    assert browser.get_log("browser") == []
