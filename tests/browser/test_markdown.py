"""Answers are drawn as Markdown, and nothing in them runs, loads or styles: in Chromium."""

from __future__ import annotations

import pytest
from fake_api import Answer, FakeApi
from page_kit import Page

pytestmark = pytest.mark.browser

RICH = """# Plan

Some **bold**, *slanted*, ~~gone~~ and `code`
on two lines, see [the docs](https://example.org/a?b=c) or https://example.com/plain.

- one
- two
  1. inner
  2. more

3. third

> quoted

| left | right |
|------|------:|
| a    | 1     |

---

```python
print("<b>1 & 2</b>")
```
"""
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'><animate onbegin='window.hacked = 1'></svg>",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "<style>body { display: none }</style>",
    "<p style='position:fixed;inset:0;background:url(//evil.test/style)'>over all</p>",
    "<form action='//evil.test/form'><input name=key><button>Send</button></form>",
    "<meta http-equiv=refresh content='0;url=//evil.test/refresh'><base href='//evil.test/'>",
    "<link rel=stylesheet href='//evil.test/style.css'><object data='//evil.test/o'></object>",
    "<details open ontoggle='window.hacked = 1'>x</details>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.hacked=1&gt;'>",
    "<a id=prompt name=send href='javascript:window.hacked = 1'>clobber</a>",
]
LINKS = [
    "[js](javascript:window.hacked=1)",
    "[entity](javascript&colon;window.hacked=1)",
    "[tab](java&#9;script:window.hacked=1)",
    "[case](JaVaScRiPt:window.hacked=1)",
    "[data](data:text/html,<script>window.hacked=1</script>)",
    "[vb](vbscript:msgbox)",
    "[file](file:///etc/passwd)",
    "[here](/v1/models)",
    "[view](#swarm=x)",
    "<javascript:window.hacked=1>",
]
LOADED = "return performance.getEntriesByType('resource').map((one) => one.name)"
ATTRIBUTES = """return [...new Set([...document.querySelectorAll('.assistant .text *')].flatMap(
    (e) => [...e.attributes].map((a) => a.name)))].sort()"""


def shown(page: Page, api: FakeApi, text: str) -> None:
    api.answers = [Answer([text])]
    page.open().say("Hello")
    page.wait(lambda: page.is_shown("#again"), "no answer")


def test_markdown_becomes_elements(page: Page, api: FakeApi) -> None:
    shown(page, api, RICH)
    one = {
        "h3": "Plan",
        "strong": "bold",
        "em": "slanted",
        "s": "gone",
        "p code": "code",
        "ul ol li:last-child": "more",
        "ol[start='3'] > li": "third",
        "blockquote": "quoted",
        "td[align=right]": "1",
        "figure pre": 'print("<b>1 & 2</b>")',
        "figcaption span": "python",
    }
    assert {name: page.one(f".text {name}").text for name in one} == one
    links = [(one.text, one.get_attribute("href")) for one in page.all(".text a")]
    assert links == [
        ("the docs", "https://example.org/a?b=c"),
        ("https://example.com/plain", "https://example.com/plain"),
    ]
    assert page.all(".text br"), "the line break is lost"


def test_nothing_of_a_hostile_answer_runs_or_loads(page: Page, api: FakeApi) -> None:
    pictures = "![a](https://evil.test/a.png) ![b](data:image/svg+xml,<svg/onload=hacked=1>) [![c](//evil.test/c)](//d)"
    ticks = f'```" onmouseover=hacked=1 style=x\n{HOSTILE[0]}\n```'
    shown(page, api, "\n\n".join([*HOSTILE, *LINKS, pictures, ticks, f"| {HOSTILE[1]} |\n|---|\n| {HOSTILE[0]} |"]))
    page.run("document.querySelectorAll('.assistant .text *').forEach((e) => e.dispatchEvent(new Event('mouseover')))")
    assert page.run("return window.hacked") is None
    assert page.one("#prompt").tag_name == "textarea"
    text = page.one(".assistant .text").get_attribute("textContent")
    for source in HOSTILE:
        assert source.split("title=")[0][:60] in text, "it is not shown as what it is"
    kinds = page.run(
        "return [...new Set([...document.querySelectorAll('.assistant .text *')].map((e) => e.localName))].sort()"
    )
    ours = {"a", "button", "code", "div", "figcaption", "figure", "p", "pre", "span"}
    assert set(kinds) <= ours | {"br", "table", "tbody", "td", "th", "thead", "tr"}
    styled = {"aria-label", "class", "href", "rel", "role", "tabindex", "target", "title", "type"}
    assert set(page.run(ATTRIBUTES)) <= styled
    [link] = page.all(".assistant .text a[href]")
    assert (link.text, link.get_attribute("href")) == ("a", "https://evil.test/a.png")
    assert [name for name in page.run(LOADED) if not name.startswith(f"{api.address}/")] == []


