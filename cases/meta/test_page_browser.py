"""The HTML page in a real browser, from disk and offline, as a person meets it. It leaves screenshots to look at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cases.meta import browser, handmade, nights, page_runs, results
from harness.contract.types import Kind, Phase
from harness.night.trends import trends_of
from reports.page import Beside, render_page
from reports.reading import read_report

#: What stands in an opened round, line by line, tables row by row.
READ = """() => [...document.getElementById('round').querySelectorAll('h3, p, li, .chips button, tr, g')]
  .map(e => e.tagName === 'TR' ? [...e.cells].map(c => c.textContent.trim()).join(' | ')
    : e.tagName === 'g' ? e.querySelector('title').textContent : e.innerText.replace('\\n', ': '))"""
#: A page of any length must stay this small in the browser; the report of a hundred rows has about as many.
MOST_ELEMENTS = 2500
#: Contrast that WCAG 2 asks of text (AA): ordinary, and large or bold.
CONTRAST, CONTRAST_LARGE = 4.5, 3.0
PHONE = 360


@pytest.fixture(scope="module")
def chromium():
    with browser.running() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    beside = Beside(trends=trends_of(nights.store_of_twelve()))
    text = render_page(read_report(page_runs.store(folder / "runs")), beside=beside)
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def long_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    report = read_report(page_runs.long(folder / "runs"))
    assert sum(len(frames.positions) for frames in report.frames) >= 100_000
    (folder / "long.html").write_text(render_page(report), encoding="utf-8")
    return folder / "long.html"


@pytest.fixture
def opened(chromium, page):
    with browser.tab(chromium, page) as tab:
        yield tab


def test_it_opens_from_disk_without_a_complaint_and_asks_for_nothing(opened, page, tmp_path):
    assert opened.complaints == []
    assert opened.asked == [page.as_uri()]
    assert opened.page.title().endswith("FAIL")
    assert opened.page.locator("h1").inner_text().startswith("FAIL")
    assert browser.shot(opened, "wide-light", tmp_path).stat().st_size > 10_000


def test_the_verdict_and_the_first_divergence_come_first(opened):
    order = opened.page.locator("h1, h2").all_inner_texts()
    sentence = "SGLang 0.5.23 diverges in 4 of 6 scenarios (ACCEPT, CRASH, LEAK, POSITION, TOKEN)"
    assert " ".join(order[0].split()) == f"FAIL {sentence}"
    assert order[1:4] == ["First divergence, in crashed", "What was exercised", "Requests × rounds"]
    top = opened.page.locator("#first-title").bounding_box()
    assert top["y"] < 500


@pytest.mark.parametrize("judged", [False, True])
def test_a_page_without_a_verdict_begins_with_why_and_what_to_type(judged, chromium, tmp_path):
    """An engine that did not come up; and a run that stopped before anything was judged."""
    run = results.store_without_engine(tmp_path / "runs", "single", "it did not start\nOSError: <b>libcuda</b>")
    if not judged:
        for path in run.rglob("verdict.json"):
            path.unlink()
    (tmp_path / "page.html").write_text(render_page(read_report(run)), encoding="utf-8")
    with browser.tab(chromium, tmp_path / "page.html") as tab:
        headings = tab.page.locator("h1, h2").all_inner_texts()
        assert headings[0].startswith("UNKNOWN")
        assert headings[1] == ("No verdict on single" if judged else "What was exercised")
        assert tab.page.locator("pre").all_inner_texts() == (["OSError: <b>libcuda</b>"] if judged else [])
        assert "eaglecheck run " in tab.page.locator(".command code").first.inner_text()
        tab.page.get_by_role("button", name="Copy").first.click()
        tab.page.get_by_role("button", name="Copied").or_(tab.page.get_by_text("Select it by hand")).wait_for()
        assert tab.complaints == []


def test_a_click_leads_to_the_round(opened, tmp_path):
    tab = opened.page
    tab.select_option("#scenario", label="pr25015 (FAIL)")
    assert tab.locator("#round").inner_text() == ""
    tab.get_by_role("gridcell", name="request r1, scheduler step 5").click()
    said = tab.locator("#round").inner_text()
    assert "Scheduler step 5, rank 0, batch 5: decode, 3 requests" in said
    assert "Request r1: committed length" in said
    assert "✕ POSITION draft step 0, beam 0: engine" in said
    for heading in ("Draft tree", "Draft steps", "Verify", "Committed tokens", "Draft extend"):
        assert tab.locator("#round h3", has_text=heading).count() == 1
    assert tab.url.endswith("&d=0&r=5&q=r1")
    assert opened.complaints == []
    browser.shot(opened, "round-open", tmp_path)


@pytest.mark.parametrize("name", ["pr25015", "tree", "idle-rank", "crashed"])
def test_what_stands_in_a_round(opened, name, snapshot):
    tab = opened.page
    number = tab.locator("#scenario option", has_text=name).get_attribute("value")
    rank, request = (1, "") if name == "idle-rank" else (0, "" if name == "crashed" else "r1")
    tab.goto(tab.url.split("#")[0] + f"#s={number}&d={rank}&r=5&q={request}")
    assert "\n".join(tab.evaluate(READ)) == snapshot


def test_the_rows_stand_engine_beside_reference(opened):
    tab = opened.page
    number = tab.locator("#scenario option", has_text="pr25015").get_attribute("value")
    tab.goto(tab.url.split("#")[0] + f"#s={number}&d=0&r=5&q=r1")
    row = tab.locator("#round table.rows").first.locator("tbody tr").first
    cells = row.locator("td").all_inner_texts()
    engine, reference = cells[2], cells[3]
    assert int(engine) == int(reference.removeprefix("≠ ")) + 1
    assert row.locator("td.differs").count() == 2


def test_the_first_divergence_links_to_its_round(opened):
    tab = opened.page
    tab.get_by_role("link", name="Show the round").click()
    title = tab.locator("#round-title")
    title.wait_for()
    assert title.inner_text().startswith("Scheduler step ")
    assert tab.locator("#round .said li").count() >= 1
    assert tab.locator('button.cell[aria-current="true"]').count() == 1


def test_the_tree_shows_the_accepted_path_and_the_wrong_node(opened, tmp_path):
    tab = opened.page
    tab.select_option("#scenario", label="tree (FAIL)")
    tab.locator("#next-wrong").click()
    tree = tab.locator("#round svg.tree")
    assert tree.locator("g.wrong").count() == 1
    assert "✕" in tree.locator("g.wrong").text_content()
    assert "not " in tree.locator("g.wrong .under").text_content()
    accepted = tab.locator("#round table.rows", has_text="chosen at node").locator("tbody tr").count()
    assert tree.locator("g.taken").count() == accepted
    assert "first wrong node" in tree.get_attribute("aria-label")
    assert "eagle-tiny" in tab.locator("#scenario-facts").text_content()
    tab.locator("#next-failing").click()
    assert tab.locator("#scenario option:checked").text_content().endswith("(FAIL)")
    browser.shot(opened, "tree", tmp_path)


def test_the_keyboard_reaches_and_opens_everything(opened):
    tab = opened.page
    tab.locator("#scenario").focus()
    for _ in range(5):  # the buttons beside it and those of failing scenarios, then the map
        tab.keyboard.press("Tab")
    assert "cell" in tab.evaluate("document.activeElement.className")
    first = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    moved = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert first.startswith("batch, scheduler step 0")
    assert moved.startswith("request r0, scheduler step 4")  # r0 waits while the others' chunks are prefilled
    tab.keyboard.press("End")
    tab.keyboard.press("Home")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("request r0, scheduler step 0")
    tab.keyboard.press("n")
    wrong = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert wrong.endswith("; wrong")
    tab.keyboard.press("Enter")
    assert tab.locator("#round .said li").count() >= 1
    assert tab.evaluate("document.activeElement.className").startswith("cell")
    assert opened.complaints == []


def test_idle_and_empty_rounds_and_steps_without_a_batch_are_visible(opened, tmp_path):
    tab = opened.page
    tab.select_option("#scenario", label="idle-rank (PASS)")
    said = tab.locator("#map .cell").evaluate_all(
        "cells => cells.map(cell => cell.ariaLabel + ' = ' + cell.textContent)"
    )
    assert "rank 1, scheduler step 1: idle = I" in said
    assert "rank 1, scheduler step 4: batch without requests = E" in said
    assert "rank 1, scheduler step 2: no batch = ·" in said
    assert "rank 0, scheduler step 6: no batch = ·" in said
    tab.get_by_role("gridcell", name="rank 1, scheduler step 1").click()
    assert "rank 1, batch 1: idle, no requests" in tab.locator("#round").inner_text()
    browser.shot(opened, "idle", tmp_path)


def test_a_batch_that_never_ended_can_be_opened(opened, tmp_path):
    tab = opened.page
    tab.select_option("#scenario", label="crashed (FAIL)")
    tab.locator("#next-wrong").click()
    said = tab.locator("#round").inner_text()
    assert tab.locator('button.cell[aria-current="true"]').text_content() == "X"
    assert "Scheduler step 5, rank 0, batch 5: stopped" in said
    assert "✕ CRASH verify: engine RuntimeError: no" in said
    assert opened.complaints == []
    browser.shot(opened, "crashed", tmp_path)


def test_a_leak_is_shown_at_the_end_of_its_rank(opened):
    tab = opened.page
    tab.select_option("#scenario", label="leaking (FAIL)")
    tab.locator("#next-wrong").click()
    assert "✕ LEAK" in tab.locator("#round").inner_text()
    assert "batch, scheduler step 8" in tab.locator('button.cell[aria-current="true"]').get_attribute("aria-label")


def test_a_finding_without_a_round_is_shown_beside_the_map(chromium, tmp_path):
    page = tmp_path / "leak.html"
    run = page_runs.by_hand(tmp_path / "runs", results.EVERY_KIND[Kind.LEAK])
    page.write_text(render_page(read_report(run)), encoding="utf-8")
    with browser.tab(chromium, page) as tab:
        assert "✕ LEAK pool level differs" in tab.page.locator("#scenario-said").inner_text()
        assert tab.page.locator("#next-wrong").is_disabled()
        assert tab.complaints == []


def test_a_batch_that_never_ended_shows_the_rows_that_were_seen(chromium, tmp_path):
    page = tmp_path / "rows.html"

    def forget(engine):
        engine.rows.ints["round"][engine.rows.ints["round"] == 5] = 99

    run = results.store(tmp_path / "runs", ("rows", forget))
    page.write_text(render_page(read_report(run)), encoding="utf-8")
    with browser.tab(chromium, page) as tab:
        tab.page.locator("#map .cell.X", has_text="X").nth(1).click()
        assert "the batch never ended" in tab.page.locator("#round").inner_text()
        assert tab.page.locator("#round table.rows").count() == 4


def test_states_differ_by_shape_and_letter_and_not_by_colour_alone(opened):
    tab = opened.page
    tab.select_option("#scenario", label="pr25015 (FAIL)")
    wrong = tab.locator("#map .cell.wrong").first
    assert "✕" in wrong.evaluate("cell => getComputedStyle(cell, '::after').content")
    assert wrong.evaluate("cell => getComputedStyle(cell).borderTopWidth") == "3px"
    kinds = tab.locator("[aria-label=Legend] li").all_inner_texts()
    assert len({text.split()[0] for text in kinds if text.split()[0] != "D2"}) == len(kinds) - 3


def test_trends_are_read_by_shape_by_keyboard_and_in_words(opened, tmp_path, snapshot):
    """Charts say the same in three ways: drawn, as a sentence, and as a table that the keyboard opens."""
    tab = opened.page
    charts = tab.locator(".trends figure")
    drawings = charts.locator("svg")
    sentences = charts.locator("> p").all_inner_texts()
    assert [one.get_attribute("aria-label") for one in drawings.all()] == sentences
    assert sentences == snapshot
    first = charts.first
    shapes = [one.get_attribute("href") for one in first.locator("use").all()]
    assert shapes == ["#mark-green"] * 4 + ["#mark-red"] + ["#mark-green"] * 6 + ["#mark-moved"]
    drawn = tab.evaluate("[...document.querySelectorAll('defs > *')].map(e => e.tagName + (e.getAttribute('d') || ''))")
    assert len(set(drawn)) == 3, "reported apart without colour"
    boxes = first.locator("use").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert min(boxes) > 5
    first.locator("summary").focus()
    tab.keyboard.press("Enter")
    assert first.locator("details").evaluate("e => e.open")
    table = first.locator("tr").evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent).join(' | '))")
    assert table == snapshot
    first.scroll_into_view_if_needed()
    browser.shot(opened, "trends", tmp_path)
    assert opened.complaints == []


def test_the_command_is_copied(opened):
    tab = opened.page
    command = tab.locator("[data-copy]").first.get_attribute("data-copy")
    assert command.startswith("eaglecheck re")
    tab.locator("[data-copy]").first.click()
    tab.get_by_role("button", name="Copied").wait_for()
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<textarea id=\"paste\"></textarea>')")
    tab.locator("#paste").focus()
    tab.keyboard.press("Control+V")
    assert tab.locator("#paste").input_value() == command


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_scrolls_in_one_direction_only(chromium, page, tmp_path, dark):
    with browser.tab(chromium, page, width=PHONE, height=740, dark=dark) as tab:
        tab.page.locator("#next-wrong").click()
        assert tab.page.evaluate("document.documentElement.scrollWidth") == PHONE
        assert tab.page.evaluate("document.body.scrollWidth") == PHONE
        wide = tab.page.evaluate(
            "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
            " && !e.closest('.scroll, .map, .skip')).map(e => e.outerHTML.slice(0, 80))"
        )
        assert wide == []
        browser.shot(tab, f"phone-{'dark' if dark else 'light'}", tmp_path)


#: For every element with text of its own: what it says, its contrast with what lies behind it, whether it is large.
MEASURE = """() => {
  const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (text) => { probe.clearRect(0, 0, 1, 1); probe.fillStyle = text; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
  const behind = (element) => { for (let e = element; e; e = e.parentElement) {
    const style = getComputedStyle(e);
    if (e.tagName === 'g' && e.querySelector('.node')) return rgba(getComputedStyle(e.querySelector('.node')).fill);
    const found = rgba(style.backgroundColor); if (found[3] > 250) return found; } return rgba('white'); };
  return [...document.querySelectorAll('body *')].filter(e => e.getClientRects().length
      && !e.closest('script, .unseen, .skip, noscript')
      && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const outside = svg && (e.classList.contains('under') || e.classList.contains('mark'));
    const ground = behind(outside ? e.closest('svg').parentElement : e);
    const [a, b] = [light(rgba(svg ? style.fill : style.color)), light(ground)];
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    return [e.textContent.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), large];
  });
}"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(chromium, page, tmp_path, dark):
    with browser.tab(chromium, page, dark=dark) as tab:
        for name in ("pr25015 (FAIL)", "tree (FAIL)", "idle-rank (PASS)"):
            tab.page.select_option("#scenario", label=name)
            tab.page.locator("#map .cell.D").first.click()
            measured = tab.page.evaluate(MEASURE)
            faint = [one for one in measured if one[1] < (CONTRAST_LARGE if one[2] else CONTRAST)]
            assert len(measured) > 100
            assert faint == [], name
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 150) is dark
        browser.shot(tab, f"wide-{'dark' if dark else 'light'}-measured", tmp_path)


