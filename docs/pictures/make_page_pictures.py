"""Takes the pictures of the page in Chromium, light, dark and as wide as a phone: ``make page-pictures``.

Answers and swarm are made up, by the API of the tests in a browser.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent / "tests" / folder) for folder in ("browser", "unit/web")]

from fake_api import Answer, FakeApi, broken, healthy  # noqa: E402
from page_kit import Page, new_driver  # noqa: E402
from PIL import Image  # noqa: E402
from web_kit import served  # noqa: E402

LOOKS = {
    "light": {"width": 1100, "height": 760, "scale": 1.5},
    "dark": {"width": 1100, "height": 760, "scale": 1.5, "dark": True},
    "phone": {"width": 360, "height": 740, "scale": 2.0},
}
QUESTION = "Why is the sky blue? Answer in two sentences."
ANSWER = (
    "Sunlight is a mixture of all colors, and the molecules of the air scatter its short blue waves far more than its "
    "long red ones. So blue light reaches your eyes from every direction of the sky, and the rest passes straight on."
)
CODE = """The strength grows with the **fourth power** of the inverse wavelength:

| Light | Wavelength | Scattered |
|-------|-----------:|----------:|
| red   | 700 nm     | 1.0       |
| blue  | 450 nm     | 5.9       |

```python
def scattering(wavelength_nm):
    return (700 / wavelength_nm) ** 4
```"""
EARLIER = ["Suggest three names for a cat that sleeps on a router.", "Write a haiku about the sea."]


def words(text: str) -> list[str]:
    """Cuts a text as a model does that makes one word at a time."""
    first, *others = text.split(" ")
    return [first, *(f" {word}" for word in others)]


def take(page: Page, name: str) -> None:
    """Writes what the browser shows."""
    shown = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
    path = HERE / f"{name}.png"
    # A third of the size, and looks the same: a page has few colors.
    image = Image.open(io.BytesIO(base64.b64decode(shown["data"]))).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")  # noqa: T201


def main() -> None:
    """Takes both views in every look."""
    with tempfile.TemporaryDirectory() as profile:
        driver = new_driver(Path(profile))
        try:
            for look, size in LOOKS.items():
                state = broken() if look == "dark" else healthy()
                earlier = [Answer()] * len(EARLIER)
                api = FakeApi([*earlier, Answer(words(ANSWER)), Answer(words(CODE))], state=state)
                with served(api.app()) as api.address:
                    page = Page(driver, api.address)
                    page.look(**size)
                    page.open()
                    for text in EARLIER:
                        page.say(text)
                        page.wait(lambda page=page: page.is_shown("#again"), "no answer")
                        page.click("#new")
                    page.say(QUESTION)
                    page.wait(lambda page=page: page.is_shown("#again"), "no answer")
                    page.say("Show me that as code.")
                    page.wait(lambda page=page: len(page.answers) == 2 and page.is_shown("#again"), "no answer")
                    page.click("#prompt")
                    take(page, f"talk-{look}")
                    page.open("swarm").wait_text("#freshness", "Live")
                    take(page, f"swarm-{look}")
                    driver.get("about:blank")
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