def test_a_link_leaves_no_trace_and_says_where_it_goes(page: Page, api: FakeApi) -> None:
    shown(page, api, '[https://bank.test](https://evil.test/ "bank.test") <me@example.org>')
    link, mail = page.all(".text a")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert link.get_attribute("target") == "_blank"
    assert link.get_attribute("title") == "https://evil.test/"
    assert mail.get_attribute("href") == "mailto:me@example.org"


@pytest.mark.parametrize("source", HOSTILE)
def test_the_sanitizer_holds_without_the_parser(page: Page, source: str) -> None:
    page.open()
    left = page.driver.execute_async_script(
        "const [source, done] = arguments; import('/page/markdown.js').then(({ clean }) => {"
        "document.querySelector('#welcome').append(clean(source)); setTimeout(() => done(["
        "window.hacked, [...document.querySelectorAll('#welcome > :not(h2, p, .tries)')].map((e) => e.outerHTML)]), 50)"
        "})",
        source,
    )
    # The policy reports what it would have stopped while the sanitizer looks at it.
    page.faults()
    assert left[0] is None
    for word in (
        "<script",
        "<img",
        "<svg",
        "<iframe",
        "<style",
        " style",
        "<form",
        " on",
        "<meta",
        "<base",
        " id",
        "javascript",
    ):
        assert word not in "".join(left[1]), left


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("> " * 20_000 + "deep", id="quotes"),
        pytest.param("".join(f"{'  ' * level}- {level}\n" for level in range(150)), id="lists"),
        pytest.param("[" * 20_000 + "x" + "](y)" * 20_000, id="brackets"),
        pytest.param("*a **a " * 15_000, id="emphasis"),
        pytest.param("`" * 10_000 + " x " + "``` \n" * 5_000, id="ticks"),
        pytest.param("|a" * 5_000 + "\n" + "|-" * 5_000 + "\n" + "|b\n" * 100, id="table"),
        pytest.param("x " * 150_000, id="long"),
    ],
)
def test_huge_and_deep_answers_are_drawn_in_time(page: Page, api: FakeApi, text: str) -> None:
    shown(page, api, text)
    depth = page.run(
        "let deepest = 0; for (let e of document.querySelectorAll('.assistant .text *')) { let depth = 0;"
        "for (; e.closest('.text'); e = e.parentElement) depth += 1;"
        "deepest = Math.max(deepest, depth) } return deepest"
    )
    assert depth < 60
    assert page.run("return document.querySelector('.assistant .text').textContent.length") > 500


def test_a_block_of_code_is_copied_by_its_button(page: Page, api: FakeApi) -> None:
    page.open()
    page.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    shown(page, api, "One:\n```sh\nls -l\n```\n- two:\n  ```\n  a\n\n    b\n  ```\n")
    first, second = page.all(".code .copy")
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done)"
    for button, code in ((first, "ls -l"), (second, "a\n\n  b")):
        button.click()
        page.wait(lambda button=button: button.text == "Copied", "it is not copied")
        assert page.driver.execute_async_script(read) == code


def test_text_that_arrives_changes_no_block_before_it(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("First **block**.\n\n```py\na = 1\n", "b = 2\n```\n\n- item", "s\n- more"), hold_after=1)]
    page.open().say("Hello")
    page.wait(lambda: page.all(".text .code"), "the code does not come")
    # An open block of code is code already; the marks prove later that its elements stayed.
    page.run("document.querySelectorAll('.text *').forEach((e) => e.mark = e.localName)")
    page.run("getSelection().selectAllChildren(document.querySelector('.text strong'))")
    api.going_on.set()
    page.wait(lambda: page.is_shown("#again"), "no answer")
    assert page.one(".text pre").text == "a = 1\nb = 2"
    kept = page.run(
        "return ['p', 'strong', 'pre', 'code', 'button'].map((e) => document.querySelector(`.text ${e}`).mark)"
    )
    assert kept == ["p", "strong", "pre", "code", "button"]
    assert page.run("return getSelection().toString()") == "block"
    assert [one.text for one in page.all(".text li")] == ["items", "more"]


def test_a_heading_is_not_made_by_the_list_that_begins_below_it(page: Page, api: FakeApi) -> None:
    api.answers = [Answer(("Reasons:\n-", " one"), hold_after=1)]
    page.open().say("Hello")
    page.wait(lambda: "Reasons:" in "".join(page.answers), "the answer does not begin")
    assert not page.all(".text h4")
    api.going_on.set()
    page.wait(lambda: page.all(".text li"), "no list")