def test_a_run_of_a_hundred_thousand_rows_stays_small_and_parses_rows_on_demand(chromium, long_page, tmp_path):
    with browser.tab(chromium, long_page) as tab:
        count = "document.querySelectorAll('*').length"
        assert tab.page.evaluate(count) < MOST_ELEMENTS
        assert tab.complaints == []
        parses = "performance.getEntriesByName('rows parsed').length"
        assert tab.page.evaluate(parses) == 0
        tab.page.evaluate("document.getElementById('map').scrollLeft = 1e6")
        tab.page.locator("#map .cell[aria-label*='; wrong']").first.wait_for()
        assert tab.page.evaluate(count) < MOST_ELEMENTS
        tab.page.locator("#next-wrong").click()
        assert "✕ POSITION" in tab.page.locator("#round").inner_text()
        assert tab.page.evaluate(parses) == 1
        assert tab.page.evaluate(count) < MOST_ELEMENTS
        browser.shot(tab, "long", tmp_path)


def test_a_long_chunk_shows_its_wrong_rows_and_the_rest_on_request(chromium, tmp_path):
    def far_down(engine):
        engine.rows.ints["input_id"][handmade.find(engine, phase=Phase.DRAFT_PREFILL, slot=150)] = 60

    run = results.store(tmp_path / "runs", ("chunk", far_down), scenario={"prompts": (200,), "chunk": None})
    page = tmp_path / "chunk.html"
    page.write_text(render_page(read_report(run)), encoding="utf-8")
    with browser.tab(chromium, page) as tab:
        tab.page.locator("#next-wrong").click()
        table = tab.page.locator("#round .scroll", has_text="token in").nth(1)
        assert table.locator("tbody tr").count() == 61
        assert table.locator("tbody tr").last.inner_text().startswith("150 ✕")
        tab.page.get_by_role("button", name="show 139 more rows").click()
        assert table.locator("tbody tr").count() == 200


