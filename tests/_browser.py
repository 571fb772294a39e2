"""A headless Chromium, and what a visitor does in it. Everything waits for what it needs to see; nothing sleeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

PACKAGES = ("chromium", "chromium-driver")  # Debian's
PATIENCE = 40  # seconds; a picture is there in one or two, and on a busy machine of two cores in ten
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
_SHOWN = """
return [...document.querySelectorAll(arguments[0] + ' img')].filter(i => i.complete && i.naturalWidth > 0 && i.offsetWidth > 0)
    .map(i => [i.naturalHeight, i.naturalWidth])
"""


def missing() -> str | None:
    """What a machine lacks to run a browser; `None` if nothing."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not lacking:
        return None
    return f"no {' and no '.join(lacking)} here: apt-get install {' '.join(PACKAGES)}; or without: -m 'not gpu and not browser'"


def chromium(folder: Path, width: int = 1280, height: int = 900, mobile: bool = False) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if mobile:
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2}})
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


class Visitor:
    """Somebody with the page open."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.get("about:blank")
        driver.get_log("browser")  # what the page before this one said when it was left in the middle of something
        driver.get(url)
        self.wait(lambda: self.text("verdict"))

    def wait(self, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
        """For the page's own changes; a moment in which Gradio replaces an element is no answer."""
        until = WebDriverWait(self.driver, patience, poll_frequency=0.05, ignored_exceptions=[StaleElementReferenceException])
        return until.until(lambda _: condition())

    def text(self, place: str) -> str:
        found = self.driver.find_elements(By.ID, place)
        return found[0].text if found else ""

    def reads(self, place: str, *words: str) -> str:
        """Waits until all of these words are there."""
        try:
            return self.wait(lambda: (said := self.text(place)) and all(word in said for word in words) and said)
        except Exception as error:
            raise AssertionError(f"{words} are not in #{place}, which says: {self.text(place)!r}") from error

    def write(self, place: str, value: str) -> None:
        field = self.wait(lambda: self.field(place))
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(value)
        self.wait(lambda: self.field(place).get_attribute("value") == value)

    def value(self, place: str) -> str:
        return self.field(place).get_attribute("value") or ""

    def field(self, place: str) -> Any:
        return self.driver.find_element(
            By.CSS_SELECTOR, f"#{place} textarea, #{place} input[type=text], #{place} input[type=number]"
        )

    def press(self, place: str) -> None:
        button = self.wait(lambda: self.driver.find_element(By.CSS_SELECTOR, f"button#{place}, #{place} button, #{place} input"))
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        self.wait(button.is_enabled)
        button.click()

    def choose(self, place: str, words: str) -> None:
        """A radio button, by what stands beside it."""
        path = f"//*[@id='{place}']//label[contains(., '{words}')]"
        label = self.wait(lambda: self.driver.find_element(By.XPATH, path))
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", label)
        label.click()
        self.wait(lambda: self.driver.find_element(By.XPATH, path + "//input").is_selected())

    def pictures(self, place: str) -> list[list[int]]:
        """Height and width of those that are there to be seen."""
        return self.driver.execute_script(_SHOWN, f"#{place}")

    def complaints(self) -> list[str]:
        """What the browser's own console holds of errors."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def sources(self, place: str) -> list[str]:
        return [image.get_attribute("src") for image in self.driver.find_elements(By.CSS_SELECTOR, f"#{place} img")]

    def width(self) -> int:
        """Of the whole page, what lies beside the window included."""
        return self.driver.execute_script("return document.documentElement.scrollWidth")