def test_rows_beyond_the_room_of_a_page_are_named_with_the_command_that_shows_them(chromium, tmp_path, monkeypatch):
    monkeypatch.setattr("reports.page.MOST_ROWS", 300)
    page = tmp_path / "many.html"
    run = results.store(tmp_path / "runs", ("wrong", results.one_ahead), ("other", results.sound))
    page.write_text(render_page(read_report(run)), encoding="utf-8")
    with browser.tab(chromium, page) as tab:
        tab.page.locator("#next-wrong").click()
        assert tab.page.locator("#round table.rows").count() > 1
        tab.page.select_option("#scenario", label="other (PASS)")
        tab.page.locator("#map .cell.D").first.click()
        command = tab.page.locator("#round [data-copy]").get_attribute("data-copy")
        assert re.fullmatch(r"eaglecheck report \S+/other-[0-9a-f]{12} --html other\.html", command)
        assert tab.complaints == []


def test_what_an_engine_said_is_text_and_never_markup(chromium, tmp_path):
    page = tmp_path / "hostile.html"
    page.write_text(render_page(read_report(page_runs.hostile(tmp_path / "runs"))), encoding="utf-8")
    with browser.tab(chromium, page) as tab:
        dialogs = []
        tab.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        tab.page.locator("#next-wrong").click()
        assert page_runs.HOSTILE in tab.page.locator("#round").inner_text()
        assert tab.page.locator("img").count() == 0
        assert (dialogs, tab.complaints) == ([], [])


@pytest.mark.parametrize(
    ("found", "package", "said"),
    [(None, True, "the package chromium"), ("/bin/chromium", False, "the package playwright"), ("/bin/x", True, "")],
)
def test_a_test_without_a_browser_names_the_package_it_lacks(monkeypatch, found, package, said):
    monkeypatch.setattr("shutil.which", lambda _name: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object() if package else None)
    assert said in browser.lacking()
    assert bool(browser.lacking()) is bool(said)
    if not said:
        return
    for required, outcome in (("1", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv(browser.REQUIRED, required)
        with pytest.raises(outcome, match=said), browser.running():
            pass


def test_the_page_says_what_it_cannot_show_without_scripts(page):
    text = page.read_text(encoding="utf-8")
    assert "<noscript>" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_a_node_that_a_wrong_draft_step_proposed_says_what_is_expected(chromium, tmp_path):
    run = Path(__file__).parents[1] / "recorded" / "gpu" / "pr25015-0.5.11-eager"
    page = tmp_path / "recorded.html"
    page.write_text(render_page(read_report(run)), encoding="utf-8")
    with browser.tab(chromium, page) as tab:
        tab.page.goto(f"{page.as_uri()}#s=0&d=0&r=2&q=a")
        tree = tab.page.locator("#round svg.tree")
        assert "token 109, expected 445" in tree.locator("g.follows title").text_content()
        assert tree.locator("g.wrong").count() == 0, "the position is wrong, not the choice"
